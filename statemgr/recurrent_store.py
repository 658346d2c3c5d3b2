"""RecurrentStore: the states of a model's recurrent layers, with rollback of uncommitted tokens.

Contract: a row's states are those after its first `held` tokens. A pass begins with `begin`. Tokens
that are sure to stay update the states at once; for each other token the pass leaves an entry,
identified by its slot number, from which its update can be repeated bit by bit. A commit names the
entries that stay, and computes nothing: the row's next pass applies them first, in all layers. To
roll back is to forget entries; trees branch where entries have the same parent. A pass that fails
after it has changed states leaves a row that must `fall_back` to a kept state.

Copies of a row's states are kept after the numbers of tokens that are `wanted` of it.
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

KeptState = Mapping[StateKey, Tensors]  # read-only
KeptStates = Mapping[int, KeptState]  # by number of tokens
KEPT_STATES = 4  # most states that a row takes over, or keeps while it reads its prompt


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """Order of the tokens of a pack, for recurrent layers.

    Attributes:
        certain: [R] number of each row's first tokens in the pack that are sure to stay.
        parents: [T] slot number of the token that each token follows; -1: the one before it in its
            row. None means -1 for all.
    """

    certain: Ints
    parents: Ints | None = None


@dataclass(eq=False)
class _Entry:
    """A token that follows the entry `parent`, or the row's states if that is None."""

    parent: "_Entry | None"
    parts: dict[StateKey, Tensors] = field(default_factory=dict)

    def path(self) -> "list[_Entry]":
        """Return the entries from the row's states down to this one."""
        path, entry = [self], self.parent
        while entry is not None:
            path.append(entry)
            entry = entry.parent
        return path[::-1]


