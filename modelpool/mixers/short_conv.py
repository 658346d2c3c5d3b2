"""Gated short convolutions over packs: LFM2. Such a layer keeps only a row's last inputs."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from modelpool.attention.kv_view import KVView
from modelpool.mixers.convolution import convolve


def project(module: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    """Return the gates before and after a convolution, and its input, [T, hidden] each."""
    parts: tuple[Tensor, ...] = module.in_proj(hidden)[0].chunk(3, dim=-1)
    return parts


def mix(module: Any, view: KVView, projected: Sequence[Tensor]) -> Tensor:
    """Compute `Arithmetic.mix`, like `ShortConv` of transformers."""
    before, after, x = projected
    return after * convolve(view, module.layer_idx, before * x, module.conv)
