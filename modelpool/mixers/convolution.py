"""Causal convolutions over packs, and functions with fixed bits that mixers share.

The bits of a token must not depend on its neighbours. torch's sigmoid, silu and softplus compute
the last elements of a tensor with other code; `exp`, `log1p`, `reciprocal`, `rsqrt` and sums over a
last axis do not, so these functions are made of them.
"""

import torch
from torch import Tensor, nn

from modelpool.attention.kv_view import KVView
from modelpool.recurrent import RecurrentKind, StatePart, Tensors


class Window(RecurrentKind):
    """The kind of a convolution: a row's last inputs, `[taps - 1, channels]`, in its dtype.

    A token is its input, which is also its entry; it reads `[taps, channels]`, the last its own.
    """

    name = "window-1"

    def __init__(self, taps: int, channels: int) -> None:
        self.parts = (StatePart((taps - 1, channels)),)

    def read(self, state: Tensors, token: Tensors) -> tuple[Tensor, Tensors]:
        return torch.cat((state[0], token[0].unsqueeze(0))), token

    def advance(self, state: Tensors, entry: Tensors) -> None:
        window = state[0]
        window.copy_(torch.cat((window[1:], entry[0].unsqueeze(0))))

    def scan(self, state: Tensors, tokens: Tensors) -> Tensor:
        joined = torch.cat((state[0], tokens[0]))
        state[0].copy_(joined[len(tokens[0]) :])
        return joined.unfold(0, len(state[0]) + 1, 1).transpose(1, 2)


def convolve(view: KVView, layer: int, inputs: Tensor, conv: nn.Conv1d) -> Tensor:
    """Map [T, C] to [T, C], each channel by itself, tap after tap in float32 at least."""
    channels, taps = conv.weight.shape[0], conv.weight.shape[-1]
    windows = view.scan(layer, Window(taps, channels), (inputs,))  # [T, taps, C]
    weight = _wide(conv.weight[:, 0])
    out = _wide(windows[:, 0]) * weight[:, 0]
    for tap in range(1, taps):
        out = out + _wide(windows[:, tap]) * weight[:, tap]
    if conv.bias is not None:
        out = out + _wide(conv.bias)
    return out.to(inputs.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid, computed in float32 at least and rounded to the dtype of `x`."""
    return (1 + torch.exp(-_wide(x))).reciprocal().to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """Return SiLU, computed in float32 at least and rounded to the dtype of `x`."""
    wide = _wide(x)
    return (wide * (1 + torch.exp(-wide)).reciprocal()).to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    """Return softplus, computed in float32 at least and rounded to the dtype of `x`."""
    wide = _wide(x)
    return torch.where(wide > 20, wide, torch.log1p(torch.exp(wide.clamp(max=20)))).to(x.dtype)


def rms(x: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square over the last axis."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
