"""PackLayout: places of a pass's index arrays in one buffer of int32.

Contract: a pass has eight arrays, which are laid out on the host and copied to the device at once.
A layout may be larger than a pack: its arrays are then padded by repeating their last entries, and
paths by zeros that are never read. Arrays that only the device knows (the tokens of a draft and
their paths) are left out on the host, and filled in on the device.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelpool.attention.path import KeyPaths, PackPlaces
from modelpool.fast.layer_reference import PackInputs
from modelpool.forward import HiddenLayers

_ALIGNED = 4  # numbers, 16 bytes: Triton builds separate kernels for other addresses

_Array = Tensor | NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Pack:
    """Input of a forward over T tokens, on the host unless only the device knows it."""

    tokens: Tensor  # [T] of integers
    places: PackPlaces
    logit_index: Tensor  # [n] of integers, the tokens whose logits are wanted
    hidden: HiddenLayers = ()

    @property
    def path_width(self) -> int:
        return 1 if self.places.path is None else self.places.path.shape[1]

    def arrays(self) -> tuple[_Array, ...]:
        """Return the arrays in the order of a layout."""
        path: _Array | None = self.places.path
        if path is None:
            path = np.zeros((len(self.tokens), 1), dtype=np.int32)
        return self.tokens, *self.places.numbers, self.logit_index, path, self.places.tables


@dataclass(frozen=True, kw_only=True)
class PackLayout:
    """Sizes of a pass's arrays, each at least 1 if there are tokens.

    There are T `tokens` with paths of P `path` steps, n `logits`, and tables of R `rows` with N
    `blocks` of `block_slots`.
    """

    tokens: int
    path: int
    logits: int
    rows: int
    blocks: int
    block_slots: int

    @classmethod
    def of(cls, pack: Pack) -> "PackLayout":
        """Return the layout that a pack fills exactly."""
        rows, blocks = pack.places.tables.shape
        return cls(
            tokens=len(pack.tokens),
            path=pack.path_width,
            logits=len(pack.logit_index),
            rows=rows,
            blocks=blocks,
            block_slots=pack.places.block_slots,
        )

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of tokens, slots, rows, positions, tails, logit index, paths and tables."""
        own = *[(self.tokens,)] * 5, (self.logits,), (self.tokens, self.path)
        return *own, (self.rows, self.blocks)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Offsets of the arrays, and the end of the last one."""
        sizes = [-(-int(np.prod(shape)) // _ALIGNED) * _ALIGNED for shape in self.shapes]
        return tuple(int(start) for start in np.cumsum([0, *sizes]))

    @property
    def size(self) -> int:
        """Numbers in the buffer."""
        return self.starts[-1]

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the arrays in a buffer [size or more] of int32."""
        return [
            buffer.narrow(0, start, int(np.prod(shape))).view(shape)
            for start, shape in zip(self.starts, self.shapes, strict=False)
        ]

    def inputs(self, buffer: Tensor, longest: int) -> PackInputs:
        """Return the input of a forward as views of a buffer; for `longest` see `KeyPaths`."""
        tokens, slots, rows, positions, tails, logit_index, path, tables = self.views(buffer)
        paths = KeyPaths(
            rows=rows,
            positions=positions,
            tails=tails,
            path=path,
            tables=tables,
            block_slots=self.block_slots,
            longest=longest,
        )
        return PackInputs(tokens, slots, paths, logit_index)

    def fill(self, host: NDArray[np.int32], pack: Pack) -> None:
        """Write the arrays that the host knows into a host buffer."""
        for start, shape, values in zip(self.starts, self.shapes, pack.arrays(), strict=False):
            there = host[start : start + int(np.prod(shape))].reshape(shape)
            if isinstance(values, np.ndarray):
                _fill(there, values)
            elif values.device.type == "cpu":
                _fill(there, values.numpy())

    def fill_rest(self, there: Tensor, pack: Pack) -> None:
        """Write the arrays that only the device knows into a device buffer with the others."""
        for view, values in zip(self.views(there), pack.arrays(), strict=True):
            if isinstance(values, Tensor) and values.device.type != "cpu":
                _fill_on_device(view, values)


def _fill(there: NDArray[np.int32], values: NDArray[np.generic]) -> None:
    count = len(values)
    if there.ndim == 1:
        there[:count] = values
    else:
        there[:count, : values.shape[1]] = values
        there[:count, values.shape[1] :] = 0
    if 0 < count < len(there):
        there[count:] = there[count - 1]


def _fill_on_device(there: Tensor, values: Tensor) -> None:
    count = len(values)
    own = there.narrow(0, 0, count)
    if there.dim() > 1:
        width = values.shape[1]
        own.narrow(1, width, there.shape[1] - width).zero_()
        own = own.narrow(1, 0, width)
    own.copy_(values)
    if 0 < count < len(there):
        rest = there.narrow(0, count, len(there) - count)
        rest.copy_(there.narrow(0, count - 1, 1).expand_as(rest))


def buffer_on(device: torch.device, layout: PackLayout) -> Tensor:
    """Return [size] int32, not initialised."""
    return torch.empty(layout.size, dtype=torch.int32, device=device)
