"""Rows of a pack over an arena, with texts and trees, and what each token sees, written out.

The blocks of all rows stand in the arena in any order, and between them blocks of nobody.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from modelpool.attention.kv_view import AttentionLayer
from modelpool.attention.pages import PackRows
from modelpool.attention.path import NO_TAIL, KeyPaths, PathLayout

BLOCK = 8  # slots
HEADS, KV_HEADS, DIM = 6, 2, 8  # of a `View`
NOT_LOOKED_AT = 10**6  # in the paths of a tree
Int32s = NDArray[np.int32]


@dataclass(frozen=True)
class Row:
    """`cached` slots, then those of the pack's tokens of the row, `texts` and the nodes of a tree.
    `parents`: of the nodes, -1 for the last token before them."""

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


def tables_of(rows: list[Row], seed: int = 0) -> Int32s:
    """[R, N] blocks, of twice as many as the rows have; behind a row's own ones others'."""
    counts = [max(1, -(-row.length // BLOCK)) for row in rows]
    blocks = np.random.default_rng(seed).permutation(2 * sum(counts))
    tables = np.full((len(rows), max(counts)), blocks[0], dtype=np.int32)
    for table, count, start in zip(tables, counts, np.cumsum([0, *counts]), strict=False):
        table[:count] = blocks[start : start + count]
    return tables


def size_of(rows: list[Row]) -> int:
    """Slots of the arena."""
    return 2 * BLOCK * sum(max(1, -(-row.length // BLOCK)) for row in rows)


def pack_rows_of(rows: list[Row], tables: Int32s) -> PackRows:
    counts, lengths = ([row.count for row in rows], [row.length for row in rows])
    nodes = [len(row.parents) for row in rows]
    return PackRows(np.array(counts), np.array(lengths), np.array(nodes), tables, BLOCK)


def paths_of(rows: list[Row], tables: Int32s) -> KeyPaths:
    numbers, tails = list[int](), list[int]()
    positions, routes = list[int](), list[list[int]]()
    for number, row in enumerate(rows):
        start = row.cached + row.texts
        numbers += [number] * row.count
        tails += [start if row.parents else NO_TAIL] * row.count
        positions += range(row.cached, start)
        positions += [start + len(route) - 1 for route in row.routes()]
        routes += [[]] * row.texts + row.routes()
    width = max((len(route) for route in routes), default=0) + 1
    path = np.full((len(routes), width), NOT_LOOKED_AT)
    for line, route in zip(path, routes, strict=True):
        line[: len(route)] = route
    places = torch.tensor([numbers, positions, tails], dtype=torch.int32)
    walks, blocks = torch.from_numpy(path).int(), torch.from_numpy(tables)
    longest = max(positions, default=0) + 1
    return KeyPaths(
        rows=places[0], positions=places[1], tails=places[2], path=walks, tables=blocks,
        block_slots=BLOCK, longest=longest,
    )  # fmt: skip


def changed(paths: KeyPaths, change: Callable[[Tensor], Tensor]) -> KeyPaths:
    """With each tensor that has an entry for each token changed."""
    parts = paths.rows, paths.positions, paths.tails, paths.path
    rows, positions, tails, path = map(change, parts)
    return replace(paths, rows=rows, positions=positions, tails=tails, path=path)


def on(paths: KeyPaths, device: torch.device | str) -> KeyPaths:
    there = changed(paths, lambda part: part.to(device))
    return replace(there, tables=paths.tables.to(device))


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
        rows = [Row(*row) for row in zip(prefixes, [0] * len(nodes), trees, strict=True)]
        tables = tables_of(rows, seed)
        self.paths, self.slots = paths_of(rows, tables), list[list[int]]()
        for table, row in zip(tables, rows, strict=True):
            for held in row.held():
                slots = np.array(sorted(held, key=held.__getitem__))
                self.slots.append((table[slots // BLOCK] * BLOCK + slots % BLOCK).tolist())
        self.size = size_of(rows)

    def tensors(
        self, kv_heads: int, group: int, dim: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, heads, dim], keys and values [slots, kv_heads, dim]."""
        random = torch.Generator().manual_seed(self.seed)
        shapes = [(len(self.slots), kv_heads * group, dim), *[(self.size, kv_heads, dim)] * 2]
        query, keys, values = (torch.randn(one, generator=random).to(dtype) for one in shapes)
        return query, keys, values

    def as_chains(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, KeyPaths]:
        """Each token as the last of a plain text, in a row of its own, in blocks that follow one
        another."""
        longest = max(map(len, self.slots))
        slots = -(-longest // BLOCK) * BLOCK
        filled = [one + [0] * (slots - len(one)) for one in self.slots]
        index = torch.tensor([slot for one in filled for slot in one])
        lengths = torch.tensor([len(one) for one in self.slots], dtype=torch.int32)
        rows, no_tail = torch.arange(len(lengths)).int(), torch.full_like(lengths, NO_TAIL)
        tables = torch.arange(len(lengths) * slots // BLOCK).int().view(len(lengths), -1)
        no_path = torch.zeros_like(lengths)[:, None]
        paths = KeyPaths(
            rows=rows, positions=lengths - 1, tails=no_tail, path=no_path, tables=tables,
            block_slots=BLOCK, longest=self.paths.longest,
        )  # fmt: skip
        return keys[index], values[index], paths


@st.composite
def a_row(draw: st.DrawFn) -> Row:
    cached = draw(st.integers(0, 20))
    texts, nodes = draw(st.integers(0, 6)), draw(st.integers(0, 7))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(nodes))
    return Row(cached, texts, parents)


packs = st.lists(a_row(), min_size=1, max_size=5)
windows = st.none() | st.integers(1, 15)


@dataclass
class View:
    """What paged attention asks of a view."""

    pack_rows: PackRows
    paths: KeyPaths
    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, rows: list[Row], seed: int = 0) -> "View":
        random = torch.Generator().manual_seed(seed)
        shape, tables = (2, size_of(rows), KV_HEADS, DIM), tables_of(rows, seed)
        keys, values = torch.randn(shape, generator=random, dtype=torch.float64)
        return cls(pack_rows_of(rows, tables), paths_of(rows, tables), keys, values)

    def arena(self, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        return self.keys, self.values

    def layout(self, build: object) -> object:
        """What would be built of it."""
        paths = SimpleNamespace(on=lambda device: self.paths)
        return paths if build is PathLayout else self.pack_rows

    def query(self) -> Tensor:
        random = torch.Generator().manual_seed(1)
        tokens = int(self.pack_rows.counts.sum())
        return torch.randn((HEADS, tokens, DIM), generator=random, dtype=torch.float64)
