"""Rows of a pack over an arena, with texts and trees, and what each token sees, written out."""

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from modelpool.attention.path import NO_TAIL
from tests.modelpool.attention.packs import Paths

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


@dataclass(frozen=True, eq=False)
class Rows:
    """See `modelpool.attention.pages.PackRows`."""

    counts: Ints
    firsts: Ints
    lengths: Ints
    nodes: Ints

    @classmethod
    def of(cls, rows: list[Row]) -> "Rows":
        return cls(
            np.array([row.count for row in rows], dtype=np.int64),
            firsts_of(rows),
            np.array([row.length for row in rows], dtype=np.int64),
            np.array([len(row.parents) for row in rows], dtype=np.int64),
        )


def firsts_of(rows: list[Row]) -> Ints:
    before = [0, *np.cumsum([row.gap + row.length for row in rows])]
    return np.array([start + row.gap for start, row in zip(before, rows, strict=False)], np.int64)


def paths_of(rows: list[Row]) -> Paths:
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
    return Paths(places[0], places[1], places[2], walks, max(positions, default=0) + 1)


def visible(row: Row, window: int | None) -> list[list[bool]]:
    """Of each token of the pack, which slots of the row it sees."""
    seen = []
    for held in row.held():
        least = -1 if window is None else max(held.values()) - window
        seen.append([slot in held and held[slot] > least for slot in range(row.length)])
    return seen


@st.composite
def a_row(draw: st.DrawFn) -> Row:
    gap, cached = draw(st.integers(0, 3)), draw(st.integers(0, 12))
    texts, nodes = draw(st.integers(0, 6)), draw(st.integers(0, 7))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(nodes))
    return Row(gap, cached, texts, parents)


packs = st.lists(a_row(), min_size=1, max_size=5)
windows = st.none() | st.integers(1, 15)
