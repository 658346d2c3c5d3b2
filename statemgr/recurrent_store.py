"""RecurrentStore: the states of a model's recurrent layers, and what of them may be rolled back.

Contract: a row's states stand behind its first tokens, of which `held` tells the number. A pass
begins with `begin`. Tokens that are sure to stay go straight into the states; of each other one the
pass leaves an entry, known by the number of its slot, from which its update can be repeated to the
bit. A commit names the entries that stay, and computes nothing: the row's next pass applies them
before anything else, in all layers. To roll back is to forget entries; trees branch where entries
have the same parent. A pass that fails after it has changed states leaves a row that must
`fall_back` to a state that was kept.

Copies are kept on the way behind those numbers of tokens that are `wanted` of a row.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from modelpool.recurrent import RecurrentKind, RecurrentLayer, StateKey, Tensors
from statemgr.arrays import Ints

KeptState = Mapping[StateKey, Tensors]  # nobody writes to it
KeptStates = Mapping[int, KeptState]  # by number of tokens
KEPT_STATES = 4  # that a row which begins takes over, or keeps of its prompt on its way, at most


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """What recurrent layers must know of the tokens of a pack.

    Attributes:
        certain: [R] tokens of each row, its first ones in the pack, that are sure to stay.
        parents: [T] number of the slot of the token that each follows; -1: the one before it in
            its row, which None says of all.
    """

    certain: Ints
    parents: Ints | None = None


@dataclass(eq=False)
class _Entry:
    """A token that follows `parent`; None: what the row's states have."""

    parent: "_Entry | None"
    parts: dict[StateKey, Tensors] = field(default_factory=dict)

    def path(self) -> "list[_Entry]":
        """From the row's states down to it."""
        path, entry = [self], self.parent
        while entry is not None:
            path.append(entry)
            entry = entry.parent
        return path[::-1]


