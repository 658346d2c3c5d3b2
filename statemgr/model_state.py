"""One model's cache: tokens, positions and the validity of every slot, row by row.

K is stored after the rotary embedding, so a slot's place means nothing: validity is `cache_mask`,
order is `positions`. Rolling back clears mask bits and moves nothing. Slots beyond `ends[row]` are
free. A slot's number is never below its position: parents are appended before their children.
Between cycles a row's valid slots hold exactly the positions `0 .. length - 1` of its
committed tokens; `check_integrity` states it.

Bookkeeping is in host arrays by row and slot, keys and values in the `KVStore` on the model's
device, where the `RowLayout` says. Slots are known by their numbers, `row * slots + slot`.
Source: SpecRouter, section 4.4 (cache mask, logical rollback, `fix_kv_cache`).
"""

from collections.abc import Collection, Mapping

import numpy as np

from statemgr.arrays import Ints
from statemgr.forward_view import ForwardView, PackSlots, TreePaths
from statemgr.hidden_states import HiddenStates
from statemgr.kv_store import KVStore, LayerShape
from statemgr.layer_state import KeptState, KeptStates, RecurrentShape, StateKey
from statemgr.recurrent_store import RecurrentStore, TokenOrder
from statemgr.row_layout import RowLayout

HOLE_SHARE = 0.25  # of the slots in use; beyond it `fix_kv_cache` compacts a row


