"""Weights in int8: quantised here, or by a compressed-tensors checkpoint (W8A8).

Contract: these are the weights that `modelpool.checkpoint.quantization.stored_as` calls "int8".
Such a checkpoint has `X.weight` in int8 and `X.weight_scale`, one for each output channel, where
another has only `X.weight`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from modelpool.checkpoint.stored_tensors import StoredTensors

_SCALE = ".weight_scale"
_ZERO_POINT = ".weight_zero_point"
INT8_LEVELS = 127  # levels of either sign
_TINY = 1e-30  # least scale, which keeps a channel of zeros at zero


@dataclass(frozen=True, eq=False)
class Int8Values:
    """A quantised weight: `levels` [out, in] int8, times `scales` [out] float32."""

    levels: Tensor
    scales: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> "Int8Values":
        """Return `weight` [out, in] rounded: symmetric, with one scale for each output channel."""
        plain = weight.detach().float()
        scales = plain.abs().amax(dim=1).div_(INT8_LEVELS).clamp_(min=_TINY)
        levels = (plain / scales.unsqueeze(1)).round_().clamp_(-INT8_LEVELS, INT8_LEVELS)
        return cls(levels.to(torch.int8), scales)

    @property
    def out_features(self) -> int:
        return len(self.levels)

    def plain(self) -> Tensor:
        """Return the weight in float32, [out, in]."""
        return self.levels.float() * self.scales.unsqueeze(1)

    def relative_error(self, weight: Tensor) -> float:
        """Return the root mean square of the rounding errors over that of `weight` [out, in]."""
        plain = weight.detach().float()
        changed = torch.linalg.vector_norm(self.plain() - plain)
        return float(changed / torch.linalg.vector_norm(plain).clamp(min=_TINY))


def read_int8(directory: Path) -> tuple[dict[str, Tensor], Mapping[str, Int8Values]]:
    """Return all weights in floating point by their names, and the quantised ones by layer.

    Raises `ValueError` for weights that do not match the configuration, and what safetensors
    raises.
    """
    tensors = dict(StoredTensors(directory))
    quantised: dict[str, Int8Values] = {}
    for name in [name for name in tensors if name.endswith(_SCALE)]:
        layer = name.removesuffix(_SCALE)
        scale, levels = tensors.pop(name), tensors[f"{layer}.weight"]
        zero_point = tensors.pop(layer + _ZERO_POINT, None)
        _check(layer, levels, scale, zero_point)
        quantised[layer] = Int8Values(levels, scale.float().flatten())
        tensors[f"{layer}.weight"] = quantised[layer].plain().to(scale.dtype)
    alone = sorted(name for name, tensor in tensors.items() if tensor.dtype == torch.int8)
    if alone:
        raise ValueError(f"{alone[0]} is int8, and has no scales")
    return tensors, quantised


def _check(layer: str, levels: Tensor, scale: Tensor, zero_point: Tensor | None) -> None:
    if levels.dtype != torch.int8 or levels.ndim != 2 or scale.numel() != len(levels):
        raise ValueError(
            f"{layer}: weight {list(levels.shape)} in {levels.dtype} and {scale.numel()} scales "
            "are not int8 with a scale for each output channel"
        )
    if zero_point is not None and bool(zero_point.any()):
        raise ValueError(f"{layer}: its weights are not symmetric")
