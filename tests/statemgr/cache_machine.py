"""Random lives of cache rows, checked against a naive account of what each row holds.

Every cached token carries a number of its own, written to the store as its key and its value in
every layer. After each step the slots that the mask calls valid must hold exactly the tokens,
positions and numbers of the naive account, committed ones each in the slot of its position. A row
whose tree was decided is between cycles, and its integrity is checked as the engine would.
"""

from dataclasses import dataclass, field
from random import Random

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from statemgr import ModelState
from statemgr.blocks import BLOCK_SLOTS, BlockTables
from tests.kv_layers import kv_layer

ROWS = 3
LAYERS = 2
_FLOAT64_LAYER = kv_layer(torch.device("cpu"), torch.float64, 1, 2)

_row = st.integers(0, ROWS - 1)
_shape = st.lists(st.integers(0, 9), max_size=7)  # the parent of each node, among those before
_fraction = st.integers(0, 100)


@dataclass(frozen=True)
class Entry:
    token: int
    position: int
    number: int  # unique; what the store holds
    parent: int = 0  # number of the node above; 0: the root, or no node


@dataclass
class NaiveRow:
    """Committed tokens from position 0 on, then nodes of a tree that nobody decided on yet."""

    settled: list[Entry] = field(default_factory=list)
    nodes: list[Entry] = field(default_factory=list)

    @property
    def entries(self) -> list[Entry]:
        return self.settled + self.nodes

    def keep(self, entries: list[Entry]) -> None:
        """Forgets the others. What stays of the settled ones is a prefix."""
        self.settled = [entry for entry in self.settled if entry in entries]
        self.nodes = [entry for entry in self.nodes if entry in entries]


