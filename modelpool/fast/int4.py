"""Linear layers whose weights are in 4 bits, for the CPU: half the bytes of int8.

Contract: as `Int8Weight` of the same levels, to the bit, whatever the kernel, the rows beside, and
the threads (`modelpool/kernels/linear.c`). Without kernels, or with some that compute something
else, weights are expanded to int8, with the same bits. Blocks of GGUF files are taken as they are,
by the kernels alone.
"""

import ctypes
import logging
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from modelpool.checkpoint.block_values import BlockValues
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
        bias: Tensor | None,
        kernels: LinearKernels,
        block: int = 0,
        **packed: Tensor,
    ) -> None:
        """
        Args:
            given: inputs.
            units: [out] float32, a level's worth.
            bias: [out].
            block: groups that share `halves`.
            packed: what the panels hold, which are full, by its name in the library.
        """
        self.in_features, self.out_features = given, len(units)
        self._kernels, self.others = kernels, list[PanelWeight]()
        outputs = -len(units) % _PANEL  # that are missing in the last panel
        parts = {name: _aligned(each) for name, each in packed.items()}
        parts["units"] = F.pad(units / INT8_LEVELS, (0, outputs))
        if bias is not None:
            parts["bias"] = F.pad(bias.detach().float(), (0, outputs))
        self._parts = parts  # whose memory the kernels read
        pointers = {name: each.data_ptr() for name, each in parts.items()}
        sizes = {"inputs": given + _missing(given), "given": given, "outputs": len(units)}
        self.described = LayerWeight(**pointers, **sizes, block=block)  # for the library

    def followed_by(self, others: "Sequence[PanelWeight]") -> "PanelWeight":
        """With the outputs of `others`, of the same inputs, behind its own."""
        for one, after in pairwise((self, *others)):
            one.described.next = ctypes.addressof(after.described)
            self.out_features += after.out_features
            self.others.append(after)
        return self

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
            bias,
            kernels,
            offsets=128 * torch.sum(levels, dim=1, dtype=torch.int32),
            nibbles=_panels(nibbles),
            scales=_by_panel(scales),
            centres=_by_panel(centres),
        )


class BlockWeight(PanelWeight):
    """Blocks of a GGUF file as they are. A group's sum is exact; groups are added in float32."""

    def __init__(
        self, parts: Sequence[BlockValues], bias: Tensor | None, kernels: LinearKernels
    ) -> None:
        """`parts` have the same inputs, in blocks of the same size; `bias` [out] is of all."""
        nibbles = torch.cat([part.nibbles for part in parts])
        outputs, given = len(nibbles), nibbles.shape[1]
        more, missing = -outputs % _PANEL, _missing(given)
        of_groups = {
            name: torch.cat(found)
            for name in ("scales", "centres")
            if (found := [one for part in parts if (one := getattr(part, name)) is not None])
        }
        halves = torch.stack(
            [torch.cat([getattr(part, name) for part in parts]) for name in ("steps", "bases")]
        )
        block = parts[0].groups_of_block
        halves = F.pad(halves, (0, -(-missing // GROUP // block), 0, more))
        panels = halves.view(2, -1, _PANEL, halves.shape[2]).permute(1, 3, 0, 2)
        super().__init__(
            given,
            torch.ones(outputs),
            bias,
            kernels,
            block,
            nibbles=_panels(F.pad(nibbles, (0, missing, 0, more))),
            halves=panels.contiguous(),
            **{
                name: _by_panel(F.pad(one, (0, missing // GROUP, 0, more)))
                for name, one in of_groups.items()
            },
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
            bias,
            kernels,
            offsets=128 * torch.sum(levels, dim=1, dtype=torch.int32),
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
        return all(
            torch.equal(weight.multiply(x[:rows]), expected[:rows])
            for weight, x, expected in _trials(kernels)
            for rows in (1, 19, 33)
        )


def _trials(kernels: LinearKernels) -> Iterator[tuple[PanelWeight, Tensor, Tensor]]:
    """Weights, some rows, and what comes of them by whole numbers."""
    draws = torch.Generator().manual_seed(0)
    values = Int4Values.of(torch.randn(70, 100, generator=draws))
    x = torch.randn(33, 100, generator=draws)
    levels, largest = quantise_rows(x)
    expanded = values.expanded()
    sums = (levels.long() - 128) @ expanded.levels.long().t()
    expected = sums.float() * (expanded.scales / INT8_LEVELS) * largest
    yield Int4Weight([values], None, kernels), x, expected
    yield Int8PanelWeight([expanded], None, kernels), x, expected
    x = torch.randn(33, 256, generator=draws)
    levels, largest = quantise_rows(x)
    nibbles = torch.randint(16, (70, 256), generator=draws, dtype=torch.uint8)
    of_groups = [torch.randint(64, (70, 8), generator=draws, dtype=torch.uint8) for _ in range(2)]
    for blocks, parts in ((8, []), (1, of_groups)):
        halves = torch.rand(2, 70, blocks, generator=draws).half()
        values_in_blocks = BlockValues(nibbles, *halves, *parts)
        sums = values_in_blocks.multiply(levels.long() - 128) * (torch.ones(70) / INT8_LEVELS)
        yield BlockWeight([values_in_blocks], None, kernels), x, sums * largest


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
