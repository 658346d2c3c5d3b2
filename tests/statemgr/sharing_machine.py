"""Random lives of requests that share prefixes, checked against a naive account.

What a store holds for a token is a number that its whole text so far gives, as a causal model's
keys and values do. So whatever was copied or moved, each valid slot must hold the number of its
row's own text. What a row inherits is known, too: no more than some text under its salt had read.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from statemgr import CacheUse, StateManager
from statemgr.arena import KV_QUANTUM
from tests.kv_layers import kv_layer

MODELS = {"target": True, "draft": False}  # and whether each is canonical
ROWS, TREE = 3, 6
MOST = 3 * KV_QUANTUM - TREE  # tokens of a request
_LAYER = kv_layer(torch.device("cpu"), torch.float64, 1, 1)

_row = st.integers(0, ROWS - 1)
_salt = st.sampled_from(("a", "b", None))


def text_of(kind: int, length: int) -> list[int]:
    """Texts of two kinds; each is a prefix of the longer ones of its kind, the first half of all is
    common to both."""
    common = [5 + place % 7 for place in range(150)]
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

    @initialize(blocks=st.sampled_from((3, 5, 9, 60)))
    def open_manager(self, blocks: int) -> None:
        self.is_ample = blocks == 60  # then nothing has to go
        self.manager = StateManager(ROWS, MOST, None, TREE, blocks * KV_QUANTUM)
        for name in MODELS:
            self._open(name)

    @rule(
        kind=st.integers(0, 2),
        length=st.integers(1, MOST - 1),
        more=st.integers(1, 60),
        salt=_salt,
        reads=st.booleans(),
    )
    def admit(self, kind: int, length: int, more: int, salt: str | None, reads: bool) -> None:
        tokens, reserve = text_of(kind, length), min(length + more, MOST)
        room = self.manager.free_slots >= self.manager.slots_for(reserve)
        row = self.manager.allocate(tokens, reserve, CacheUse(salt, reads))
        assert (row is not None) == (len(self.rows) < ROWS and room)
        if row is None:
            return
        assert row not in self.rows
        naive = self.rows[row] = NaiveRow(tokens, reserve, salt)
        self._note_read(row)
        inherited, most = self.manager.inherited(row), 0
        if salt is not None and reads:
            most = max((_common(one, tokens) for one in self._texts(salt, row)), default=0)
        assert inherited == max(naive.read.values()) <= most
        if self.is_ample:
            assert inherited == most, "it is there, and was not found"

    @precondition(lambda self: self.rows)
    @rule(row=_row, name=st.sampled_from(list(MODELS)), count=st.integers(1, 140))
    def read(self, row: int, name: str, count: int) -> None:
        if row not in self.rows:
            return
        naive, state = self.rows[row], self.manager.state(name)
        assert state is not None
        done = naive.read[name]
        count = min(count, len(naive.tokens) - 1 - done)
        if count:
            tokens = np.array(naive.tokens[done : done + count])
            positions = done + np.arange(count)
            slots = state.append(np.array([row]), np.array([count]), tokens, positions)
            self._write(name, slots, [_number(naive.tokens[: at + 1]) for at in positions])
            naive.read[name] += count

    @precondition(lambda self: self.rows)
    @rule(row=_row, name=st.sampled_from(list(MODELS)), accepted=st.integers(0, TREE // 2))
    def decode(self, row: int, name: str, accepted: int) -> None:
        """A tree of two branches, of which a part of one becomes text; the others are garbage."""
        naive = self.rows.get(row)
        if naive is None or naive.read[name] < len(naive.tokens) - 1:
            return
        accepted = min(accepted, naive.reserve - len(naive.tokens) - 1)
        if accepted < 0:
            return
        state, base = self.manager.state(name), len(naive.tokens) - 1
        assert state is not None
        text = naive.tokens + [1 + (7 * at) % 5 for at in range(TREE // 2)]
        depth = TREE // 2 - 1  # the root is fed with them
        tokens = [text[base], *(9 for _ in range(depth)), *text[base + 1 : base + 1 + depth]]
        positions = [base, *(base + 1 + np.arange(depth)), *(base + 1 + np.arange(depth))]
        slots = state.append(
            np.array([row]), np.array([len(tokens)]), np.array(tokens), np.array(positions)
        )
        numbers = [_number(text[: base + 1])] + [-3.0] * depth
        numbers += [_number(text[: base + 2 + at]) for at in range(depth)]
        self._write(name, slots, numbers)
        accepted = min(accepted, depth)
        good = np.concatenate((slots[:1], slots[1 + depth : 1 + depth + accepted]))
        self.manager.extend(row, np.array(text[base + 1 : base + 2 + accepted]))
        naive.tokens = text[: base + 2 + accepted]
        state.commit(np.array([row]), np.array([base]), good)
        naive.read[name] = base + 1 + accepted

    @rule(row=_row, keep=st.booleans())
    def end(self, row: int, keep: bool) -> None:
        naive = self.rows.pop(row, None)
        if naive is not None:
            if not keep:
                self._note_untrusted(row)
            self.manager.free(row, keep)
            if keep and naive.salt is not None:
                known = Known(naive.tokens, max(naive.read.values()))
                self.known.setdefault(naive.salt, []).append(known)

    @rule(row=_row, name=st.sampled_from(list(MODELS)))
    def poison(self, row: int, name: str) -> None:
        """What a broken forward left behind is kept for nobody."""
        naive = self.rows.get(row)
        if naive is None or not naive.read[name]:
            return
        state = self.manager.state(name)
        assert state is not None
        slot = state.slots_of(row, 1)
        state.store.layer(0)[1][torch.from_numpy(slot)] = float("nan")
        del self.rows[row]
        self._note_untrusted(row)
        self.manager.free(row, keep=True)
        if naive.salt is not None:
            other = max(length for model, length in naive.read.items() if model != name)
            self.known.setdefault(naive.salt, []).append(Known(naive.tokens, other))
        keys, values = state.store.layer(0)
        assert bool(torch.isfinite(keys).all() and torch.isfinite(values).all())

    @rule()
    def follow(self) -> None:
        for row in self.manager.follow():
            self._note_read(row)

    @rule(name=st.sampled_from(list(MODELS)))
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
        assert self.manager.free_slots <= self.manager.kv_slots
        for row, naive in self.rows.items():
            for name in MODELS:
                assert self.manager.inherited(row, name) < len(naive.tokens)
                state = self.manager.state(name)
                assert state is not None
                length = int(state.lengths(np.array([row]))[0])
                assert length == naive.read[name]
                index = torch.from_numpy(state.slots_of(row, length))
                wanted = [_number(naive.tokens[: at + 1]) for at in range(length)]
                for layer in range(2):
                    keys, values = state.store.layer(layer)
                    assert keys[index, 0, 0].tolist() == wanted
                    assert (-values[index, 0, 0]).tolist() == wanted

    def _open(self, name: str) -> None:
        self.manager.open_state(name, dict.fromkeys(range(2), _LAYER), canonical=MODELS[name])

    def _note_read(self, row: int) -> None:
        """Rows are given what others have read: here it is believed, and checked by its numbers."""
        for name in MODELS:
            state = self.manager.state(name)
            assert state is not None
            self.rows[row].read[name] = int(state.lengths(np.array([row]))[0])

    def _note_untrusted(self, row: int) -> None:
        """A row that is not kept may be all that was left of the prefix that it took over."""
        self.is_ample &= not self.manager.inherited(row)

    def _texts(self, salt: str, but: int) -> list[Known]:
        running = [
            Known(one.tokens, max(one.read.values()))
            for row, one in self.rows.items()
            if row != but and one.salt == salt
        ]
        return running + self.known.get(salt, [])

    def _write(self, name: str, slots: Any, numbers: list[float]) -> None:
        state = self.manager.state(name)
        assert state is not None
        index = torch.from_numpy(state.layout.flat(slots))
        for layer in range(2):
            keys, values = state.store.layer(layer)
            keys[index, 0, 0] = torch.tensor(numbers, dtype=torch.float64)
            values[index, 0, 0] = -torch.tensor(numbers, dtype=torch.float64)


def _number(text: list[int]) -> float:
    return float(hash(tuple(text)) % 1_000_003)


def _common(known: Known, tokens: list[int]) -> int:
    count, limit = 0, min(known.read, len(tokens) - 1)
    while count < limit and known.tokens[count] == tokens[count]:
        count += 1
    return count
