"""RMSNorm in one call of torch, for drafters on the CPU.

transformers spells it out in seven operations, and one call takes a fifth less. A module is
replaced only where a trial says that both compute the same, so `1 + weight` (Gemma) or
a norm of another kind stays. Sums are in another order: not for a target, whose bits are
transformers'.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelpool.fast.linear import is_hooked

_TRIAL_ROWS = 4
_TOLERANCE = 1e-5  # of the largest value of a row, in float32


class LeanRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., n] to [..., n]"""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def replace_norms(model: nn.Module) -> int:
    """Replaces, in place, each RMSNorm of `model` that is `LeanRMSNorm`; how many those were.

    Modules in float64 stay: transformers' norms round to float32 there, `F.rms_norm` does not.
    """
    lean: dict[nn.Module, LeanRMSNorm] = {}  # one norm may stand in several places
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            found = lean.get(child) or _equivalent(child)
            if found is not None:
                lean[child] = found
                setattr(parent, name, found)
    return len(lean)


def _equivalent(norm: nn.Module) -> LeanRMSNorm | None:
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not type(norm).__name__.endswith("RMSNorm") or not isinstance(eps, float):
        return None
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1:
        return None
    if weight.device.type != "cpu" or weight.dtype == torch.float64:
        return None
    if is_hooked(norm):
        return None
    return LeanRMSNorm(weight, eps) if _is_same(norm, weight, eps) else None


def _is_same(norm: nn.Module, weight: Tensor, eps: float) -> bool:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_TRIAL_ROWS, len(weight), generator=generator)
    x[::2] *= max(eps, 1e-30) ** 0.5  # rows so quiet that epsilon decides
    with torch.inference_mode():
        expected = norm(x)
        found = F.rms_norm(x, weight.shape, weight.float(), eps)
        if not isinstance(expected, Tensor) or expected.shape != found.shape:
            return False
        scale = expected.abs().amax(-1, keepdim=True)
        return bool(((expected - found).abs() <= _TOLERANCE * scale).all())
