"""One model's cache: tokens, positions and the validity of every slot, row by row.

A row's slots are numbered by position: slot j holds committed token j. The nodes of a tree that
nobody decided on yet lie behind them, parents before their children, until `commit` moves the
accepted ones to where their positions say. Rolling back clears mask bits and moves nothing.
Between cycles a row's valid slots are `0 .. length - 1`, and hold a prefix of its committed tokens.

Bookkeeping is in host arrays by row and slot, keys and values in the `KVStore` on the model's
device, where the `BlockTables` say. Slots are known by their numbers, `row * slots + slot`.
Of each block `filled` tells how many of its first slots hold what others may take over: committed,
and numbers. They are not written again while anybody else has the block.
Any beginning of a row can be gone on from in the `KVStore`; in the `RecurrentStore` only where the
row ends, and where a copy of its state was kept.
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
        """`tables`: by default all rows may have all `slots`; `recurrent`: layers of that form;
        `wanted`: see `RecurrentStore`."""
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
        self._lengths: Ints = np.zeros(rows, dtype=np.int64)  # its largest valid position, plus one
        self.filled: Ints = np.zeros(self.tables.blocks, dtype=np.int64)
        self.hidden = HiddenStates(self.slots)

    @property
    def is_recurrent(self) -> bool:
        """Whether any of its layers keeps a state of each row."""
        return bool(self.recurrent.layers)

    @property
    def nbytes(self) -> int:
        """That its layers keep of all rows."""
        return self.store.nbytes + self.recurrent.nbytes

    def lengths(self, rows: Ints) -> Ints:
        """[R] tokens of each row that the model has read, a tree's deepest path included."""
        lengths: Ints = self._lengths[rows]
        return lengths

    def append(self, rows: Ints, counts: Ints, tokens: Ints, positions: Ints) -> Ints:
        """Takes and marks valid the next free slots: `counts[i]` of `rows[i]`.

        Args:
            tokens, positions: [sum(counts)], row after row. A token that is not known on the host
                yet may be given as anything and set later by `set_tokens`.

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
        """Takes all blocks that `append` needs up to the rows' slots `ends[i]`, the first rows
        first. Returns the rows that lack some still."""
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
        """The view of a forward over appended tokens; rows must ascend.

        `order`: for recurrent layers; by default each token follows the one before it in its row,
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
        """Logical rollback: positions from `lengths[i]` on become invalid in `rows[i]`."""
        self._forget(rows, lengths)
        self._tell_hidden(rows)
        self._truncate(rows)
        self._follow(rows)

    def commit(self, rows: Ints, bases: Ints, accepted: Ints) -> None:
        """Keeps the accepted paths of token trees, in order, and drops all other speculative slots.

        Args:
            bases: [R] positions from here on are speculative.
            accepted: flat slots on the paths, of any of the rows; one per row and position from
                the row's base on. Those that were given back since stay forgotten.
        """
        # A stage that failed may have had the row rolled back after another one had fed it.
        accepted = accepted[accepted % self.slots < self.ends[accepted // self.slots]]
        self._forget(rows, bases)
        self.cache_mask.reshape(-1)[accepted] = True
        self._tell_hidden(rows)
        np.add.at(self._lengths, accepted // self.slots, 1)
        self._put_in_place(accepted)
        self.ends[rows] = self._lengths[rows]
        self._follow(rows)

    def scrub(self, flat_slots: Ints) -> None:
        """Forgets slots of a failed forward."""
        rows = np.unique(flat_slots // self.slots)
        self.cache_mask.reshape(-1)[flat_slots] = False
        self.hidden.forget(rows)  # their slots will be others'
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
        """Forgets all that the model has of a row."""
        self.cache_mask[row] = False
        self.ends[row] = self._lengths[row] = 0
        self.hidden.drop(row)
        self.recurrent.drop(row)

    # What rows share

    def vouch(self, row: int, most: int) -> None:
        """Notes in the row's blocks that others may take over its first tokens, `most` at most, as
        far as they are numbers. It waits for the devices where that was not known."""
        most, blocks = min(most, int(self._lengths[row])), self.tables.of(row)
        known = self.covered(blocks, most)
        if known < most and self.store.is_finite(self.slots_of(row, most)[known:]):
            first = known // BLOCK_SLOTS
            places = np.arange(first, -(-most // BLOCK_SLOTS))
            own = blocks[places]
            within = np.minimum(most - places * BLOCK_SLOTS, BLOCK_SLOTS)
            self.filled[own] = np.maximum(self.filled[own], within)

    def covered(self, blocks: Ints, most: int) -> int:
        """Of how many tokens, `most` at most, a chain of blocks has keys and values for others."""
        filled = self.filled[blocks]
        whole = filled == BLOCK_SLOTS
        count = len(blocks) if whole.all() else int(whole.argmin())
        rest = int(filled[count]) if count < len(blocks) else 0
        return min(most, count * BLOCK_SLOTS + rest)

    def inherit(self, row: int, tokens: Ints, states: KeptStates | None = None) -> None:
        """A row goes on behind committed tokens that it did not read: their keys and values are in
        its blocks, their recurrent state in `states`. `tokens`: those behind what it has."""
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
        """Writes to a row's slots from `start` on, which are no token's yet, what stands in the
        arena slots `source`."""
        one, stop = np.array([row]), start + len(source)
        if len(self.tables.grow(one, np.array([stop]))):
            raise NoFreeBlocksError("a row has no free slots left")
        self._make_writable(one, np.array([start]), np.array([stop]))
        self.store.copy(source, self.slots_of(row, stop)[start:])

    def reach(self, row: int, most: int) -> int:
        """Of how many of a row's first tokens, `most` at most, another row may take over what is
        kept."""
        most = min(most, int(self._lengths[row]))
        return self.recurrent.reach(row, most) if self.is_recurrent else most

    def passed(self, row: int) -> KeptStates | None:
        """The same of those that it has passed, its own one not among them."""
        return self.recurrent.passed(row) if self.is_recurrent else None

    def kept(self, row: int) -> dict[int, KeptState] | None:
        """Recurrent states of a row by number of tokens, none where they are no numbers; None: keys
        and values are all it has."""
        if not self.is_recurrent:
            return None
        return self.recurrent.kept(row) if self.recurrent.is_finite(row) else {}

    def slots_of(self, row: int, length: int) -> Ints:
        """[length] arena slots of a row's first tokens."""
        return self.tables.flat(row * self.slots + np.arange(length))

    def copy_block(self, source: int, destination: int) -> None:
        """See `BlockUser`, as of `forget_blocks`."""
        within = np.arange(BLOCK_SLOTS)
        self.store.copy(source * BLOCK_SLOTS + within, destination * BLOCK_SLOTS + within)
        self.filled[destination] = self.filled[source]

    def fill_block(self, destination: int, source: int) -> None:
        """Copies what a block of the same tokens has more of."""
        start, stop = int(self.filled[destination]), int(self.filled[source])
        if start < stop:
            within = np.arange(start, stop)
            self.store.copy(source * BLOCK_SLOTS + within, destination * BLOCK_SLOTS + within)
            self.filled[destination] = stop

    def forget_blocks(self, blocks: Ints) -> None:
        self.filled[blocks] = 0

    def _make_writable(self, rows: Ints, first: Ints, ends: Ints) -> None:
        """Rows are about to write to their slots `first[i] .. ends[i] - 1`."""
        which, places, within, lacking = self._unshare(rows, first, ends)
        if lacking:
            raise NoFreeBlocksError("no block is free for a copy")
        blocks = self.tables.table[rows[which], places]
        self.filled[blocks] = np.minimum(self.filled[blocks], within)

    def _unshare(self, rows: Ints, first: Ints, ends: Ints) -> tuple[Ints, Ints, Ints, set[int]]:
        """Of what others have of the slots `first[i] .. ends[i] - 1` rows get copies, but of what
        the model has not filled: that the first of these rows fills for all.

        Returns:
            [n] for each block: whose it is, as a place among `rows`; its place in the row; how many
            of its slots are before the first. And the rows that find no block for a copy.
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
        """Recurrent layers keep what of these rows is valid, as far as they can."""
        for row in rows.tolist() if self.is_recurrent else ():
            valid, held = np.flatnonzero(self.cache_mask[row]), self.recurrent.held(row)
            path = (row * self.slots + valid[held:]).tolist()
            if not self.recurrent.commit(row, path) or len(valid) < held:
                self._fall_back(row)

    def _fall_back(self, row: int) -> None:
        """To a recurrent state that was kept; the row reads on from there."""
        one = np.array([row])
        self._forget(one, np.array([self.recurrent.fall_back(row, int(self._lengths[row]))]))
        self._truncate(one)

    def check_integrity(self, row: int, committed: Ints) -> None:
        """Asserts the invariant of a row between cycles. `committed`: its tokens, [n]."""
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
        """Moves slots to where their positions say."""
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
        """Clears the mask from positions `lengths[i]` on: a slot's number is no less than its
        position."""
        counts = np.maximum(self.ends[rows] - lengths, 0)
        starts = np.cumsum(counts) - counts
        first = rows * self.slots + lengths
        flat = np.repeat(first - starts, counts) + np.arange(int(counts.sum()))
        mask, positions = self.cache_mask.reshape(-1), self.positions.reshape(-1)
        mask[flat] &= positions[flat] < np.repeat(lengths, counts)
        self._lengths[rows] = np.minimum(self._lengths[rows], lengths)

    def _truncate(self, rows: Ints) -> None:
        """Frees the invalid slots at the ends of rows."""
        most = int(self.ends[rows].max(initial=0))
        masks = self.cache_mask[rows, :most][:, ::-1]
        if most:
            self.ends[rows] = np.where(masks.any(axis=1), most - masks.argmax(axis=1), 0)

    def _tell_hidden(self, rows: Ints) -> None:
        self.hidden.commit(rows, self.cache_mask.reshape(-1), self.positions.reshape(-1))
