"""RMSNorm in one call of torch, for drafters on the CPU.

transformers computes it in seven operations, and one call takes a fifth less time. A module is
replaced only if a trial shows that both compute the same, so `1 + weight` (Gemma) or a norm of
another kind stays. Sums are in another order, so this is not for a target, whose bits are those of
transformers.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelpool.fast.linear import is_hooked

_TRIAL_ROWS = 4
_TOLERANCE = 1e-5  # relative to the largest value of a row, in float32


class LeanRMSNorm(nn.Module):
    """RMSNorm over the last axis: x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., n] to [..., n]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def replace_norms(model: nn.Module) -> int:
    """Replace, in place, each RMSNorm of `model` that equals `LeanRMSNorm`; return their number.

    Modules in float64 stay: transformers' norms round to float32 there, `F.rms_norm` does not.
    """
    lean: dict[nn.Module, LeanRMSNorm] = {}  # one norm may be used in several places
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            found = lean.get(child) or _equivalent(child)
            if found is not None:
                lean[child] = found
                setattr(parent, name, found)
    return len(lean)


def rms_scale(norm: nn.Module | None) -> tuple[Tensor, float] | None:
    """Return weight [n] and epsilon of a module that computes the same as `LeanRMSNorm`.

    For Gemma the weight is its parameter plus one. Returns None for a module that computes
    something else.
    """
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if norm is None or not type(norm).__name__.endswith("RMSNorm") or not isinstance(eps, float):
        return None
    if not isinstance(weight, Tensor) or weight.dim() != 1 or is_hooked(norm):
        return None
    plain = weight.detach()
    if type(norm) is LeanRMSNorm or _is_same(norm, plain, eps):
        return plain, eps
    more = 1.0 + plain.float()
    return (more, eps) if _is_same(norm, more, eps) else None


def _equivalent(norm: nn.Module) -> LeanRMSNorm | None:
    found = rms_scale(norm)
    weight: Any = getattr(norm, "weight", None)
    if found is None or weight.device.type != "cpu" or weight.dtype == torch.float64:
        return None
    scale, eps = found
    return LeanRMSNorm(weight, eps) if scale.data_ptr() == weight.data_ptr() else None


def _is_same(norm: nn.Module, weight: Tensor, eps: float) -> bool:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_TRIAL_ROWS, len(weight), generator=generator)
    x[::2] *= max(eps, 1e-30) ** 0.5  # rows small enough for epsilon to dominate
    x = x.to(weight.device)
    with torch.inference_mode():
        expected = norm(x)
        found = F.rms_norm(x, weight.shape, weight.float(), eps)
        if not isinstance(expected, Tensor) or expected.shape != found.shape:
            return False
        scale = expected.abs().amax(-1, keepdim=True)
        return bool(((expected - found).abs() <= _TOLERANCE * scale).all())
