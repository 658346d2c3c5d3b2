"""Random lives of requests that share prefixes, checked against a naive account.

What a store holds for a token is a number that its whole text so far gives, as a causal model's
keys and values do. So whatever was shared, copied or moved, each valid slot of a row and each
filled one of a cached block must hold the number of its own text. Nobody may write where another
row or the cache has something. What a row inherits is known, too: no more than some text under its
salt had read.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from statemgr import BLOCK_SLOTS, CacheUse, ModelState, NoFreeBlocksError, StateManager
from statemgr.arrays import Ints
from tests.kv_layers import kv_layer

MODELS = ("target", "draft")
ROWS, TREE = 4, 6
MOST = 5 * BLOCK_SLOTS - TREE  # tokens of a request
AMPLE = 300  # blocks: nothing has to go
_LAYER = kv_layer(torch.device("cpu"), torch.float64, 1, 1)

_B = BLOCK_SLOTS
_pick = st.sampled_from(range(ROWS))  # of the rows that run
_some = st.sampled_from((1, 20, _B - 1, _B, _B + 1, 2 * _B, MOST, MOST))  # tokens
_name = st.sampled_from(MODELS)
_salt = st.sampled_from(("a", "a", "a", "a", "b", None))

_ACTIONS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "admit": st.fixed_dictionaries(
        {
            "kind": st.sampled_from((0, 0, 1)),
            "length": st.sampled_from((2, _B, _B + 1, 50, 2 * _B + 1, 80, 3 * _B, 140, 140)),
            "more": st.sampled_from((1, 60)),
            "salt": _salt,
            "reads": st.sampled_from((True, True, True, False)),
        }
    ),
    "read": st.fixed_dictionaries(
        {"picks": st.sets(_pick, min_size=1), "name": _name, "count": _some, "waits": st.booleans()}
    ),
    "fail": st.fixed_dictionaries({"pick": _pick, "name": _name, "count": _some}),
    "read_again": st.fixed_dictionaries(
        {"pick": _pick, "name": _name, "length": st.sampled_from((0, 20, _B, 40))}
    ),
    "decode": st.fixed_dictionaries(
        {"pick": _pick, "name": _name, "accepted": st.integers(0, TREE // 2)}
    ),
    "end": st.fixed_dictionaries({"pick": _pick, "keep": st.sampled_from((True, True, False))}),
    "poison": st.fixed_dictionaries({"pick": _pick, "name": _name}),
    "follow": st.fixed_dictionaries({}),
    "lose_model": st.fixed_dictionaries({"name": _name}),
}
# More often what most depends on; as one rule, since hypothesis leaves out half of several.
_OFTEN = [
    name
    for name, weight in {
        "admit": 6, "read": 12, "decode": 4, "follow": 8, "fail": 2, "read_again": 3,
        "end": 3, "poison": 1, "lose_model": 1,
    }.items()
    for _ in range(weight)
]  # fmt: skip


def text_of(kind: int, length: int) -> list[int]:
    """Texts of two kinds; each is a prefix of the longer ones of its kind, the first half of all is
    common to both."""
    common = [5 + place % 7 for place in range(70)]
    return (common + [kind + place % 3 for place in range(MOST)])[:length]


@dataclass
class NaiveRow:
    """`read`: by model, tokens that it has read; `reserve`: it may have."""

    tokens: list[int]
    reserve: int
    salt: str | None
    read: dict[str, int] = field(default_factory=dict)


@dataclass
class Known:
    """A text that was read under a salt, as far as the model did that read the most of it."""

    tokens: list[int]
    read: int


class SharingMachine(RuleBasedStateMachine):
    manager: StateManager

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, NaiveRow] = {}
        self.known: dict[str, list[Known]] = {}  # by salt, whatever ended since
        self.is_ample = False

    @initialize(blocks=st.sampled_from((7, 11, 15, AMPLE)))
    def open_manager(self, blocks: int) -> None:
        self.is_ample = blocks == AMPLE
        self.manager = StateManager(ROWS, MOST, TREE, blocks * BLOCK_SLOTS)
        for name in MODELS:
            self._open(name)

    @rule(name=st.sampled_from(_OFTEN), data=st.data())
    def act(self, name: str, data: st.DataObject) -> None:
        few = 1 if name in ("end", "follow") else 0
        if name == "admit" and len(self.rows) == ROWS:
            name = "end"
        elif name != "lose_model" and len(self.rows) <= few:
            name = "admit"
        try:
            getattr(self, name)(**data.draw(_ACTIONS[name], label=name))
        except NoFreeBlocksError:  # nothing has happened; the last row makes room
            assert not self.is_ample
            self.manager.shrink()
            self.end(len(self.rows) - 1, keep=True)

    def admit(self, kind: int, length: int, more: int, salt: str | None, reads: bool) -> None:
        tokens, reserve = text_of(kind, length), min(length + more, MOST)
        room = self.manager.free_slots >= self.manager.slots_to_begin(length, reserve)
        row = self.manager.allocate(tokens, reserve, CacheUse(salt, reads))
        if row is None:
            assert len(self.rows) == ROWS or not room
            return
        # What running rows have of it is no memory that it needs.
        assert room or self.manager.inherited(row) >= BLOCK_SLOTS
        assert row not in self.rows
        naive = self.rows[row] = NaiveRow(tokens, reserve, salt)
        self._note_read(row)
        inherited, most = self.manager.inherited(row), 0
        if salt is not None and reads:
            most = max((_common(one, tokens) for one in self._texts(salt, row)), default=0)
        assert inherited == max(naive.read.values()) <= most
        if self.is_ample:
            assert inherited == most, "it is there, and was not found"

    def read(self, picks: set[int], name: str, count: int, waits: bool) -> None:
        """Rows read together. `waits`: those that others read for do not."""
        chosen = np.array(sorted({self._row(pick) for pick in picks}), dtype=np.int64)
        if waits:
            held = self.manager.waits(name, chosen)
            assert not held[0], "nobody would read"
            chosen = chosen[~held]
        lacking = {row: self._lacking(row, name, count) for row in chosen.tolist()}
        packs = {row: own for row, own in lacking.items() if len(own)}
        if packs:
            self._append(name, {row: (own, own) for row, own in packs.items()})
            for row, own in packs.items():
                self.rows[row].read[name] += len(own)

    def fail(self, pick: int, name: str, count: int) -> None:
        """A forward that fails after it has written what is no number."""
        row = self._row(pick)
        if len(own := self._lacking(row, name, count)):
            slots = self._append(name, {row: (own, own)}, is_broken=True)
            self._state(name).scrub(slots)

    def read_again(self, pick: int, name: str, length: int) -> None:
        """What a model has of a row is given up from there on."""
        row = self._row(pick)
        naive = self.rows[row]
        if naive.salt is not None:  # others may have looked at it before, and may not
            known = Known(naive.tokens, max(naive.read.values()))
            self.known.setdefault(naive.salt, []).append(known)
            self.is_ample = False
        self._state(name).rollback(np.array([row]), np.array([length]))
        self._note_read(row)

    def decode(self, pick: int, name: str, accepted: int) -> None:
        """A tree of two branches, of which a part of one becomes text; the others are garbage."""
        row = self._row(pick)
        naive = self.rows[row]
        if naive.read[name] < len(naive.tokens) - 1:
            return
        accepted = min(accepted, naive.reserve - len(naive.tokens) - 1)
        if accepted < 0:
            return
        state, base = self._state(name), len(naive.tokens) - 1
        text = naive.tokens + [1 + (7 * at) % 5 for at in range(TREE // 2)]
        depth = TREE // 2 - 1  # the root is fed with them
        own = base + np.arange(1 + depth)
        naive.tokens, committed = text, naive.tokens
        positions = np.concatenate((own[:1], own[1:], own[1:]))
        texts = np.concatenate((own[:1], np.full(depth, -1), own[1:]))
        try:
            slots = self._append(name, {row: (positions, texts)})
        finally:
            naive.tokens = committed
        accepted = min(accepted, depth)
        good = np.concatenate((slots[:1], slots[1 + depth : 1 + depth + accepted]))
        self.manager.extend(row, np.array(text[base + 1 : base + 2 + accepted]))
        naive.tokens = text[: base + 2 + accepted]
        state.commit(np.array([row]), np.array([base]), good)
        naive.read[name] = base + 1 + accepted

    def end(self, pick: int, keep: bool) -> None:
        row = self._row(pick)
        naive = self.rows.pop(row)
        self.manager.free(row, keep)
        if keep and naive.salt is not None:
            known = Known(naive.tokens, max(naive.read.values()))
            self.known.setdefault(naive.salt, []).append(known)

    def poison(self, pick: int, name: str) -> None:
        """What a broken forward left behind is kept for nobody."""
        row = self._row(pick)
        naive = self.rows[row]
        if not naive.read[name]:
            return
        state = self._state(name)
        block, within = divmod(int(state.slots_of(row, naive.read[name])[-1]), BLOCK_SLOTS)
        if state.tables.references[block] > 1 or state.filled[block] > within:
            return  # known to be numbers, and written to by nobody
        state.store.layer(0)[1][block * BLOCK_SLOTS + within] = float("nan")
        sound = state.covered(state.tables.of(row), naive.read[name])
        naive.read[name] = sound
        self.end(pick, keep=True)

    def follow(self) -> None:
        for row in self.manager.follow():
            self._note_read(row)

    def lose_model(self, name: str) -> None:
        self.manager.drop_state(name)
        self._open(name)
        self.is_ample = False  # the naive account does not know what the other one had read
        for naive in self.rows.values():
            naive.read[name] = 0

    @invariant()
    def every_valid_slot_holds_its_texts_number(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        assert not self.manager.cache_counts.failures
        for row, naive in self.rows.items():
            for name in MODELS:
                assert self.manager.inherited(row, name) < len(naive.tokens)
                state = self._state(name)
                length = int(state.lengths(np.array([row]))[0])
                assert length == naive.read[name]
                self._assert_holds(name, state.slots_of(row, length), naive.tokens)

    @invariant()
    def every_filled_slot_of_a_cached_block_does(self) -> None:
        for node in self.manager._sharing.cache if hasattr(self, "manager") else ():
            text = np.concatenate([each.tokens for each in node.above]).tolist()
            start = len(text) - len(node.tokens)
            for name in MODELS:
                count = int(self._state(name).filled[node.block])
                slots = node.block * BLOCK_SLOTS + np.arange(count)
                self._assert_holds(name, slots, text, start)

    def _assert_holds(self, name: str, slots: Ints, text: list[int], start: int = 0) -> None:
        wanted = [_number(text[: start + at + 1]) for at in range(len(slots))]
        for layer in range(2):
            keys, values = self._state(name).store.layer(layer)
            assert keys[torch.from_numpy(slots), 0, 0].tolist() == wanted
            assert (-values[torch.from_numpy(slots), 0, 0]).tolist() == wanted

    def _row(self, pick: int) -> int:
        return sorted(self.rows)[pick % len(self.rows)]

    def _state(self, name: str) -> ModelState:
        state = self.manager.state(name)
        assert state is not None
        return state

    def _lacking(self, row: int, name: str, most: int) -> Ints:
        """Positions of the next tokens that a model is to read."""
        naive = self.rows[row]
        return np.arange(naive.read[name], min(naive.read[name] + most, len(naive.tokens) - 1))

    def _open(self, name: str) -> None:
        layers = dict.fromkeys(range(2), _LAYER)
        self.manager.open_state(name, layers, is_target=name == "target")

    def _note_read(self, row: int) -> None:
        """Rows are given what others have read: here it is believed, and checked by its numbers."""
        for name in MODELS:
            self.rows[row].read[name] = int(self._state(name).lengths(np.array([row]))[0])

    def _texts(self, salt: str, but: int) -> list[Known]:
        running = [
            Known(one.tokens, max(one.read.values()))
            for row, one in self.rows.items()
            if row != but and one.salt == salt
        ]
        return running + self.known.get(salt, [])

    def _append(
        self, name: str, packs: dict[int, tuple[Ints, Ints]], is_broken: bool = False
    ) -> Ints:
        """A forward. `packs`: by row positions, and how many tokens of its text stand before each
        one; of a node that is none of the text -1."""
        state, rows = self._state(name), np.array(sorted(packs))
        valid = state.cache_mask.copy()
        counts = np.array([len(packs[row][0]) for row in rows.tolist()])
        positions = np.concatenate([packs[row][0] for row in rows.tolist()])
        places = np.concatenate([packs[row][1] for row in rows.tolist()])
        owners = np.repeat(rows, counts)
        texts = [self.rows[row].tokens for row in owners.tolist()]
        known = list(zip(places.tolist(), texts, strict=True))
        tokens = np.array([text[at] if at >= 0 else 9 for at, text in known])
        slots = state.append(rows, counts, tokens, positions)
        arena = state.tables.flat(slots)
        for row in self.rows:
            own = row * state.slots + np.flatnonzero(valid[row])
            assert not np.isin(state.tables.flat(own), arena).any(), "a token is written over"
        assert len(np.unique(arena)) == len(arena), "two rows write to one slot"
        assert (state.filled[arena // BLOCK_SLOTS] <= arena % BLOCK_SLOTS).all(), "it is filled"
        numbers = [_number(text[: at + 1]) if at >= 0 else -3.0 for at, text in known]
        written = torch.tensor([float("nan")] * len(known) if is_broken else numbers).double()
        for layer in range(2):
            keys, values = state.store.layer(layer)
            keys[torch.from_numpy(arena), 0, 0] = written
            values[torch.from_numpy(arena), 0, 0] = -written
        return slots


def _number(text: list[int]) -> float:
    return float(hash(tuple(text)) % 1_000_003)


def _common(known: Known, tokens: list[int]) -> int:
    count, limit = 0, min(known.read, len(tokens) - 1)
    while count < limit and known.tokens[count] == tokens[count]:
        count += 1
    return count