@dataclass(eq=False, kw_only=True)
class _Row:
    """
    Attributes:
        count: tokens that the states have.
        pending: committed entries behind them, in order; `tip`: the entry that was read last.
        kept: by number of tokens, copies of states.
    """

    count: int = 0
    pending: list[_Entry] = field(default_factory=list)
    tip: _Entry | None = None
    kept: dict[int, dict[StateKey, Tensors]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _RowPass:
    """A row's tokens of a pack, the first of which stands at `start` and follows `held` others:
    `certain` ones that stay, then one of each entry."""

    row: int
    start: int
    held: int
    certain: int
    entries: list[_Entry]


class RecurrentStore:
    """Args:
    layers: the states of those that are recurrent.
    width: a slot's number is `row * width + slot`.
    wanted: by row, the numbers of tokens behind which its states are to be kept.
    """

    def __init__(
        self,
        layers: Mapping[StateKey, RecurrentLayer],
        rows: int,
        width: int,
        wanted: Mapping[int, Collection[int]],
    ) -> None:
        self.layers = layers
        self._width = width
        self._wanted = wanted
        self._rows = [_Row() for _ in range(rows)]
        self._entries: dict[int, _Entry] = {}  # by number of the slot
        with torch.inference_mode(False):  # rows also change outside of inference
            self._states = {key: _zeros(layer, rows) for key, layer in layers.items()}

    @property
    def row_bytes(self) -> int:
        return self.nbytes // len(self._rows)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for parts in self._states.values() for part in parts)

    @property
    def form(self) -> tuple[str, ...]:
        """Of each state its kind, and what that keeps of a row: equal where bytes can be taken."""
        return tuple(
            ", ".join((layer.kind.name, *(f"{list(p.shape[1:])} {p.dtype}" for p in parts)))
            for layer, parts in zip(self.layers.values(), self._states.values(), strict=True)
        )

    def held(self, row: int) -> int:
        """Tokens that a row's states have, or will have before its next pass."""
        return self._rows[row].count + len(self._rows[row].pending)

    def parts(self, row: int) -> list[Tensor]:
        """All that the layers keep of a row, layer after layer, not copied."""
        self._settle(row)
        return [part for key in self.layers for part in self._state(key, row)]

    # Passes

    def begin(self, rows: Ints, counts: Ints, slots: Ints, order: TokenOrder) -> "RecurrentPass":
        """A pass over appended tokens. `slots`: [T] their numbers."""
        passes, starts = [], np.cumsum(counts) - counts
        parents = np.full_like(slots, -1) if order.parents is None else order.parents
        for row, start, count, certain in zip(
            *(each.tolist() for each in (rows, starts, counts, order.certain)), strict=True
        ):
            own, self_row = slice(start + certain, start + count), self._rows[row]
            self._settle(row)
            assert not (certain and self_row.tip), "tokens that stay follow some that may not"
            entries = self._open(row, slots[own].tolist(), parents[own].tolist())
            passes.append(_RowPass(row, start, self_row.count, certain, entries))
            self_row.count += certain
        return RecurrentPass(self, passes, len(slots))

    def _open(self, row: int, slots: Sequence[int], parents: Sequence[int]) -> list[_Entry]:
        entries, own = [], self._rows[row]
        for slot, parent in zip(slots, parents, strict=True):
            before = own.tip if parent < 0 else self._entries.get(parent)
            own.tip = self._entries[slot] = _Entry(before)
            entries.append(own.tip)
        return entries

    def scan(
        self, layer: int, kind: RecurrentKind, tokens: Tensors, part: _RowPass
    ) -> list[Tensor]:
        """Outputs [n, ...] of a row's tokens of a pack, in pieces; `tokens` are of all rows."""
        key, outputs = (layer, kind.name), list[Tensor]()
        state = self._state(key, part.row)
        wanted = (at - part.held for at in self._wanted.get(part.row, ()))
        stops = sorted({part.certain, *(at for at in wanted if 0 < at < part.certain)})
        for start, stop in pairwise((0, *stops)):
            own = slice(part.start + start, part.start + stop)
            if start < stop:
                outputs.append(kind.scan(state, [one[own] for one in tokens]))
                self._note(part.row, part.held + stop, key, state)
        if part.entries:
            below = _Below(kind, key, state, part.entries)
            given = zip(*(one[part.start + part.certain :] for one in tokens), strict=True)
            read = [below.read(*each) for each in zip(part.entries, given, strict=False)]
            outputs.append(torch.stack(read))
        return outputs

    def _settle(self, row: int) -> None:
        """Applies what was committed."""
        own = self._rows[row]
        for entry in own.pending:
            for key, layer in self.layers.items():
                state = self._state(key, row)
                layer.kind.advance(state, entry.parts[key])
                self._note(row, own.count + 1, key, state)
            own.count += 1
        own.pending = []

    def _note(self, row: int, count: int, key: StateKey, state: Tensors) -> None:
        """One of a row's states has `count` tokens."""
        if count in self._wanted.get(row, ()):
            kept = self._rows[row].kept.setdefault(count, {})
            kept[key] = [part.clone() for part in state]

    # Commits

    def commit(self, row: int, slots: Sequence[int]) -> bool:
        """Of a row's entries those in `slots` stay, in this order, and no others. False: they do
        not follow one another; nothing of the row can be relied on."""
        entries = [self._entries.get(slot) for slot in slots]
        self.forget(row)
        before = None
        for entry in entries:
            if entry is None or entry.parent is not before or len(entry.parts) < len(self.layers):
                return False
            before = entry
        self._rows[row].pending += [entry for entry in entries if entry is not None]
        return True

    def forget(self, row: int) -> None:
        """All entries that were not committed."""
        self._rows[row].tip = None
        if self._entries:
            for slot in [slot for slot in self._entries if slot // self._width == row]:
                del self._entries[slot]

    def scrub(self, slots: Iterable[int]) -> None:
        """Forgets entries of a failed forward."""
        gone = {self._entries.pop(slot) for slot in slots if slot in self._entries}
        for own in self._rows:
            while own.tip in gone:
                own.tip = own.tip.parent

    def move(self, source: Ints, destination: Ints) -> None:
        """Slots have other numbers."""
        if self._entries:
            pairs = zip(source.tolist(), destination.tolist(), strict=True)
            moved = {new: self._entries.pop(old) for old, new in pairs if old in self._entries}
            self._entries |= moved

    def drop(self, row: int) -> None:
        """All of a row, contents included."""
        if self.layers:
            self.forget(row)
            self._rows[row] = _Row()
            for part in (part for key in self.layers for part in self._state(key, row)):
                part.zero_()

    # Kept states

    def reach(self, row: int, most: int) -> int:
        """The most tokens, of `most`, behind which the row's states were kept; 0: none."""
        return max((at for at in self.passed(row) if at <= most), default=0)

    def passed(self, row: int) -> dict[int, KeptState]:
        """By number of tokens, states that were kept on the way. One of a pass that failed lacks
        layers."""
        kept = self._rows[row].kept
        return {count: each for count, each in kept.items() if len(each) == len(self.layers)}

    def kept(self, row: int) -> dict[int, KeptState]:
        """The same, and the row's own."""
        self._settle(row)
        count, kept = self._rows[row].count, self.passed(row)
        if count:
            kept[count] = {
                key: [part.clone() for part in self._state(key, row)] for key in self.layers
            }
        return kept

    def restore(self, row: int, count: int, states: KeptStates) -> None:
        """Goes on behind `count` tokens. What is kept last before is good for the row, too."""
        self.forget(row)
        for key, parts in states[count].items():
            for part, kept in zip(self._state(key, row), parts, strict=True):
                part.copy_(kept)
        known = sorted(at for at in states if at <= count)[-KEPT_STATES:]
        self._rows[row] = _Row(count=count, kept={at: dict(states[at]) for at in known})

    def fall_back(self, row: int, most: int) -> int:
        """Goes back to the most tokens, of `most`, behind which the states were kept. Returns how
        many; 0: the row is empty."""
        count, kept = self.reach(row, most), self.passed(row)
        if count:
            self.restore(row, count, kept)
        else:
            self.drop(row)
        return count

    def begin_at(self, row: int, count: int) -> None:
        """The row's states were written from outside (`parts`), and have `count` tokens."""
        self._rows[row] = _Row(count=count)

    def is_finite(self, row: int) -> bool:
        """Whether states hold numbers only. Waits for each device."""
        return all(bool(part.isfinite().all()) for part in self.parts(row))

    def _state(self, key: StateKey, row: int) -> list[Tensor]:
        return [part[row] for part in self._states[key]]


class RecurrentPass:
    """What a forward sees of the rows' states; see `modelpool.attention.kv_view.KVView.scan`."""

    def __init__(self, store: RecurrentStore, rows: Sequence[_RowPass], tokens: int) -> None:
        self._store = store
        self._rows = rows
        self._tokens = tokens

    def scan(self, layer: int, kind: RecurrentKind, tokens: Tensors) -> Tensor:
        outputs: list[Tensor] = []
        for part in self._rows:
            outputs += self._store.scan(layer, kind, tokens, part)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _own(part: Tensor) -> Tensor:
    """It stays until the row's next pass, and as a view would keep what all rows have read."""
    return part.clone() if part.untyped_storage().nbytes() > 4 * part.nbytes else part


class _Below:
    """Reads entries of a pass, parents first. The states of those that have children in the pass
    are copies, which the last child goes on with."""

    def __init__(
        self, kind: RecurrentKind, key: StateKey, state: Tensors, entries: Sequence[_Entry]
    ) -> None:
        self._kind = kind
        self._key = key
        self._state = state
        self._waiting = Counter(entry.parent for entry in entries)  # children to be read
        self._states: dict[_Entry, Tensors] = {}

    def read(self, entry: _Entry, token: Tensors) -> Tensor:
        parent = entry.parent
        state = self._state if parent is None else self._behind(parent)
        output, parts = self._kind.read(state, token)
        entry.parts[self._key] = tuple(map(_own, parts))
        self._waiting[parent] -= 1
        if parent is not None and not self._waiting[parent]:
            del self._states[parent]
        elif self._waiting[entry]:
            state = [part.clone() for part in state]
        if self._waiting[entry]:
            self._kind.advance(state, entry.parts[self._key])
            self._states[entry] = state
        return output

    def _behind(self, entry: _Entry) -> Tensors:
        """Of an entry of an earlier pass: the updates down to it are repeated."""
        if entry not in self._states:
            state = [part.clone() for part in self._state]
            for each in entry.path():
                self._kind.advance(state, each.parts[self._key])
            self._states[entry] = state
        return self._states[entry]


def _zeros(layer: RecurrentLayer, rows: int) -> list[Tensor]:
    return [
        torch.zeros((rows, *part.shape), dtype=part.dtype or layer.dtype, device=layer.device)
        for part in layer.kind.parts
    ]
