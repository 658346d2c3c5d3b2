"""Linear layers whose weights are in 4 bits, for the CPU: half the bytes of int8.

Contract: as `Int8Weight` of the same levels, to the bit, whatever the kernel, the rows beside, and
the threads (`modelpool/kernels/linear.c`). Without kernels, or with some that compute something
else, weights are expanded to int8, with the same bits.
"""

import logging
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from modelpool.checkpoint.int4_values import GROUP, Int4Values
from modelpool.checkpoint.int8_values import INT8_LEVELS, Int8Values
from modelpool.fast.cpu import cpu_threads, int8_refusal
from modelpool.fast.int8 import quantise_rows
from modelpool.kernels.library import LayerWeight, LinearKernels, linear_kernels

logger = logging.getLogger(__name__)

_PANEL = 32  # outputs
_ALIGNED = 64  # bytes, and inputs of a layer


class PanelWeight:
    """The weights of one layer, or of several side by side, as the kernels read them: in panels of
    32 outputs."""

    def __init__(
        self,
        given: int,
        units: Tensor,
        offsets: Tensor,
        bias: Tensor | None,
        kernels: LinearKernels,
        **packed: Tensor,
    ) -> None:
        """
        Args:
            given: inputs.
            units: [out] float32, a level's worth.
            offsets: [out] int32, what levels around 128 add to the sums; panels are full.
            bias: [out].
            packed: what the panels hold, by its name in the library.
        """
        self.in_features, self.out_features = given, len(units)
        self._kernels = kernels
        outputs = len(offsets) - len(units)  # that are missing in the last panel
        parts = {name: _aligned(each) for name, each in packed.items()}
        parts |= {"offsets": offsets, "units": F.pad(units / INT8_LEVELS, (0, outputs))}
        if bias is not None:
            parts["bias"] = F.pad(bias.detach().float(), (0, outputs))
        self._parts = parts  # whose memory the kernels read
        pointers = {name: each.data_ptr() for name, each in parts.items()}
        self.described = LayerWeight(  # for the library
            **pointers, inputs=given + _missing(given), given=given, outputs=len(units)
        )

    def multiply(
        self, x: Tensor, dtype: torch.dtype | None = None, kernel: str | None = None
    ) -> Tensor:
        """[..., in] to [..., out], for any leading shape; `dtype` is by default that of `x`.

        Args: `kernel`: one of the library's, by name.
        """
        shape, wanted = (*x.shape[:-1], self.out_features), dtype or x.dtype
        if not x.numel():
            return x.new_empty(shape, dtype=wanted)
        rows = x.reshape(-1, self.in_features)
        if rows.dtype not in (torch.float32, torch.bfloat16):
            rows = rows.float()
        is_told = wanted in (torch.float32, torch.bfloat16)
        y = torch.empty(len(rows), self.out_features, dtype=wanted if is_told else torch.float32)
        self._kernels.multiply(self.described, rows.contiguous(), y, kernel)
        return y.to(wanted).view(shape)


class Int4Weight(PanelWeight):
    def __init__(
        self, parts: Sequence[Int4Values], bias: Tensor | None, kernels: LinearKernels
    ) -> None:
        """`parts` have the same inputs; `bias` [out] is of all their outputs."""
        nibbles, scales, centres, units = (
            torch.cat([getattr(part, name) for part in parts])
            for name in ("nibbles", "scales", "centres", "units")
        )
        outputs, given = -len(nibbles) % _PANEL, nibbles.shape[1]
        # Levels of inputs that are not there are some that fit int8: activations are 0 there.
        more = nibbles[:, -1:].expand(-1, _missing(given))
        nibbles = F.pad(torch.cat((nibbles, more), dim=1), (0, 0, 0, outputs))
        groups = nibbles.shape[1] // GROUP - scales.shape[1]
        scales, centres = (F.pad(each, (0, groups, 0, outputs)) for each in (scales, centres))
        sums = nibbles.reshape(*scales.shape, GROUP).sum(dim=2, dtype=torch.int32)
        levels = sums * scales.int() - GROUP * centres.int()
        super().__init__(
            given,
            units,
            128 * torch.sum(levels, dim=1, dtype=torch.int32),
            bias,
            kernels,
            nibbles=_panels(nibbles),
            scales=_by_panel(scales),
            centres=_by_panel(centres),
        )