@dataclass(eq=False, kw_only=True)
class _Row:
    """Bookkeeping of a row's states.

    Attributes:
        count: tokens that the states have read.
        pending: committed entries after them, in order.
        tip: the entry that was read last.
        kept: copies of states, by number of tokens.
    """

    count: int = 0
    pending: list[_Entry] = field(default_factory=list)
    tip: _Entry | None = None
    kept: dict[int, dict[StateKey, Tensors]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _RowPass:
    """A row's tokens in a pack.

    The first one is at index `start` of the pack, and follows `held` others of the row. The first
    `certain` tokens stay; then comes one token for each entry.
    """

    row: int
    start: int
    held: int
    certain: int
    entries: list[_Entry]


class RecurrentStore:
    """States of the recurrent layers, for all rows.

    Args:
        layers: the recurrent layers.
        width: a slot's number is `row * width + slot`.
        wanted: by row, the numbers of tokens after which its states are kept.
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
        with torch.inference_mode(False):  # rows also change outside inference mode
            self._states = {key: _zeros(layer, rows) for key, layer in layers.items()}

    @property
    def row_bytes(self) -> int:
        return self.nbytes // len(self._rows)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for parts in self._states.values() for part in parts)

    @property
    def form(self) -> tuple[str, ...]:
        """Kind, shapes and dtypes of each state; stores of equal form can exchange bytes."""
        return tuple(
            ", ".join((layer.kind.name, *(f"{list(p.shape[1:])} {p.dtype}" for p in parts)))
            for layer, parts in zip(self.layers.values(), self._states.values(), strict=True)
        )

    def held(self, row: int) -> int:
        """Return the tokens that a row's states have read, or will have before its next pass."""
        return self._rows[row].count + len(self._rows[row].pending)

    def parts(self, row: int) -> list[Tensor]:
        """Return all that the layers keep of a row, layer after layer, not copied."""
        self._settle(row)
        return [part for key in self.layers for part in self._state(key, row)]

    # Passes

    def begin(self, rows: Ints, counts: Ints, slots: Ints, order: TokenOrder) -> "RecurrentPass":
        """Begin a pass over appended tokens, whose slot numbers are `slots`, [T]."""
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
        """Return the outputs, [n, ...], of a row's tokens in a pack, in pieces.

        `tokens` holds the tokens of all rows.
        """
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
        """Apply the committed entries of a row."""
        own = self._rows[row]
        for entry in own.pending:
            for key, layer in self.layers.items():
                state = self._state(key, row)
                layer.kind.advance(state, entry.parts[key])
                self._note(row, own.count + 1, key, state)
            own.count += 1
        own.pending = []

    def _note(self, row: int, count: int, key: StateKey, state: Tensors) -> None:
        """Keep a copy of a row's state, which has read `count` tokens, if it is wanted."""
        if count in self._wanted.get(row, ()):
            kept = self._rows[row].kept.setdefault(count, {})
            kept[key] = [part.clone() for part in state]

    # Commits

    def commit(self, row: int, slots: Sequence[int]) -> bool:
        """Keep a row's entries in `slots`, in this order, and forget the others.

        Returns False if they do not follow one another; then nothing of the row can be relied on.
        """
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
        """Forget all entries of a row that were not committed."""
        self._rows[row].tip = None
        if self._entries:
            for slot in [slot for slot in self._entries if slot // self._width == row]:
                del self._entries[slot]

    def scrub(self, slots: Iterable[int]) -> None:
        """Forget the entries of a failed forward."""
        gone = {self._entries.pop(slot) for slot in slots if slot in self._entries}
        for own in self._rows:
            while own.tip in gone:
                own.tip = own.tip.parent

    def move(self, source: Ints, destination: Ints) -> None:
        """Renumber the entries of slots that have moved."""
        if self._entries:
            pairs = zip(source.tolist(), destination.tolist(), strict=True)
            moved = {new: self._entries.pop(old) for old, new in pairs if old in self._entries}
            self._entries |= moved

    def drop(self, row: int) -> None:
        """Forget all of a row, and clear its states."""
        if self.layers:
            self.forget(row)
            self._rows[row] = _Row()
            for part in (part for key in self.layers for part in self._state(key, row)):
                part.zero_()

    # Kept states

    def reach(self, row: int, most: int) -> int:
        """Return the most tokens, up to `most`, after which a state was kept, or 0."""
        return max((at for at in self.passed(row) if at <= most), default=0)

    def passed(self, row: int) -> dict[int, KeptState]:
        """Return the states that were kept on the way, by number of tokens.

        States of a pass that failed lack layers, and are left out.
        """
        kept = self._rows[row].kept
        return {count: each for count, each in kept.items() if len(each) == len(self.layers)}

    def kept(self, row: int) -> dict[int, KeptState]:
        """Return the states that were kept on the way, and a copy of the current one."""
        self._settle(row)
        count, kept = self._rows[row].count, self.passed(row)
        if count:
            kept[count] = {
                key: [part.clone() for part in self._state(key, row)] for key in self.layers
            }
        return kept

    def restore(self, row: int, count: int, states: KeptStates) -> None:
        """Set a row to its state in `states` after `count` tokens.

        The last states before that stay available to the row.
        """
        self.forget(row)
        for key, parts in states[count].items():
            for part, kept in zip(self._state(key, row), parts, strict=True):
                part.copy_(kept)
        known = sorted(at for at in states if at <= count)[-KEPT_STATES:]
        self._rows[row] = _Row(count=count, kept={at: dict(states[at]) for at in known})

    def fall_back(self, row: int, most: int) -> int:
        """Go back to the last state that was kept after at most `most` tokens.

        Returns its number of tokens; 0 if there is none and the row is empty.
        """
        count, kept = self.reach(row, most), self.passed(row)
        if count:
            self.restore(row, count, kept)
        else:
            self.drop(row)
        return count

    def begin_at(self, row: int, count: int) -> None:
        """Set the number of tokens of states that were written from outside (`parts`)."""
        self._rows[row] = _Row(count=count)

    def is_finite(self, row: int) -> bool:
        """Return whether a row's states are finite numbers; this waits for each device."""
        return all(bool(part.isfinite().all()) for part in self.parts(row))

    def _state(self, key: StateKey, row: int) -> list[Tensor]:
        return [part[row] for part in self._states[key]]


class RecurrentPass:
    """The rows' states in a forward pass; see `modelpool.attention.kv_view.KVView.scan`."""

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
    """Return the part, copied if it is a view of much larger memory.

    It stays until the row's next pass, and as a view would keep the data of all rows alive.
    """
    return part.clone() if part.untyped_storage().nbytes() > 4 * part.nbytes else part


class _Below:
    """Reader of the entries of a pass, parents first.

    Entries with children in the pass have copies of the state, which the last child modifies.
    """

    def __init__(
        self, kind: RecurrentKind, key: StateKey, state: Tensors, entries: Sequence[_Entry]
    ) -> None:
        self._kind = kind
        self._key = key
        self._state = state
        self._waiting = Counter(entry.parent for entry in entries)  # children not read yet
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
        """Return the state after an entry; updates of earlier passes are repeated down to it."""
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
