"""After a cycle every model keeps what it was fed of the committed tokens, and nothing else."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from processors.pack import NO_SLOT, FedTree
from processors.rollback import RollbackProcessor
from statemgr import ModelState, StateManager
from tests.kv_layers import kv_layer
from tests.processors.trees import Nodes, build, lineage, node_lists, path
from tests.pure import few

LAYERS = {0: kv_layer(torch.device("cpu"), torch.float64, 1, 1)}


class Cycle:
    """Rows of one state, fed and committed; `finish` rolls it back."""

    def __init__(self, rows: int) -> None:
        self.manager = StateManager(rows=rows, max_tokens=128)
        self.state: ModelState = self.manager.open_state("any", LAYERS)
        self.bases = np.zeros(rows, dtype=np.int64)

    def open(self, row: int, committed: list[int], held: int) -> None:
        """`held` of the tokens are cached."""
        assert self.manager.allocate(committed, 100) == row
        self.bases[row] = len(committed)
        self._append(row, committed[:held], list(range(held)))

    def feed(self, trees: dict[int, Nodes], fed: dict[int, set[int]]) -> FedTree:
        """All that a row lacks, then the nodes `fed[row]` of its tree."""
        tree = build(trees, spare=1)
        slots = np.full(tree.tokens.shape, NO_SLOT)
        for index, row in enumerate(tree.rows.tolist()):
            held = int(self.state.lengths(np.array([row]))[0])
            base = int(self.bases[row])
            lacking = self.manager.committed(row)[held:].tolist()
            self._append(row, lacking, list(range(held, base)))
            for place in sorted(fed[row]):
                position = base - 1 + int(tree.depths[index, place])
                token = int(tree.tokens[index, place])
                slots[index, place] = self._append(row, [token], [position])[0]
        return FedTree(tree, slots)

    def finish(self, rows: list[int], fed: list[FedTree]) -> list[int]:
        """How many tokens each row keeps."""
        which = np.array(rows, dtype=np.int64)
        rollback, bases = RollbackProcessor(), self.bases[which]
        kept = rollback.kept(self.manager, which, bases, fed)
        rollback.rollback(self.state, self.manager, which, bases, kept)
        self.manager.check_integrity()
        lengths: list[int] = self.state.lengths(which).tolist()
        return lengths

    def _append(self, row: int, tokens: list[int], positions: list[int]) -> list[int]:
        count = np.array([len(tokens)])
        slots = self.state.append(np.array([row]), count, np.array(tokens), np.array(positions))
        flat: list[int] = slots.tolist()
        return flat


@st.composite
def _row(draw: st.DrawFn) -> tuple[list[int], list[int], int, Nodes | None, set[int]]:
    """Tokens before the cycle, tokens of it, how many are held, a tree, and its fed nodes."""
    before = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
    nodes: Nodes | None = draw(st.one_of(st.none(), node_lists()))
    held = draw(st.integers(0, len(before)))
    if nodes is None:
        return before, draw(st.lists(st.integers(0, 2), max_size=4)), held, None, set()
    depth = draw(st.integers(1, 5))
    fed = {place for place in range(len(nodes)) if len(lineage(nodes, place)) <= depth}
    text = path(nodes, draw(st.integers(-1, len(nodes) - 1)))
    text = text[: draw(st.integers(0, len(text)))]
    return before, [*text, *draw(st.lists(st.integers(0, 2), max_size=2))], held, nodes, fed


@settings(max_examples=few(200), deadline=None, database=None)
@given(st.lists(_row(), min_size=1, max_size=4), st.booleans())
def test_rows_are_rolled_back_each_by_its_own_tokens(
    rows: list[tuple[list[int], list[int], int, Nodes | None, set[int]]],
    together: bool,
) -> None:
    cycle = Cycle(len(rows) + 1)
    wanted = []
    for number, (before, new, held, nodes, fed) in enumerate(rows):
        cycle.open(number, before, held)
        text = tuple(new[:-1])
        on_text = [
            path(nodes, place)
            for place in fed
            if nodes is not None and path(nodes, place) == text[: len(lineage(nodes, place))]
        ]
        length = held if nodes is None else len(before) + max(map(len, on_text), default=0)
        wanted.append(min(length, len(before) + len(new) - 1))
    with_tree = {number: row[3] for number, row in enumerate(rows) if row[3] is not None}
    slots = {number: row[4] for number, row in enumerate(rows)}
    parts = [with_tree] if together else [{number: part} for number, part in with_tree.items()]
    fed_trees = [cycle.feed(part, slots) for part in parts if part]
    for number, (_, new, *_) in enumerate(rows):
        cycle.manager.extend(number, np.array(new, dtype=np.int64))
    assert cycle.finish(list(range(len(rows))), fed_trees) == wanted