class Int8PanelWeight(PanelWeight):
    """Weights in int8 for the same kernels, which are exact also where oneDNN is not."""

    def __init__(
        self, parts: Sequence[Int8Values], bias: Tensor | None, kernels: LinearKernels
    ) -> None:
        """As `Int8Weight`."""
        levels = torch.cat([part.levels for part in parts])
        given = levels.shape[1]
        levels = F.pad(levels, (0, _missing(given), 0, -len(levels) % _PANEL))
        steps = levels.reshape(len(levels) // _PANEL, 2, 16, -1, 4)  # panel, half, output, step
        super().__init__(
            given,
            torch.cat([part.scales for part in parts]),
            128 * torch.sum(levels, dim=1, dtype=torch.int32),
            bias,
            kernels,
            levels=steps.transpose(2, 3).contiguous(),
        )


def _missing(inputs: int) -> int:
    return -inputs % _ALIGNED


@cache
def exact_kernels() -> LinearKernels | None:
    """Of this process; None: there are none that have int8's bits."""
    found = linear_kernels()
    if found is None or is_exact(found):
        return found
    logger.warning("int4 is computed in int8: the kernel %s has other bits here", found.name)
    return None


def is_exact(kernels: LinearKernels) -> bool:
    """Does the kernel in use compute what whole numbers say, for few rows and for many?"""
    with cpu_threads(1):  # as in `int8_refusal`: whoever asks must not come to have workers
        draws = torch.Generator().manual_seed(0)
        values = Int4Values.of(torch.randn(70, 100, generator=draws))
        x = torch.randn(33, 100, generator=draws)
        levels, largest = quantise_rows(x)
        expanded = values.expanded()
        sums = (levels.long() - 128) @ expanded.levels.long().t()
        expected = sums.float() * (expanded.scales / INT8_LEVELS) * largest
        weights = Int4Weight([values], None, kernels), Int8PanelWeight([expanded], None, kernels)
        return all(
            torch.equal(weight.multiply(x[:rows]), expected[:rows])
            for weight in weights
            for rows in (1, 19, 33)
        )


def quantised_refusal() -> str | None:
    """Why this CPU can serve neither int8 nor int4, or None."""
    reason = int8_refusal()
    return None if reason is None or exact_kernels() is not None else reason


def _panels(nibbles: Tensor) -> Tensor:
    """[out, in] to [panels, groups, 2, 4, 64]: in a byte the nibbles of two inputs, four apart."""
    # panel, half, output, group, step, nibble, input
    steps = nibbles.reshape(len(nibbles) // _PANEL, 2, 16, -1, 4, 2, 4)
    ordered = steps.permute(0, 3, 1, 4, 2, 6, 5)
    return torch.bitwise_or(ordered[..., 0], ordered[..., 1] << 4).contiguous()


def _by_panel(of_groups: Tensor) -> Tensor:
    """[out, groups] to [panels, groups, 32]."""
    panels = of_groups.reshape(len(of_groups) // _PANEL, _PANEL, -1)
    return panels.transpose(1, 2).contiguous()


def _aligned(tensor: Tensor) -> Tensor:
    """Its bytes, from a multiple of 64 on, and behind them what kernels fetch ahead."""
    size = tensor.numel() * tensor.element_size()
    memory = torch.empty(size + _ALIGNED, dtype=torch.uint8)
    start = -memory.data_ptr() % _ALIGNED
    found = memory[start : start + size]
    return found.copy_(tensor.view(torch.uint8).flatten())