class CacheMachine(RuleBasedStateMachine):
    state: ModelState
    tables: BlockTables

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, NaiveRow] = {}
        self.written = 0

    @initialize(width=st.sampled_from((1, 4)))
    def open_state(self, width: int) -> None:
        """Of one block: rows fill up. Rows take blocks as they grow, so each has some here and some
        there."""
        self.tables = BlockTables(ROWS, width, ROWS * width)
        layers = dict.fromkeys(range(LAYERS), _FLOAT64_LAYER)
        self.state = ModelState(layers, ROWS, width * BLOCK_SLOTS, self.tables)

    @precondition(lambda self: len(self.rows) < ROWS)
    @rule()
    def allocate(self) -> None:
        row = min(set(range(ROWS)) - set(self.rows))
        self.rows[row] = NaiveRow()

    @precondition(lambda self: self.rows)
    @rule(
        rows=st.sets(_row, min_size=1),
        prefix=st.integers(0, 12),
        shapes=st.lists(_shape, min_size=ROWS, max_size=ROWS),
        with_hidden=st.booleans(),
    )
    def forward(
        self, rows: set[int], prefix: int, shapes: list[list[int]], with_hidden: bool
    ) -> None:
        """Committed tokens, where no tree is open, then nodes: often several at one position."""
        chosen = sorted(rows & set(self.rows))
        fed = {row: self._pack(self.rows[row], prefix, shapes[row]) for row in chosen}
        chosen = [row for row in chosen if any(fed[row])]
        if not chosen:
            return
        packs = [settled + nodes for settled, nodes in (fed[row] for row in chosen)]
        counts = np.array([len(pack) for pack in packs])
        tokens = np.array([entry.token for pack in packs for entry in pack])
        positions = np.array([entry.position for pack in packs for entry in pack])
        ends = self.state.ends[chosen] + counts
        try:
            slots = self.state.append(np.array(chosen), counts, tokens, positions)
        except ValueError:
            assert np.any(ends > self.state.slots), "there was room"
            return
        assert np.all(ends <= self.state.slots)
        index = torch.from_numpy(self.tables.flat(slots))
        numbers = torch.tensor([entry.number for pack in packs for entry in pack])
        for layer in range(LAYERS):
            keys, values = self.state.store.layer(layer)
            keys[index] = numbers[:, None, None].double() + layer
            values[index] = -numbers[:, None, None].double() - layer
        if with_hidden:
            self.state.hidden.add(slots, numbers[:, None, None])
        for row in chosen:
            self.rows[row].settled += fed[row][0]
            self.rows[row].nodes += fed[row][1]

    @rule(row=_row, length=st.integers(0, 24))
    def rollback(self, row: int, length: int) -> None:
        if row in self.rows:
            self.state.rollback(np.array([row]), np.array([length]))
            naive = self.rows[row]
            naive.keep([entry for entry in naive.entries if entry.position < length])

    @rule(
        rows=st.sets(_row, min_size=1),
        picks=st.lists(st.lists(st.integers(0, 5), max_size=5), min_size=ROWS, max_size=ROWS),
        shuffled=st.randoms(use_true_random=False),
    )
    def commit(self, rows: set[int], picks: list[list[int]], shuffled: Random) -> None:
        """Of each row's tree a path stays, from the root as far down as its picks go."""
        chosen = sorted(rows & set(self.rows))
        paths = {row: _path(self.rows[row], picks[row]) for row in chosen}
        accepted = [
            row * self.state.slots + self._slot(row, node) for row in chosen for node in paths[row]
        ]
        shuffled.shuffle(accepted)
        bases = np.array([len(self.rows[row].settled) for row in chosen], dtype=np.int64)
        self.state.commit(
            np.array(chosen, dtype=np.int64), bases, np.array(accepted, dtype=np.int64)
        )
        for row in chosen:
            self.rows[row].settled += paths[row]
            self.rows[row].nodes = []

    @rule(row=_row, kept=_fraction)
    def fail(self, row: int, kept: int) -> None:
        """The forward that wrote the last slots failed: of the nodes, or of the prefix."""
        if row not in self.rows or not self.rows[row].entries:
            return
        naive = self.rows[row]
        last = naive.nodes or naive.settled
        lost = last[len(last) * kept // 100 :]
        flat = np.array([row * self.state.slots + self._slot(row, entry) for entry in lost])
        if len(flat):
            self.state.scrub(flat)
            for part in self.state.store.layer(LAYERS - 1):
                part[torch.from_numpy(self.tables.flat(flat))] = torch.nan
            naive.keep([entry for entry in naive.entries if entry not in lost])

    @rule(row=_row)
    def free(self, row: int) -> None:
        self.state.free(row)
        self.tables.end(row)
        self.rows.pop(row, None)

    @invariant()
    def valid_slots_hold_exactly_the_entries(self) -> None:
        for row, naive in self.rows.items():
            valid = np.flatnonzero(self.state.cache_mask[row])
            last = int(valid[-1]) + 1 if len(valid) else 0
            assert self.state.ends[row] == last, "slots in use end at the last valid one"
            top = max((entry.position + 1 for entry in naive.entries), default=0)
            assert self.state.lengths(np.array([row])) == top, "the largest position, plus one"
            settled = len(naive.settled)
            assert valid[:settled].tolist() == list(range(settled)), "not in order"
            tokens = self.state.cache_tokens[row, valid].tolist()
            positions = self.state.positions[row, valid].tolist()
            wanted = sorted((e.number, e.token, e.position) for e in naive.entries)
            for layer in range(LAYERS):
                keys, values = self._numbers(row, valid, layer)
                assert sorted(zip(keys, tokens, positions, strict=True)) == wanted
                assert values == keys

    @invariant()
    def every_block_is_one_rows_or_free(self) -> None:
        if hasattr(self, "tables"):
            self.tables.check_integrity(np.zeros(0, dtype=np.int64))
            assert self.tables.references.max() <= 1

    @invariant()
    def hidden_states_are_those_of_tokens_that_stay(self) -> None:
        for rows, positions, states in self.state.hidden.take_committed():
            found = zip(rows.tolist(), positions.tolist(), states.flatten().tolist(), strict=True)
            for row, position, number in found:
                entries = self.rows[row].entries
                assert (position, number) in {(each.position, each.number) for each in entries}

    @invariant()
    def rows_between_cycles_have_integrity(self) -> None:
        for row in range(ROWS):
            naive = self.rows.get(row)
            if naive is None:
                self.state.check_free(row)
            elif not naive.nodes:
                committed = np.array([entry.token for entry in naive.settled] + [7])
                self.state.check_integrity(row, committed)

    def _pack(
        self, naive: NaiveRow, prefix: int, shape: list[int]
    ) -> tuple[list[Entry], list[Entry]]:
        """What a forward feeds: tokens at the next positions, and nodes behind them."""
        start = len(naive.settled)
        ahead = 0 if naive.nodes else prefix
        settled = [self._entry(start + offset) for offset in range(ahead)]
        tree: list[Entry] = [*naive.nodes]
        for choice in shape:
            above = [None, *tree][choice % (len(tree) + 1)]
            if above is None:
                tree.append(self._entry(start + ahead))
            else:
                tree.append(self._entry(above.position + 1, above.number))
        return settled, tree[len(naive.nodes) :]

    def _entry(self, position: int, parent: int = 0) -> Entry:
        self.written += 1
        return Entry(self.written % 5, position, self.written, parent)

    def _numbers(
        self, row: int, slots: np.ndarray[tuple[int], np.dtype[np.int64]], layer: int
    ) -> tuple[list[float], list[float]]:
        index = torch.from_numpy(self.tables.flat(row * self.state.slots + slots))
        keys, values = self.state.store.layer(layer)
        assert bool((keys[index] == keys[index][:, :1, :1]).all())
        return ((keys[index, 0, 0] - layer).tolist(), (-values[index, 0, 1] - layer).tolist())

    def _slot(self, row: int, entry: Entry) -> int:
        valid = np.flatnonzero(self.state.cache_mask[row])
        keys, _ = self._numbers(row, valid, 0)
        return int(valid[keys.index(entry.number)])


def _path(naive: NaiveRow, picks: list[int]) -> list[Entry]:
    path: list[Entry] = []
    for pick in picks:
        parent = path[-1].number if path else 0
        children = [node for node in naive.nodes if node.parent == parent]
        if not children:
            break
        path.append(children[pick % len(children)])
    return path
