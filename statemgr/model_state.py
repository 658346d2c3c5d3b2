"""One model's cache: tokens, positions and the validity of every slot, row by row.

A row's slots are numbered by position: slot j holds committed token j. The nodes of a tree that is
not decided yet follow them, parents before their children, until `commit` moves the accepted ones
to the slots of their positions. A rollback clears mask bits and moves nothing. Between cycles a
row's valid slots are `0 .. length - 1`, and hold a prefix of its committed tokens.

The bookkeeping is in host arrays by row and slot; keys and values are in the `KVStore` on the
model's device, at the places that the `BlockTables` give. A slot's number is `row * slots + slot`.
For each block, `filled` is the number of its first slots that others may take over: their tokens
are committed and their values finite. These slots are not written again while anything else refers
to the block. A row can continue from any prefix of another row in the `KVStore`, but in the
`RecurrentStore` only from the row's end and from where a copy of its state was kept.
Source: SpecRouter, section 4.4 (cache mask, logical rollback).
"""

from collections.abc import Collection, Mapping

import numpy as np

from modelpool.attention.kv_view import KVLayer, PackSlots, TreePaths
from modelpool.recurrent import RecurrentLayer, StateKey
from statemgr.arrays import Bools, Ints
from statemgr.blocks import (
    BLOCK_SLOTS,
    BlockTables,
    NoFreeBlocksError,
    blocks_of,
    whole_blocks,
)
from statemgr.forward_view import ForwardView
from statemgr.hidden_states import HiddenStates
from statemgr.kv_store import KVStore
from statemgr.recurrent_store import KeptState, KeptStates, RecurrentStore, TokenOrder


