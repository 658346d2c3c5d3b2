"""Only a norm that computes what `F.rms_norm` computes is replaced by it."""

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from modelpool.fast.lean_norm import LeanRMSNorm, replace_norms


def llama(eps: float = 1e-6, dtype: torch.dtype = torch.float32) -> nn.Module:
    norm: nn.Module = LlamaRMSNorm(48, eps=eps)
    for weight in norm.parameters():
        nn.init.uniform_(weight, 0.7, 1.3)
    return norm.to(dtype)


class _CentredRMSNorm(nn.Module):
    """A norm of another kind under the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(48))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, (48,), self.weight, eps=self.eps)


class _DoubledEpsilonRMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None
        return nn.functional.rms_norm(x, (48,), self.weight, 2 * self.eps)


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-6 / 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_norm_is_replaced(eps: float, dtype: torch.dtype) -> None:
    model = nn.Sequential(llama(eps, dtype))
    x = torch.randn(5, 48).to(dtype)
    expected = model(x)
    assert replace_norms(model) == 1
    assert isinstance(model[0], LeanRMSNorm)
    assert torch.allclose(model(x), expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)
    assert sum(parameter.numel() for parameter in model.parameters()) == 48


def test_what_computes_something_else_stays() -> None:
    hooked = llama()
    hooked.register_forward_hook(lambda module, inputs, output: output + 1)
    others = [
        Gemma2RMSNorm(48),  # 1 + weight
        _CentredRMSNorm(),
        _DoubledEpsilonRMSNorm(48, eps=1e-6),
        nn.LayerNorm(48),
        llama(dtype=torch.float64),
        hooked,
    ]
    model = nn.Sequential(*others)
    assert replace_norms(model) == 0
    assert list(model) == others
