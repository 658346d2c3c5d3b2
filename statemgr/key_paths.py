"""KeyPaths: where the keys of a pack's tokens lie, for attention that walks them in order.

Contract: implements `modelpool.attention.path.KeyPaths`. A row is a contiguous piece of the arena,
and its slots are in the order of positions up to its tree, whose nodes lie behind them in any order
that puts parents before children. Built on the host (`PackPlaces`), but for the paths of a tree,
which may be known on the device alone.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from statemgr.arrays import Ints

_NO_TAIL = 2**30  # a position that no token has


@dataclass(frozen=True, eq=False)
class PackTokens:
    """The T tokens of a pack, `counts[i]` consecutive ones of `rows[i]`."""

    slots: Ints  # [T] of the arena, where their keys and values go
    rows: Ints  # [R]
    counts: Ints  # [R]
    positions: Ints  # [T]
    firsts: Ints  # [R] of the arena, where the rows begin


@dataclass(frozen=True, eq=False)
class TreePaths:
    """Who descends from whom, as paths: the counterpart of `TreeMask` for what walks them.

    Row r's tree begins at slot `starts[r]` of the row, which is also its position. Token t's path
    are the slots `starts[r] + paths[t, 0]`, `starts[r] + paths[t, 1]`, and so on, down to its own;
    what stands behind that, or with a token of no tree, is not looked at.
    """

    starts: Ints  # [rows of the store]
    paths: Tensor  # [T, P] int32, on the host or on the device


@dataclass(frozen=True, eq=False)
class PackRows:
    """See `modelpool.attention.pages.PackRows`."""

    counts: Ints  # [R]
    firsts: Ints  # [R]
    lengths: Ints  # [R]
    nodes: Ints  # [R]

    @classmethod
    def of(cls, tokens: PackTokens, tree: TreePaths | None) -> "PackRows":
        """Each row has a token at least, the last of them in its highest slot."""
        lengths = tokens.slots[np.cumsum(tokens.counts) - 1] - tokens.firsts + 1
        nodes = np.zeros_like(lengths)
        if tree is not None:
            nodes = np.maximum(lengths - tree.starts[tokens.rows], 0)
        return cls(tokens.counts, tokens.firsts, lengths, nodes)


@dataclass(frozen=True, eq=False)
class KeyPaths:
    """See `modelpool.attention.path.KeyPaths`."""

    firsts: Tensor  # [T]
    positions: Tensor  # [T]
    tails: Tensor  # [T]
    path: Tensor  # [T, P]
    longest: int


@dataclass(frozen=True, eq=False)
class PackPlaces:
    """See `modelpool.attention.path.PackPlaces`."""

    numbers: NDArray[np.int32]  # [4, T]
    path: Tensor | None  # [T, P]
    longest: int

    @classmethod
    def of(cls, tokens: PackTokens, tree: TreePaths | None) -> "PackPlaces":
        numbers = np.empty((4, len(tokens.positions)), dtype=np.int32)
        slots, firsts, positions, tails = numbers
        slots[:] = tokens.slots
        firsts[:] = np.repeat(tokens.firsts, tokens.counts)
        positions[:] = tokens.positions
        tails[:] = _NO_TAIL if tree is None else np.repeat(tree.starts[tokens.rows], tokens.counts)
        is_text = positions < tails
        in_order = slots == firsts + positions
        assert in_order[is_text].all(), "slots are not in the order of positions"
        longest = int(positions.max(initial=0)) + 1
        return cls(numbers, None if tree is None else tree.paths, longest)

    def on(self, device: torch.device) -> KeyPaths:
        firsts, positions, tails = torch.from_numpy(self.numbers[1:]).to(device, non_blocking=True)
        if self.path is None:
            return KeyPaths(firsts, positions, tails, firsts.unsqueeze(1), self.longest)
        path = self.path.to(device, non_blocking=True)
        return KeyPaths(firsts, positions, tails, path, self.longest)
