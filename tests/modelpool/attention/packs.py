"""Packs of tokens of chains and trees over an arena of random keys and values."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from modelpool.attention.path import NO_TAIL

SPARE = 16  # slots between rows, which nobody sees


@dataclass(frozen=True, eq=False)
class Paths:
    """See `modelpool.attention.path.KeyPaths`."""

    firsts: Tensor
    positions: Tensor
    tails: Tensor
    path: Tensor
    longest: int

    def of(self, *which: int) -> "Paths":
        index = torch.tensor(which)
        return self._with([part[index] for part in self._parts])

    def padded(self, first: int, count: int) -> "Paths":
        """With tokens behind that attend to one slot of a row of their own."""
        put = torch.nn.functional.pad
        return Paths(
            put(self.firsts, (0, count), value=first),
            put(self.positions, (0, count)),
            put(self.tails, (0, count), value=NO_TAIL),
            put(self.path, (0, 0, 0, count)),
            self.longest + 300,
        )

    def to(self, device: torch.device) -> "Paths":
        return self._with([part.to(device) for part in self._parts])

    @property
    def _parts(self) -> tuple[Tensor, ...]:
        return self.firsts, self.positions, self.tails, self.path

    def _with(self, parts: list[Tensor]) -> "Paths":
        firsts, positions, tails, path = parts
        return Paths(firsts, positions, tails, path, self.longest)


@dataclass
class Pack:
    """Rows with a prefix each and the nodes of a tree behind it, one token of the pack a node."""

    prefixes: tuple[int, ...]
    nodes: tuple[int, ...]
    seed: int = 0
    slots: list[list[int]] = field(default_factory=list)  # of each token, its keys in order
    paths: Paths = field(init=False)
    size: int = field(init=False)  # slots of the arena

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        firsts, positions, tails, routes = [], [], [], []
        first = SPARE
        for prefix, nodes in zip(self.prefixes, self.nodes, strict=True):
            trees: list[list[int]] = []
            for node in range(nodes):
                parent = int(random.integers(-1, node)) if node else -1
                trees.append([*(trees[parent] if parent >= 0 else []), node])
            for route in trees:
                firsts.append(first)
                positions.append(prefix + len(route) - 1)
                tails.append(prefix)
                routes.append(route)
                self.slots.append([first + j for j in range(prefix)])
                self.slots[-1] += [first + prefix + node for node in route]
            first += prefix + nodes + SPARE
        self.size = first
        path = np.zeros((len(routes), max(map(len, routes))), dtype=np.int32)
        for line, route in zip(path, routes, strict=True):
            line[: len(route)] = route
        places = torch.tensor((firsts, positions, tails), dtype=torch.int32)
        walks = torch.from_numpy(path)
        self.paths = Paths(places[0], places[1], places[2], walks, max(positions) + 1)

    def tensors(
        self, kv_heads: int, group: int, dim: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, heads, dim], keys and values [slots, kv_heads, dim]."""
        random = torch.Generator().manual_seed(self.seed)
        shapes = [(len(self.slots), kv_heads * group, dim), *[(self.size, kv_heads, dim)] * 2]
        query, keys, values = (torch.randn(one, generator=random).to(dtype) for one in shapes)
        return query, keys, values

    def as_chains(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Paths]:
        """Each token as the last of a plain text, in a row of its own."""
        index = torch.tensor([slot for one in self.slots for slot in one])
        lengths = torch.tensor([len(one) for one in self.slots])
        firsts = torch.cumsum(lengths, 0) - lengths
        paths = Paths(
            firsts.int(),
            lengths.int() - 1,
            torch.full_like(firsts, NO_TAIL, dtype=torch.int32),
            torch.zeros((len(lengths), 1), dtype=torch.int32),
            self.paths.longest,
        )
        return keys[index], values[index], paths