class ModelState:
    def __init__(
        self,
        layers: Mapping[int, KVLayer],
        rows: int,
        slots: int,
        tables: BlockTables | None = None,
        recurrent: Mapping[StateKey, RecurrentLayer] | None = None,
        wanted: Mapping[int, Collection[int]] | None = None,
    ) -> None:
        """Allocate the stores of a model.

        `tables` are the block tables; by default all rows may use all their `slots`. `recurrent`
        lists the recurrent layers; for `wanted` see `RecurrentStore`.
        """
        self.slots = whole_blocks(slots)
        self.tables = tables or BlockTables.whole(rows, self.slots // BLOCK_SLOTS)
        self.store = KVStore(layers, self.tables.blocks * BLOCK_SLOTS)
        self.recurrent = RecurrentStore(
            recurrent or {}, rows, self.slots, {} if wanted is None else wanted
        )
        shape = rows, self.slots
        self.cache_tokens: Ints = np.zeros(shape, dtype=np.int64)
        self.positions: Ints = np.zeros(shape, dtype=np.int64)
        self.cache_mask: Bools = np.zeros(shape, dtype=np.bool_)
        self.ends: Ints = np.zeros(rows, dtype=np.int64)  # first free slot of each row
        self._lengths: Ints = np.zeros(rows, dtype=np.int64)  # largest valid position, plus one
        self.filled: Ints = np.zeros(self.tables.blocks, dtype=np.int64)
        self.hidden = HiddenStates(self.slots)

    @property
    def is_recurrent(self) -> bool:
        """True if any layer of the model keeps a recurrent state for each row."""
        return bool(self.recurrent.layers)

    @property
    def nbytes(self) -> int:
        """Bytes that the layers keep for all rows."""
        return self.store.nbytes + self.recurrent.nbytes

    def lengths(self, rows: Ints) -> Ints:
        """Return the tokens, [R], that the model has read, including a tree's deepest path."""
        lengths: Ints = self._lengths[rows]
        return lengths

    def append(self, rows: Ints, counts: Ints, tokens: Ints, positions: Ints) -> Ints:
        """Take the next free slots, `counts[i]` of `rows[i]`, and mark them valid.

        `tokens` and `positions` are [sum(counts)], row after row. A token that is not known on the
        host yet may have any value, and is set later by `set_tokens`.

        Returns:
            [sum(counts)] numbers of the slots.

        Raises:
            NoFreeBlocksError: a row has no room; nothing has changed.
        """
        first = self.ends[rows]
        ends = first + counts
        if len(self.tables.grow(rows, ends)):
            raise NoFreeBlocksError("a row has no free slots left")
        self._make_writable(rows, first, ends)
        starts = np.cumsum(counts) - counts
        flat: Ints = np.repeat(rows * self.slots + first - starts, counts) + np.arange(len(tokens))
        self.cache_tokens.reshape(-1)[flat] = tokens
        self.positions.reshape(-1)[flat] = positions
        self.cache_mask.reshape(-1)[flat] = True
        self.ends[rows] = ends
        some = counts > 0
        if some.any():
            tops = np.maximum.reduceat(positions, starts[some]) + 1
            self._lengths[rows[some]] = np.maximum(self._lengths[rows[some]], tops)
        return flat

    def claim(self, rows: Ints, ends: Ints) -> Ints:
        """Take all blocks that `append` needs up to the rows' slots `ends[i]`.

        The first rows are served first. Returns the rows that still lack some.
        """
        lacking = self.tables.grow(rows, ends)
        has_grown = ~np.isin(rows, lacking)
        grown = rows[has_grown]
        *_, without_copy = self._unshare(grown, self.ends[grown], ends[has_grown])
        return rows[np.isin(rows, [*lacking, *without_copy])]

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
        """Return the view of a forward over appended tokens; rows must ascend.

        `order` is for recurrent layers; by default each token follows the one before it in its row,
        and may be rolled back.
        """
        used = int(blocks_of(self.ends[rows]).max(initial=0))
        pack = PackSlots(
            rows=rows,
            counts=counts,
            positions=positions,
            slots=self.tables.flat(flat_slots),
            tables=self.tables.table[rows, :used],
            block_slots=BLOCK_SLOTS,
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
        """Invalidate positions from `lengths[i]` on in `rows[i]` (logical rollback)."""
        self._forget(rows, lengths)
        self._tell_hidden(rows)
        self._truncate(rows)
        self._follow(rows)

    def commit(self, rows: Ints, bases: Ints, accepted: Ints) -> None:
        """Keep the accepted paths of token trees, in order, and drop all other speculative slots.

        `bases`, [R], are the positions from which on a row is speculative. `accepted` are the flat
        slots on the paths, of any of the rows; one per row and position from the row's base on.
        Those that were given back since stay forgotten.
        """
        # A failed stage may have rolled the row back after another stage had appended to it.
        accepted = accepted[accepted % self.slots < self.ends[accepted // self.slots]]
        self._forget(rows, bases)
        self.cache_mask.reshape(-1)[accepted] = True
        self._tell_hidden(rows)
        np.add.at(self._lengths, accepted // self.slots, 1)
        self._put_in_place(accepted)
        self.ends[rows] = self._lengths[rows]
        self._follow(rows)

    def scrub(self, flat_slots: Ints) -> None:
        """Forget the slots of a failed forward."""
        rows = np.unique(flat_slots // self.slots)
        self.cache_mask.reshape(-1)[flat_slots] = False
        self.hidden.forget(rows)  # the slots will be reused
        self._truncate(rows)
        most = int(self.ends[rows].max(initial=0))
        valid = np.where(self.cache_mask[rows, :most], self.positions[rows, :most], -1)
        self._lengths[rows] = valid.max(axis=1, initial=-1) + 1
        if self.is_recurrent:
            self.recurrent.scrub(flat_slots.tolist())
            for row in rows.tolist():
                if self._lengths[row] < self.recurrent.held(row):
                    self._fall_back(row)

    def free(self, row: int) -> None:
        """Forget all that the model has of a row."""
        self.cache_mask[row] = False
        self.ends[row] = self._lengths[row] = 0
        self.hidden.drop(row)
        self.recurrent.drop(row)

    # Blocks and states that rows share

    def vouch(self, row: int, most: int) -> None:
        """Let others take over the row's first tokens, at most `most`, if their values are finite.

        This updates `filled` of the row's blocks. It waits for the devices if some tokens were not
        checked yet.
        """
        most, blocks = min(most, int(self._lengths[row])), self.tables.of(row)
        known = self.covered(blocks, most)
        if known < most and self.store.is_finite(self.slots_of(row, most)[known:]):
            first = known // BLOCK_SLOTS
            places = np.arange(first, -(-most // BLOCK_SLOTS))
            own = blocks[places]
            within = np.minimum(most - places * BLOCK_SLOTS, BLOCK_SLOTS)
            self.filled[own] = np.maximum(self.filled[own], within)

    def covered(self, blocks: Ints, most: int) -> int:
        """Return for how many tokens, at most `most`, blocks have keys and values for others."""
        filled = self.filled[blocks]
        whole = filled == BLOCK_SLOTS
        count = len(blocks) if whole.all() else int(whole.argmin())
        rest = int(filled[count]) if count < len(blocks) else 0
        return min(most, count * BLOCK_SLOTS + rest)

    def inherit(self, row: int, tokens: Ints, states: KeptStates | None = None) -> None:
        """Continue a row after committed tokens, `tokens`, that the model did not read for it.

        They follow the tokens that the row has. Their keys and values are in the row's blocks, and
        the recurrent state after them is in `states`.
        """
        start, stop = int(self._lengths[row]), int(self._lengths[row]) + len(tokens)
        assert start == self.ends[row], "a tree is open"
        if self.is_recurrent:
            assert states is not None, "keys and values alone are of no use"
            try:
                self.recurrent.restore(row, stop, states)
            except BaseException:
                self.free(row)
                raise
        self.cache_tokens[row, start:stop] = tokens
        self.positions[row, start:stop] = np.arange(start, stop)
        self.cache_mask[row, start:stop] = True
        self.ends[row] = self._lengths[row] = stop

    def take_copy(self, row: int, start: int, source: Ints) -> None:
        """Copy arena slots `source` to the row's slots from `start` on, which are still unused."""
        one, stop = np.array([row]), start + len(source)
        if len(self.tables.grow(one, np.array([stop]))):
            raise NoFreeBlocksError("a row has no free slots left")
        self._make_writable(one, np.array([start]), np.array([stop]))
        self.store.copy(source, self.slots_of(row, stop)[start:])

    def reach(self, row: int, most: int) -> int:
        """Return how many first tokens of a row, at most `most`, another row can take over."""
        most = min(most, int(self._lengths[row]))
        return self.recurrent.reach(row, most) if self.is_recurrent else most

    def passed(self, row: int) -> KeptStates | None:
        """Return the recurrent states that were kept on the row's way, without its current one."""
        return self.recurrent.passed(row) if self.is_recurrent else None

    def kept(self, row: int) -> dict[int, KeptState] | None:
        """Return a row's recurrent states by number of tokens; None if no layer is recurrent.

        The result is empty if the row's current states are not finite.
        """
        if not self.is_recurrent:
            return None
        return self.recurrent.kept(row) if self.recurrent.is_finite(row) else {}

    def slots_of(self, row: int, length: int) -> Ints:
        """Return the arena slots, [length], of a row's first tokens."""
        return self.tables.flat(row * self.slots + np.arange(length))

    def copy_block(self, source: int, destination: int) -> None:
        """Copy a block and its `filled` count; see `BlockUser`."""
        within = np.arange(BLOCK_SLOTS)
        self.store.copy(source * BLOCK_SLOTS + within, destination * BLOCK_SLOTS + within)
        self.filled[destination] = self.filled[source]

    def fill_block(self, destination: int, source: int) -> None:
        """Copy the slots that a block of the same tokens has filled beyond this one."""
        start, stop = int(self.filled[destination]), int(self.filled[source])
        if start < stop:
            within = np.arange(start, stop)
            self.store.copy(source * BLOCK_SLOTS + within, destination * BLOCK_SLOTS + within)
            self.filled[destination] = stop

    def forget_blocks(self, blocks: Ints) -> None:
        self.filled[blocks] = 0

    def _make_writable(self, rows: Ints, first: Ints, ends: Ints) -> None:
        """Prepare rows for writing to their slots `first[i] .. ends[i] - 1`."""
        which, places, within, lacking = self._unshare(rows, first, ends)
        if lacking:
            raise NoFreeBlocksError("no block is free for a copy")
        blocks = self.tables.table[rows[which], places]
        self.filled[blocks] = np.minimum(self.filled[blocks], within)

    def _unshare(self, rows: Ints, first: Ints, ends: Ints) -> tuple[Ints, Ints, Ints, set[int]]:
        """Give rows copies of the shared blocks with their slots `first[i] .. ends[i] - 1`.

        A block that the model has not filled needs no copy: the first of these rows fills it for
        all.

        Returns:
            For each block, [n]: the index in `rows` of the row that has it, its index in the row,
            and the number of its slots before the row's first one. Last, the rows that find no
            block for a copy.
        """
        filling, lacking = set[int](), set[int]()
        low = first // BLOCK_SLOTS
        counts = np.where(ends > first, blocks_of(ends) - low, 0)
        starts = np.cumsum(counts) - counts
        which = np.repeat(np.arange(len(rows)), counts)
        places = np.arange(int(counts.sum())) - np.repeat(starts - low, counts)
        within = np.maximum(first[which] - places * BLOCK_SLOTS, 0)
        blocks = self.tables.table[rows[which], places]
        for at in np.flatnonzero(self.tables.references[blocks] > 1).tolist():
            row, place, block = int(rows[which[at]]), int(places[at]), int(blocks[at])
            others = self.ends[self.tables.sharers(row, place)]
            is_free = not (others > place * BLOCK_SLOTS + within[at]).any()
            if is_free and self.filled[block] <= within[at] and block not in filling:
                filling.add(block)
            elif not self.tables.unshare(row, place):
                lacking.add(row)
        return which, places, within, lacking

    def _follow(self, rows: Ints) -> None:
        """Commit the valid tokens of rows in the recurrent layers, or fall back to a kept state."""
        for row in rows.tolist() if self.is_recurrent else ():
            valid, held = np.flatnonzero(self.cache_mask[row]), self.recurrent.held(row)
            path = (row * self.slots + valid[held:]).tolist()
            if not self.recurrent.commit(row, path) or len(valid) < held:
                self._fall_back(row)

    def _fall_back(self, row: int) -> None:
        """Reset a row to a recurrent state that was kept; the model reads on from there."""
        one = np.array([row])
        self._forget(one, np.array([self.recurrent.fall_back(row, int(self._lengths[row]))]))
        self._truncate(one)

    def check_integrity(self, row: int, committed: Ints) -> None:
        """Assert the invariant of a row between cycles, given its committed tokens, [n]."""
        slots = np.flatnonzero(self.cache_mask[row])
        length = len(slots)
        assert length <= max(0, len(committed) - 1), "the last token must not be cached"
        assert np.array_equal(slots, np.arange(length)), "not a prefix"
        assert np.array_equal(self.positions[row, slots], slots), "not in order"
        assert np.array_equal(self.cache_tokens[row, slots], committed[:length]), "other tokens"
        assert length == self._lengths[row] == self.ends[row], "valid slots were miscounted"
        own = self.tables.of(row)
        assert length <= len(own) * BLOCK_SLOTS, "slots without a block"
        most = len(committed) - 1 - np.arange(len(own)) * BLOCK_SLOTS
        assert (self.filled[own] <= np.maximum(most, 0)).all(), "more is filled than committed"
        if self.is_recurrent:
            assert length == self.recurrent.held(row), "states have other tokens than slots"

    def check_free(self, row: int) -> None:
        assert self.ends[row] == self._lengths[row] == 0, f"row {row} is not free"
        assert not self.cache_mask[row].any(), f"row {row} has valid slots"

    def _put_in_place(self, flat_slots: Ints) -> None:
        """Move slots to the places of their positions."""
        row, slot = flat_slots // self.slots, flat_slots % self.slots
        position = self.positions[row, slot]
        moved = slot != position
        if not moved.any():
            return
        row, slot, position = row[moved], slot[moved], position[moved]
        tokens, goal = self.cache_tokens[row, slot], row * self.slots + position
        self.recurrent.move(flat_slots[moved], goal)
        self.store.copy(self.tables.flat(flat_slots[moved]), self.tables.flat(goal))
        self.cache_mask[row, slot] = False
        self.cache_tokens[row, position] = tokens
        self.positions[row, position] = position
        self.cache_mask[row, position] = True

    def _forget(self, rows: Ints, lengths: Ints) -> None:
        """Clear the mask from positions `lengths[i]` on.

        A slot's number is never less than its position, so only slots from there on are searched.
        """
        counts = np.maximum(self.ends[rows] - lengths, 0)
        starts = np.cumsum(counts) - counts
        first = rows * self.slots + lengths
        flat = np.repeat(first - starts, counts) + np.arange(int(counts.sum()))
        mask, positions = self.cache_mask.reshape(-1), self.positions.reshape(-1)
        mask[flat] &= positions[flat] < np.repeat(lengths, counts)
        self._lengths[rows] = np.minimum(self._lengths[rows], lengths)

    def _truncate(self, rows: Ints) -> None:
        """Free the invalid slots at the ends of rows."""
        most = int(self.ends[rows].max(initial=0))
        masks = self.cache_mask[rows, :most][:, ::-1]
        if most:
            self.ends[rows] = np.where(masks.any(axis=1), most - masks.argmax(axis=1), 0)

    def _tell_hidden(self, rows: Ints) -> None:
        self.hidden.commit(rows, self.cache_mask.reshape(-1), self.positions.reshape(-1))
