"""Rows of a pack over an arena, with texts and trees, and what each token sees, written out."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from modelpool.attention.pages import PackRows
from modelpool.attention.path import NO_TAIL, KeyPaths

SPARE = 16  # slots between the rows of a `Pack`, which nobody sees
NOT_LOOKED_AT = 10**6  # in the paths of a tree
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Row:
    """After `gap` slots of nobody: `cached` slots, then those of the pack's tokens of the row,
    `texts` and the nodes of a tree. `parents`: of the nodes, -1 for the last token before them."""

    gap: int
    cached: int
    texts: int
    parents: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.cached + self.texts + len(self.parents)

    @property
    def count(self) -> int:
        return self.texts + len(self.parents)

    def routes(self) -> list[list[int]]:
        """Of each node the nodes down to it."""
        found: list[list[int]] = []
        for node, parent in enumerate(self.parents):
            found.append([*(found[parent] if parent >= 0 else []), node])
        return found

    def held(self) -> list[dict[int, int]]:
        """Of each token of the pack, the positions of the slots of the row that it descends from,
        its own among them."""
        start = self.cached + self.texts
        texts = [{slot: slot for slot in range(self.cached + i + 1)} for i in range(self.texts)]
        prefix = {slot: slot for slot in range(start)}
        nodes = [
            prefix | {start + node: start + step for step, node in enumerate(route)}
            for route in self.routes()
        ]
        return texts + nodes


def pack_rows_of(rows: list[Row]) -> PackRows:
    counts, lengths = ([row.count for row in rows], [row.length for row in rows])
    nodes = [len(row.parents) for row in rows]
    return PackRows(np.array(counts), firsts_of(rows), np.array(lengths), np.array(nodes))


def firsts_of(rows: list[Row]) -> Ints:
    before = [0, *np.cumsum([row.gap + row.length for row in rows])]
    return np.array([start + row.gap for start, row in zip(before, rows, strict=False)], np.int64)


def paths_of(rows: list[Row]) -> KeyPaths:
    firsts, tails = list[int](), list[int]()
    positions, routes = list[int](), list[list[int]]()
    for first, row in zip(firsts_of(rows).tolist(), rows, strict=True):
        start = row.cached + row.texts
        firsts += [first] * row.count
        tails += [start if row.parents else NO_TAIL] * row.count
        positions += range(row.cached, start)
        positions += [start + len(route) - 1 for route in row.routes()]
        routes += [[]] * row.texts + row.routes()
    width = max((len(route) for route in routes), default=0) + 1
    path = np.full((len(routes), width), NOT_LOOKED_AT)
    for line, route in zip(path, routes, strict=True):
        line[: len(route)] = route
    places = torch.tensor([firsts, positions, tails], dtype=torch.int32)
    walks = torch.from_numpy(path).int()
    return KeyPaths(places[0], places[1], places[2], walks, max(positions, default=0) + 1)


def changed(paths: KeyPaths, change: Callable[[Tensor], Tensor]) -> KeyPaths:
    """With each of its tensors changed."""
    parts = paths.firsts, paths.positions, paths.tails, paths.path
    firsts, positions, tails, path = map(change, parts)
    return KeyPaths(firsts, positions, tails, path, paths.longest)


class Pack:
    """Rows with a prefix each and the nodes of a tree behind it, one token of the pack a node.

    Attributes:
        slots: of each token, its keys in order; `size`: of the arena.
    """

    def __init__(self, prefixes: tuple[int, ...], nodes: tuple[int, ...], seed: int = 0) -> None:
        random, self.seed = np.random.default_rng(seed), seed
        trees = [
            tuple(int(random.integers(-1, node)) if node else -1 for node in range(count))
            for count in nodes
        ]
        rows = [Row(SPARE, *row) for row in zip(prefixes, [0] * len(nodes), trees, strict=True)]
        self.paths, self.slots = paths_of(rows), list[list[int]]()
        for first, row in zip(firsts_of(rows).tolist(), rows, strict=True):
            for held in row.held():
                self.slots.append([first + slot for slot in sorted(held, key=held.__getitem__)])
        self.size = sum(row.gap + row.length for row in rows) + SPARE

    def tensors(
        self, kv_heads: int, group: int, dim: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, heads, dim], keys and values [slots, kv_heads, dim]."""
        random = torch.Generator().manual_seed(self.seed)
        shapes = [(len(self.slots), kv_heads * group, dim), *[(self.size, kv_heads, dim)] * 2]
        query, keys, values = (torch.randn(one, generator=random).to(dtype) for one in shapes)
        return query, keys, values

    def as_chains(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, KeyPaths]:
        """Each token as the last of a plain text, in a row of its own."""
        index = torch.tensor([slot for one in self.slots for slot in one])
        lengths = torch.tensor([len(one) for one in self.slots], dtype=torch.int32)
        firsts = (torch.cumsum(lengths, 0) - lengths).int()
        no_path, no_tail = torch.zeros_like(lengths)[:, None], torch.full_like(lengths, NO_TAIL)
        paths = KeyPaths(firsts, lengths - 1, no_tail, no_path, self.paths.longest)
        return keys[index], values[index], paths


@st.composite
def a_row(draw: st.DrawFn) -> Row:
    gap, cached = draw(st.integers(0, 3)), draw(st.integers(0, 12))
    texts, nodes = draw(st.integers(0, 6)), draw(st.integers(0, 7))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(nodes))
    return Row(gap, cached, texts, parents)


packs = st.lists(a_row(), min_size=1, max_size=5)
windows = st.none() | st.integers(1, 15)