class ModelState:
    """`canonical` keeps slot order equal to position order, which bit-stable logits need."""

    def __init__(
        self,
        layers: Mapping[int, LayerShape],
        rows: int,
        slots: int,
        canonical: bool = False,
        layout: RowLayout | None = None,
        recurrent: Mapping[StateKey, RecurrentShape] | None = None,
        wanted: Mapping[int, Collection[int]] | None = None,
    ) -> None:
        """`recurrent`: layers of that form; `wanted`: see `RecurrentStore`."""
        self.layout = layout or RowLayout.grid(rows, slots)
        self.store = KVStore(layers, self.layout.total)
        self.recurrent = RecurrentStore(
            recurrent or {}, rows, slots, {} if wanted is None else wanted
        )
        self.slots = slots
        self.canonical = canonical
        self.cache_tokens: Ints = np.zeros((rows, slots), dtype=np.int64)
        self.positions: Ints = np.zeros((rows, slots), dtype=np.int64)
        self.cache_mask = np.zeros((rows, slots), dtype=np.bool_)
        self.ends: Ints = np.zeros(rows, dtype=np.int64)  # first free slot of each row
        self._lengths: Ints = np.zeros(rows, dtype=np.int64)  # valid slots of each row
        self._touched: Ints = np.zeros(rows, dtype=np.int64)  # slots that may not be zero
        self.hidden = HiddenStates(slots)

    @property
    def is_recurrent(self) -> bool:
        """Whether any of its layers keeps a state of each row."""
        return bool(self.recurrent.layers)

    @property
    def nbytes(self) -> int:
        """That its layers keep of all rows."""
        return self.store.nbytes + self.recurrent.nbytes

    def lengths(self, rows: Ints) -> Ints:
        """[R] valid slots of each row."""
        counts: Ints = self._lengths[rows]
        return counts

    def make_room(self, rows: Ints, counts: Ints) -> Ints:
        """Compacts rows whose free slots are fewer than `counts[i]`: to append as many, at once or
        piece by piece, then moves no slot.

        Returns:
            [R] the first free slots.

        Raises:
            ValueError: a row has no room, holes included.
        """
        ends = self.ends[rows]
        room = self.layout.sizes[rows]
        full = ends + counts > room
        if full.any():
            self.fix_kv_cache(rows[full], hole_share=0.0)
            ends = self.ends[rows]
            if np.any(ends + counts > room):
                raise ValueError("a row has no free slots left")
        return ends

    def append(self, rows: Ints, counts: Ints, tokens: Ints, positions: Ints) -> Ints:
        """Takes and marks valid the next free slots: `counts[i]` of `rows[i]`.

        Slots of a row may move for it (`make_room`): their numbers from before are then others.

        Args:
            tokens, positions: [sum(counts)], row after row. A token that is not known on the host
                yet may be given as anything and set later by `set_tokens`.

        Returns:
            [sum(counts)] numbers of the slots.

        Raises:
            ValueError: a row has no room, holes included.
        """
        ends = self.make_room(rows, counts)
        starts = np.cumsum(counts) - counts
        first = rows * self.slots + ends  # flat, of each row's new slots
        flat: Ints = np.repeat(first - starts, counts) + np.arange(len(tokens))
        self.cache_tokens.reshape(-1)[flat] = tokens
        self.positions.reshape(-1)[flat] = positions
        self.cache_mask.reshape(-1)[flat] = True
        ends += counts
        self.ends[rows] = ends
        self._lengths[rows] += counts
        self._touched[rows] = np.maximum(self._touched[rows], ends)
        return flat

    def set_tokens(self, flat_slots: Ints, tokens: Ints) -> None:
        self.cache_tokens.reshape(-1)[flat_slots] = tokens

    def view(
        self,
        rows: Ints,
        counts: Ints,
        positions: Ints,
        flat_slots: Ints,
        tree: TreePaths | None = None,
        order: TokenOrder | None = None,
    ) -> ForwardView:
        """The view of a forward over appended tokens; rows must ascend.

        `order`: for recurrent layers; by default each token follows the one before it in its row,
        and may be rolled back.
        """
        pack = PackSlots(
            rows=rows,
            counts=counts,
            positions=positions,
            slots=self.layout.flat(flat_slots),
            tables=self.layout.tables(rows, int(self.ends[rows].max(initial=1))),
            lengths=self._lengths[rows],
            devices=self.store.devices,
            tree=tree,
        )
        recurrent = None
        if self.is_recurrent:
            order = order or TokenOrder(np.zeros_like(counts))
            recurrent = self.recurrent.begin(rows, counts, flat_slots, order)
        return ForwardView(self.store, pack, recurrent)

    def rollback(self, rows: Ints, lengths: Ints) -> None:
        """Logical rollback: positions from `lengths[i]` on become invalid in `rows[i]`."""
        self._forget(rows, lengths)
        self._tell_hidden(rows)
        self._truncate(rows, lengths)
        self._follow(rows)

    def commit(self, rows: Ints, bases: Ints, accepted: Ints) -> None:
        """Keeps the accepted paths of token trees, and drops all other speculative slots.

        Args:
            bases: [R] positions from here on are speculative.
            accepted: flat slots on the paths, of any of the rows; one per row and position from
                the row's base on. Those that were given back since stay forgotten.
        """
        # A stage that failed may have had the row rolled back after another one had fed it.
        accepted = accepted[accepted % self.slots < self.ends[accepted // self.slots]]
        self._forget(rows, bases)
        if len(accepted):
            self.cache_mask.reshape(-1)[accepted] = True
            np.add.at(self._lengths, accepted // self.slots, 1)
        self._tell_hidden(rows)
        if self.canonical and len(accepted):
            self._put_in_place(accepted)
        self._truncate(rows, bases)
        self._follow(rows)
        if not self.canonical:
            self._compact_holey(rows)

    def fix_kv_cache(self, rows: Ints, hole_share: float = HOLE_SHARE) -> None:
        """Compacts rows in which more than `hole_share` of the slots in use are holes.

        Valid slots move to the front in the order of their positions, in all layers at once. With
        `hole_share=0.0` rows are also put in order.
        """
        sources: list[Ints] = []
        destinations: list[Ints] = []
        for row in rows.tolist():
            source = self._misplaced(row, hole_share)
            if source is None:
                continue
            self.hidden.forget(np.array([row]))  # passes know its slots by their old numbers
            count = len(source)
            self.cache_tokens[row, :count] = self.cache_tokens[row, source]
            self.positions[row, :count] = self.positions[row, source]
            self.cache_mask[row] = False
            self.cache_mask[row, :count] = True
            self.ends[row] = count
            moved = source != np.arange(count)
            sources.append(row * self.slots + source[moved])
            destinations.append(row * self.slots + np.flatnonzero(moved))
        if sources:
            self._move(np.concatenate(sources), np.concatenate(destinations))

    def scrub(self, flat_slots: Ints) -> None:
        """Forgets slots of a failed forward, contents included."""
        rows = np.unique(flat_slots // self.slots)
        self.cache_mask.reshape(-1)[flat_slots] = False
        self._lengths[rows] = self.cache_mask[rows].sum(axis=1)
        self.hidden.forget(rows)  # their slots will be others'
        self.store.scrub(self.layout.flat(flat_slots))
        self._truncate(rows, np.zeros_like(rows))
        if self.is_recurrent:
            self.recurrent.scrub(flat_slots.tolist())
            for row in rows.tolist():
                if self._lengths[row] < self.recurrent.held(row):
                    self._fall_back(row)

    def free(self, row: int) -> None:
        """Empties a row, contents included: the next request must not meet a NaN of this one."""
        touched = int(self._touched[row])
        self._empty(row)
        self.store.clear(int(self.layout.starts[row]), touched)

    def park(self, row: int) -> int:
        """Empties a row but for the keys and values of its tokens, which stay in its first slots by
        position. Returns how many; 0 where they are of no use."""
        self.fix_kv_cache(np.array([row]), hole_share=0.0)
        start, length = int(self.layout.starts[row]), int(self._lengths[row])
        if not (length and self.store.is_finite(start, length) and self.recurrent.is_finite(row)):
            self.free(row)
            return 0
        self.store.clear(start + length, int(self._touched[row]) - length)
        self._empty(row)
        return length

    def inherit(
        self, row: int, tokens: Ints, source: Ints, states: KeptStates | None = None
    ) -> None:
        """Appends committed tokens whose keys and values are in the flat slots `source`, and whose
        recurrent state is in `states`."""
        held = self._lengths[row : row + 1]
        positions = held + np.arange(len(tokens))
        slots = self.append(np.array([row]), np.array([len(tokens)]), tokens, positions)
        try:
            self.store.move(source, self.layout.flat(slots))
            if self.is_recurrent:
                assert states is not None, "keys and values alone are of no use"
                self.recurrent.restore(row, int(self._lengths[row]), states)
        except BaseException:
            self.free(row)
            raise

    def reach(self, row: int, most: int) -> int:
        """Of how many of a row's first tokens, `most` at most, another row may take over what is
        kept."""
        most = min(most, int(self._lengths[row]))
        return self.recurrent.reach(row, most) if self.is_recurrent else most

    def passed(self, row: int) -> KeptStates | None:
        """The same of those that it has passed, its own one not among them."""
        return self.recurrent.passed(row) if self.is_recurrent else None

    def kept(self, row: int) -> dict[int, KeptState] | None:
        """Recurrent states of a row by number of tokens; None: keys and values are all it has."""
        return self.recurrent.kept(row) if self.is_recurrent else None

    def slots_of(self, row: int, length: int) -> Ints:
        """[length] flat slots of a row's first tokens, by position."""
        return self.layout.flat(row * self.slots + self._ordered(row)[:length])

    def carry(self, row: int, start: int) -> None:
        """Moves a row's slots to another place, which the layout is to be told."""
        run = np.arange(self._touched[row])
        self.store.move(self.layout.starts[row] + run, start + run)

    def _ordered(self, row: int) -> Ints:
        """Valid slots in the order of their positions."""
        valid = np.flatnonzero(self.cache_mask[row])
        order: Ints = valid[np.argsort(self.positions[row, valid], kind="stable")]
        return order

    def _empty(self, row: int) -> None:
        self.cache_mask[row] = False
        self.ends[row] = self._lengths[row] = self._touched[row] = 0
        self.hidden.drop(row)
        self.recurrent.drop(row)

    def _follow(self, rows: Ints) -> None:
        """Recurrent layers keep what of these rows is valid, as far as they can."""
        for row in rows.tolist() if self.is_recurrent else ():
            valid, held = self._ordered(row), self.recurrent.held(row)
            path = (row * self.slots + valid[held:]).tolist()
            if not self.recurrent.commit(row, path) or len(valid) < held:
                self._fall_back(row)

    def _fall_back(self, row: int) -> None:
        """To a recurrent state that was kept; the row reads on from there."""
        one = np.array([row])
        count = self.recurrent.fall_back(row, int(self._lengths[row]))
        self._forget(one, np.array([count]))
        self._truncate(one, np.array([count]))

    def _move(self, source: Ints, destination: Ints) -> None:
        self.recurrent.move(source, destination)
        self.store.move(self.layout.flat(source), self.layout.flat(destination))

    def check_integrity(self, row: int, committed: Ints) -> None:
        """Asserts the invariant of a row between cycles. `committed`: its tokens, [n]."""
        slots, order = np.flatnonzero(self.cache_mask[row]), self._ordered(row)
        length = len(order)
        assert length <= max(0, len(committed) - 1), "the last token must not be cached"
        assert np.array_equal(self.positions[row, order], np.arange(length)), "not a prefix"
        assert np.array_equal(self.cache_tokens[row, order], committed[:length]), "other tokens"
        assert length == 0 or int(slots[-1]) < self.ends[row], "a valid slot counts as free"
        assert not self.canonical or np.array_equal(order, np.arange(length)), "not canonical"
        assert length == self._lengths[row], "valid slots were miscounted"
        if self.is_recurrent:
            assert length == self.recurrent.held(row), "states have other tokens than slots"

    def check_free(self, row: int) -> None:
        assert self.ends[row] == 0, f"row {row} is not free"
        assert not self.cache_mask[row].any(), f"row {row} has valid slots"
        assert self._lengths[row] == 0, f"row {row} counts valid slots"

    def _put_in_place(self, flat_slots: Ints) -> None:
        """Moves slots to where their positions say, in rows that are in order before them."""
        row, slot = flat_slots // self.slots, flat_slots % self.slots
        position = self.positions[row, slot]
        moved = slot != position
        if not moved.any():
            return
        row, slot, position = row[moved], slot[moved], position[moved]
        tokens = self.cache_tokens[row, slot]
        self._move(row * self.slots + slot, row * self.slots + position)
        self.cache_mask[row, slot] = False
        self.cache_tokens[row, position] = tokens
        self.positions[row, position] = position
        self.cache_mask[row, position] = True

    def _compact_holey(self, rows: Ints) -> None:
        is_holey = (1 - HOLE_SHARE) * self.ends[rows] > self.lengths(rows)
        if is_holey.any():
            self.fix_kv_cache(rows[is_holey])

    def _misplaced(self, row: int, hole_share: float) -> Ints | None:
        """The same, or None where the row may stay as it is."""
        end, ordered = int(self.ends[row]), self._ordered(row)
        holes = end - len(ordered)
        if hole_share > 0.0 and holes <= hole_share * end:
            return None
        in_place = holes == 0 and np.array_equal(ordered, np.arange(end))
        return None if in_place else ordered

    def _forget(self, rows: Ints, lengths: Ints) -> None:
        """Clears the mask from positions `lengths[i]` on."""
        low, high = self._reach(rows, lengths)
        before = self.cache_mask[rows, low:high]
        after = before & (self.positions[rows, low:high] < lengths[:, None])
        self.cache_mask[rows, low:high] = after
        self._lengths[rows] += after.sum(axis=1) - before.sum(axis=1)

    def _truncate(self, rows: Ints, lengths: Ints) -> None:
        """Frees the invalid slots at the tails of rows, of which those before `lengths` count."""
        low, high = self._reach(rows, lengths)
        if high <= low:
            return
        masks = self.cache_mask[rows, low:high]
        last = high - np.argmax(masks[:, ::-1], axis=1)
        for index in np.flatnonzero(~masks.any(axis=1)).tolist():  # its last one stands before
            valid = np.flatnonzero(self.cache_mask[rows[index], :low])
            last[index] = valid[-1] + 1 if len(valid) else 0
        self.ends[rows] = last

    def _tell_hidden(self, rows: Ints) -> None:
        self.hidden.commit(rows, self.cache_mask.reshape(-1), self.positions.reshape(-1))

    def _reach(self, rows: Ints, lengths: Ints) -> tuple[int, int]:
        """Slots in use that hold positions from `lengths[i] - 1` on: a slot's number is no less."""
        low = max(0, int(lengths.min(initial=self.slots)) - 1)
        return low, max(low, int(self.ends[rows].max(initial=0)))
