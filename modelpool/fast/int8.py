"""Linear layers with int8 weights and products on the CPU, at half the bytes of bfloat16.

Contract: a row has the same bits beside any other rows. Weights have one scale for each output
channel. Each row of activations is quantised with its own scale; its products with the weights are
summed in int32, which is exact, so that neither the number of rows nor blocks, threads or kernels
can change a bit. Both scales are multiplied in afterwards, element by element. So no row has to be
computed twice, unlike in `PackedLinear`.

Activations are uint8 around 128: with signed ones oneDNN uses a reference kernel on CPUs without
AMX, which is hundreds of times slower. `modelpool.fast.cpu` checks which CPUs sum exactly.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from modelpool.checkpoint.block_values import GROUP
from modelpool.checkpoint.int8_values import INT8_LEVELS, Int8Values
from modelpool.fast.row_sizes import filled

_ZERO = 128  # the unsigned level that stands for 0
_HALF = torch.tensor(_ZERO + 0.5)
_TINY = 1e-30  # the smallest scale: a row of zeros stays zero


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [T, in] to uint8 levels [T, in].

    Also returns the largest magnitude of each row, [T, 1] float32.
    """
    plain = x.float()
    largest = plain.abs().amax(dim=-1, keepdim=True).clamp_(min=_TINY)
    # Truncation rounds down: adding 0.5 gives the nearest level, between 1 and 255.
    levels = torch.add(_HALF, plain / largest, alpha=INT8_LEVELS)
    return levels.to(torch.uint8).contiguous(), largest


def rounded_to_levels(x: Tensor) -> Tensor:
    """Round activations [T, in] as kernels with a scale for each group do, in float32."""
    padded = F.pad(x.float(), (0, -x.shape[1] % GROUP)).view(-1, GROUP)
    levels, largest = quantise_rows(padded)
    rounded = (levels.float() - _ZERO) * (largest / INT8_LEVELS)
    return rounded.view(len(x), -1)[:, : x.shape[1]]


class Int8Weight:
    """Weights of one layer, or of several side by side, in oneDNN's layout."""

    others: "Sequence[Int8Weight]" = ()  # weights whose outputs follow its own

    def __init__(self, values: Int8Values, bias: Tensor | None) -> None:
        """Pack the values; `bias` is [out]."""
        self.out_features, self.in_features = values.levels.shape
        # Opaque: it can be neither moved, cast, nor stored.
        self._packed = torch.ops.onednn.qlinear_prepack(values.levels, None)
        self._scales = values.scales / INT8_LEVELS
        self._zeros = torch.zeros(self.out_features, dtype=torch.int32)
        self._bias = None if bias is None else bias.detach().float()

    def followed_by(self, others: "Sequence[Int8Weight]") -> "Int8Weight":
        """Append the outputs of `others`, which have the same inputs, and return itself."""
        self.others = others
        self.out_features += sum(one.out_features for one in others)
        return self

    def multiply(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Map [..., in] to [..., out], for any leading shape; `dtype` is by default that of `x`."""
        shape = (*x.shape[:-1], self.out_features)
        if not x.numel():
            return x.new_empty(shape, dtype=dtype)
        levels, largest = quantise_rows(x.reshape(-1, self.in_features))
        found = [one._product(levels, largest) for one in (self, *self.others)]
        y = torch.cat(found, dim=1) if self.others else found[0]
        return y.to(dtype or x.dtype).view(shape)

    def _product(self, levels: Tensor, largest: Tensor) -> Tensor:
        """Return the outputs of its own weights, in float32."""
        y: Tensor = torch.ops.onednn.qlinear_pointwise(
            filled(levels), 1.0, _ZERO, self._packed, self._scales, self._zeros, None,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        y = y[: len(levels)].mul_(largest)
        return y if self._bias is None else y.add_(self._bias)
