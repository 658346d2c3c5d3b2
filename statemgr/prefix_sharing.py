"""PrefixSharing: tokens that a row need not read, since others have read or are reading them.

Contract: a row refers to the whole blocks of its first tokens that a cached prefix or a running row
has under the same salt, and copies the rest to the exact token. For recurrent layers it copies a
kept state and continues from there. It may wait for tokens that another row is still reading: it
follows one leader, takes over the leader's blocks as they are filled, and copies the rest where
their texts part. Only committed tokens with finite values are ever shared.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from statemgr.arrays import Bools, Ints
from statemgr.blocks import BLOCK_SLOTS, BlockTables, NoFreeBlocksError
from statemgr.model_state import ModelState
from statemgr.prefix_cache import (
    CachedBlock,
    CacheUse,
    PrefixCache,
    TokenChain,
    common_start,
    deepest,
    states_on,
)
from statemgr.recurrent_store import KEPT_STATES, KeptState, KeptStates

logger = logging.getLogger(__name__)

_STRIDE = 2048  # tokens of a prompt between two kept recurrent states


@dataclass(frozen=True, eq=False, kw_only=True)
class FoundPrefix:
    """Search result for a text: the tokens of it that are in the cache or in a row.

    Attributes:
        lengths: by model, number of its first tokens with keys and values in one place.
        path: that place, if it is cached blocks, of which the last may be used in part.
        row: that place, if it is a running row.
        shared: tokens that the place has in common with the text.
        parts: the most tokens that any place has in common with the text.
        leader: a row that will have read `expected` tokens of the text, more than are usable now.
        expected: see `leader`.
    """

    use: CacheUse
    lengths: dict[str, int] = field(default_factory=dict)
    path: Sequence[CachedBlock] = ()
    row: int | None = None
    shared: int = 0
    parts: int = 0
    leader: int | None = None
    expected: int = 0


@dataclass(kw_only=True)
class _Sharer:
    """A row that shares prefixes.

    Attributes:
        leader: the row that it follows, and the number of that row's request.
        expected: number of the row's tokens that the leader will have read.
        taken: by model, tokens that the row took over. Tokens taken over again, after the model's
            state was lost, count once.
        reached: by model, the most of its first tokens that it had after taking over.
    """

    number: int
    salt: str
    leader: tuple[int, int] | None = None
    expected: int = 0
    taken: dict[str, int] = field(default_factory=dict)
    reached: dict[str, int] = field(default_factory=dict)

    def note(self, model: str, own: int, length: int) -> None:
        """Count tokens `own` .. `length - 1` as taken over."""
        reached = max(own, self.reached.get(model, 0))
        self.taken[model] = self.taken.get(model, 0) + max(0, length - reached)
        self.reached[model] = max(reached, length)

    def inherited(self, model: str | None = None) -> int:
        if model is not None:
            return self.taken.get(model, 0)
        return max(self.taken.values(), default=0)


class PrefixSharing:
    """Sharing of prefixes between running rows and the cache.

    `states` has the states of the models that are loaded, by name; `committed` returns a row's
    tokens.

    Attributes:
        target: the model that decides what a row takes over, if there are several.
    """

    def __init__(
        self,
        tables: BlockTables,
        states: Mapping[str, ModelState],
        committed: Callable[[int], Ints],
    ) -> None:
        self.cache = PrefixCache(tables)
        self.target: str | None = None
        self.wanted: dict[int, set[int]] = {}
        self._tables = tables
        self._states = states
        self._committed = committed
        self._rows: dict[int, _Sharer] = {}
        self._requests = 0

    def cached(self, chain: TokenChain, use: CacheUse) -> FoundPrefix:
        """Return what is cached of a text without its last token, whose logits are needed."""
        best, limit = FoundPrefix(use=use), len(chain.tokens) - 1
        if use.salt is None or not use.reads:
            return best
        path = self.cache.walk(chain, limit, use.salt)
        start = len(path) * BLOCK_SLOTS
        ways = [(path, start)] if path else []
        below = self.cache.below(path, chain, limit, use.salt)
        ways += [([*path, node], start + common) for node, common in below]
        for way, shared in ways:
            lengths = self._lengths_on(way, shared)
            value = self._usable(lengths), shared
            parts = max(best.parts, shared)
            if value >= (self._usable(best.lengths), best.shared):
                best = FoundPrefix(use=use, lengths=lengths, path=way, shared=shared)
            best = replace(best, parts=parts)
        return best

    def find(self, chain: TokenChain, use: CacheUse) -> FoundPrefix:
        """Return what is cached of a text, and what running rows have read or will read of it."""
        best, limit = self.cached(chain, use), len(chain.tokens) - 1
        if use.salt is None or not use.reads:
            return best
        leader, expected, usable = None, 0, self._usable(best.lengths)
        for row, other in self._rows.items():
            if other.salt != use.salt:
                continue
            shared = common_start(self._committed(row), chain.tokens[:limit])
            if shared > expected:
                leader, expected = row, shared
            if shared > usable:  # the row that will have read the most may have read nothing yet
                lengths = self._reach(row, shared)
                if self._usable(lengths) > usable:
                    usable = self._usable(lengths)
                    best = replace(best, lengths=lengths, path=(), row=row, shared=shared)
        best = replace(best, parts=max(best.parts, expected))
        if leader is None or expected <= usable:
            return best
        return replace(best, leader=leader, expected=expected)

    def held(self, found: FoundPrefix) -> int:
        """Count the found blocks that rows have already, so that sharing them takes no memory."""
        whole = max(found.lengths.values(), default=0) // BLOCK_SLOTS
        if found.row is not None:
            return whole
        return int((self._tables.references[_blocks_on(found.path[:whole])] > 1).sum())

    def begin(self, row: int, found: FoundPrefix) -> None:
        """Start a row with what was found for it."""
        salt, counts = found.use.salt, self.cache.counts
        if salt is None:
            return
        self._requests += 1
        sharer = self._rows[row] = _Sharer(number=self._requests, salt=salt)
        if found.leader is not None:
            sharer.leader = found.leader, self._rows[found.leader].number
            sharer.expected = found.expected
        self._want(row, found)
        if not found.use.reads:
            return
        counts.lookups += 1
        counts.lookup_tokens += len(self._committed(row)) - 1
        self._take_found(row, found)
        counts.hits += sharer.inherited() > 0

    def end(self, row: int, keep: bool) -> None:
        """End a row; with `keep`, cache what it has read for others."""
        self.wanted.pop(row, None)
        sharer = self._rows.pop(row, None)
        if keep and sharer is not None:
            try:
                self._keep(row, sharer.salt)
            except Exception:
                logger.exception("row %d is not kept", row)
                self.cache.counts.failures += 1

    def inherited(self, row: int, model: str | None = None) -> int:
        """Return the tokens that a row took over; see `StateManager.inherited`."""
        return self._rows[row].inherited(model) if row in self._rows else 0

    def leaders(self) -> dict[int, tuple[int, int]]:
        """Return the leaders of rows; see `StateManager.leaders`."""
        return {
            row: (sharer.leader[0], sharer.expected)
            for row, sharer in self._rows.items()
            if sharer.leader is not None and self._is_there(sharer.leader)
        }

    def follow(self) -> list[int]:
        """Let rows take over tokens from others; see `StateManager.follow`."""
        followed = [
            row
            for row, sharer in self._rows.items()
            if sharer.leader is not None and self._follow(row, sharer, sharer.leader)
        ]
        return sorted({*followed, *self._catch_up()})

    def waits(self, name: str, rows: Ints) -> Bools:
        """Return the rows that should not read now; see `StateManager.waits`."""
        waits = np.zeros(len(rows), dtype=np.bool_)
        if (state := self._states.get(name)) is not None:
            for at in self._sharing_next(state, rows).tolist():
                own = int(state.ends[rows[at]])
                others = self._tables.sharers(int(rows[at]), own // BLOCK_SLOTS)
                waits[at] = (others[rows[:at]] & (state.ends[rows[:at]] >= own)).any()
        return waits

    def forget_model(self, name: str) -> None:
        """Forget the states of a model whose store is gone, and blocks that only it had filled."""
        self.cache.forget_states(name)
        is_filled = np.zeros(self._tables.blocks, dtype=np.bool_)
        for state in self._states.values():
            is_filled |= state.filled > 0
        self.cache.drop_unfilled(is_filled)

    def check_integrity(self) -> None:
        """Assert that rows share blocks of the same tokens only.

        No shared block may be one that a row may still write to.
        """
        tables, cache = self._tables, self.cache
        cache.check_integrity()
        tables.check_integrity(np.array([node.block for node in cache], dtype=np.int64))
        texts = dict[int, tuple[int, bytes]]()
        for node in cache:
            above = node.above
            texts[node.block] = len(above) - 1, b"".join(each.tokens.tobytes() for each in above)
            for state in self._states.values():
                assert state.filled[node.block] <= len(node.tokens), "more is filled than cached"
        for row in range(len(tables.sizes)):
            tokens = self._committed(row)
            for place, block in enumerate(tables.of(row).tolist()):
                if tables.references[block] > 1:
                    end = (place + 1) * BLOCK_SLOTS
                    assert end < len(tokens), "a block that may be written to is shared"
                    own = place, tokens[:end].tobytes()
                    assert texts.setdefault(block, own) == own, "a block of other tokens is shared"

    def _follow(self, row: int, sharer: _Sharer, leader: tuple[int, int]) -> bool:
        """Take over what a leader has read; return whether the row has taken over anything."""
        if not self._is_there(leader):  # it has ended, and its tokens are cached
            sharer.leader = None
            chain = TokenChain(self._committed(row))
            return self._take_found(row, self.cached(chain, CacheUse(sharer.salt)))
        reach = self._reach(leader[0], sharer.expected)
        # A leader that is past the expected tokens will not keep a state there any more.
        if any(self._has_read(each, sharer.expected) for each in (row, leader[0])):
            sharer.leader = None
        else:  # a partial block is copied once, when the two rows part
            for name, state in self._states.items():
                reach[name] -= 0 if state.is_recurrent else reach[name] % BLOCK_SLOTS
        return self._take_row(row, leader[0], reach)

    def _catch_up(self) -> list[int]:
        """Move rows past tokens that others have filled in shared blocks; return these rows."""
        caught = []
        every = np.array(sorted(self._rows), dtype=np.int64)
        for name, state in self._states.items():
            behind = every[state.ends[every] < state.ends[every].max(initial=0)]
            for row in behind[self._sharing_next(state, behind)].tolist():
                own = int(state.ends[row])
                others = np.flatnonzero(self._tables.sharers(row, own // BLOCK_SLOTS))
                ahead = others[state.ends[others] > own].tolist()
                if ahead:
                    best = max(ahead, key=lambda each: int(state.ends[each]))
                    common = common_start(self._tables.of(row), self._tables.of(best))
                    reach = state.reach(best, common * BLOCK_SLOTS)
                    if self._take_row(row, best, {name: reach}):
                        caught.append(row)
        return caught

    def _sharing_next(self, state: ModelState, rows: Ints) -> Ints:
        """Return the indices of rows whose next block to fill is shared with others."""
        place = state.ends[rows] // BLOCK_SLOTS
        has = place < self._tables.sizes[rows]
        blocks = self._tables.table[rows, np.where(has, place, 0)]
        return np.flatnonzero(has & (self._tables.references[blocks] > 1))

    def _has_read(self, row: int, tokens: int) -> bool:
        """Return whether the target, or every model if there is no target, has read the tokens.

        The other models read the tokens that they lack themselves, together with the leader, which
        lacks them as well.
        """
        known = self._lengths(row)
        if self.target in known:
            return known[self.target] >= tokens
        return min(known.values(), default=0) >= tokens

    def _is_there(self, leader: tuple[int, int]) -> bool:
        row, number = leader
        return row in self._rows and self._rows[row].number == number

    def _lengths(self, row: int) -> dict[str, int]:
        rows = np.array([row])
        return {name: int(state.lengths(rows)[0]) for name, state in self._states.items()}

    def _lengths_on(self, path: Sequence[CachedBlock], shared: int) -> dict[str, int]:
        """Return by model how many tokens of a path, at most `shared`, a row need not read."""
        blocks, lengths = _blocks_on(path), dict[str, int]()
        for name, state in self._states.items():
            states = states_on(path, name) if state.is_recurrent else None
            lengths[name] = deepest(states, state.covered(blocks, shared))
        return lengths

    def _take_found(self, row: int, found: FoundPrefix) -> bool:
        if found.row is not None:
            return self._take_row(row, found.row, self._reach(found.row, found.shared))
        if not found.path:
            return False
        self.cache.touch(found.path)
        states = {name: states_on(found.path, name) for name in found.lengths}
        return self._take(row, _blocks_on(found.path), found.lengths, states)

    def _take_row(self, row: int, leader: int, lengths: Mapping[str, int]) -> bool:
        own, blocks = self._lengths(row), self._tables.of(leader)
        more, states = dict[str, int](), dict[str, KeptStates | None]()
        for name, length in lengths.items():
            state = self._states[name]
            state.vouch(leader, max(length, own[name]))
            if length > own[name]:
                states[name] = state.passed(leader)
                covered = state.covered(blocks, length)
                more[name] = deepest(states[name], covered) if state.is_recurrent else covered
        return self._take(row, blocks, more, states)

    def _take(
        self,
        row: int,
        blocks: Ints,
        lengths: Mapping[str, int],
        states: Mapping[str, KeptStates | None],
    ) -> bool:
        """Take over tokens for a row; return whether there were any.

        `blocks` are those of the row's first tokens. By model, `lengths` is the number of these
        tokens to continue after, and `states` the recurrent states that go with them.
        """
        sharer, tokens, own = self._rows[row], self._committed(row), self._lengths(row)
        lengths = {name: length for name, length in lengths.items() if length > own[name]}
        if not lengths:
            return False
        before, has_taken = sharer.inherited(), False
        blocks = blocks[: -(-max(lengths.values()) // BLOCK_SLOTS)]
        whole, held = max(lengths.values()) // BLOCK_SLOTS, blocks
        self._tables.hold(blocks)  # until everything is copied
        try:
            start = self._refer(row, blocks, whole, own) * BLOCK_SLOTS
            if start >= whole * BLOCK_SLOTS:  # the row may get the last block itself
                self._tables.release(blocks[whole:])
                held = blocks[:whole]
            for name, length in lengths.items():
                state, first = self._states[name], max(own[name], start)
                try:
                    if first < length:
                        places = np.arange(first, length)
                        source = blocks[places // BLOCK_SLOTS] * BLOCK_SLOTS + places % BLOCK_SLOTS
                        state.take_copy(row, first, source)
                except NoFreeBlocksError:  # the row reads these tokens
                    length = own[name] if state.is_recurrent else first
                except Exception:
                    logger.exception("%s: row %d could not copy what is kept", name, row)
                    self.cache.counts.failures += 1
                    length = own[name] if state.is_recurrent else first
                if length > own[name]:
                    state.inherit(row, tokens[own[name] : length], states.get(name))
                    sharer.note(name, own[name], length)
                    has_taken = True
        finally:
            self._tables.release(held)
        self.cache.counts.cached_tokens += sharer.inherited() - before
        return has_taken

    def _refer(self, row: int, blocks: Ints, whole: int, own: Mapping[str, int]) -> int:
        """Let the row refer to the first `whole` blocks, unless it would lose tokens that it has.

        Returns how many of these blocks it has afterwards.
        """
        common = common_start(self._tables.of(row), blocks)
        known = {name: self._states[name].covered(blocks, has) for name, has in own.items()}
        is_lost = any(max(known[name], common * BLOCK_SLOTS) < has for name, has in own.items())
        if common >= whole or is_lost:
            return common
        self._tables.share(row, common, blocks[common:whole])
        return whole

    def _keep(self, row: int, salt: str) -> None:
        """Cache what a row has read, and what models had read before they dropped the row."""
        states, blocks = dict[str, dict[int, KeptState]](), self._tables.of(row)
        last, filled = len(self._committed(row)) - 1, np.zeros(len(blocks), dtype=np.int64)
        for name, state in self._states.items():
            state.vouch(row, last)
            if kept := state.kept(row):
                covered = state.covered(blocks, last)
                states[name] = {n: each for n, each in kept.items() if n <= covered}
            filled = np.maximum(filled, state.filled[blocks])
        used, path = np.flatnonzero(filled).tolist(), list[CachedBlock]()
        length = min((used[-1] + 1) * BLOCK_SLOTS, last) if used else 0
        tokens = self._committed(row)[:length]
        for place in range(-(-length // BLOCK_SLOTS)):
            start = place * BLOCK_SLOTS
            piece = tokens[start : start + BLOCK_SLOTS]
            node = self._cache_block(path, salt, piece, int(blocks[place]))
            path.append(node)
            for name, kept in states.items():
                fits = {n: one for n, one in kept.items() if start < n <= start + BLOCK_SLOTS}
                if fits:
                    node.take_over({name: fits})
        self.cache.touch(path)
        for name in states:  # as many as running rows may have
            self.cache.trim_states(name, KEPT_STATES * len(self._tables.sizes))

    def _cache_block(
        self, path: Sequence[CachedBlock], salt: str, piece: Ints, block: int
    ) -> CachedBlock:
        """Return the node after a path that holds at least what a row's block does."""
        parent, cache = self.cache.parent_of(path, salt), self.cache
        parts = list[CachedBlock]()
        for node in tuple(parent.by_first.get(int(piece[0]), ())):
            common = common_start(node.tokens, piece)
            if common == len(piece):
                if self._fill(node.block, block):
                    return node
                if common == len(node.tokens):
                    if self._fill(block, node.block):
                        cache.replace(node, block)
                    return node
            elif common == len(node.tokens) and self._fill(block, node.block):
                parts.append(node)
        added = cache.add(parent, piece, block)
        for node in parts:
            added.take_over(node.states)
            cache.remove(node)
        return added

    def _fill(self, block: int, other: int) -> bool:
        """Return whether a block holds all that `other` does, and copy what it lacks if necessary.

        `block` begins with the tokens of `other`. Nothing is copied to a block with other users.
        """
        states = self._states.values()
        if all(state.filled[block] >= state.filled[other] for state in states):
            return True
        if self._tables.references[block] > 1:
            return False
        for state in states:
            state.fill_block(block, other)
        return True

    def _usable(self, lengths: Mapping[str, int]) -> int:
        """Return how many tokens of a place save reading time.

        A recurrent target can continue from few places only, so its count decides: the other models
        read what they lack then in little time. Otherwise the largest count does.
        """
        target = self._states.get(self.target or "")
        if self.target is not None and target is not None and target.is_recurrent:
            return lengths.get(self.target, 0)
        return max(lengths.values(), default=0)

    def _reach(self, row: int, most: int) -> dict[str, int]:
        return {name: state.reach(row, most) for name, state in self._states.items()}

    def _want(self, row: int, found: FoundPrefix) -> None:
        """Choose the numbers of tokens at which recurrent states of the row are kept.

        They are before the last token of its prompt, which may be sent again, where texts part, and
        every `_STRIDE` tokens. The leader also keeps one where the row parts from it.
        """
        last = len(self._committed(row)) - 1
        wanted = [last, found.parts, *range(last // _STRIDE * _STRIDE, 0, -_STRIDE)]
        known = min(found.lengths.values(), default=0)
        self.wanted[row] = set([count for count in wanted if count > known][: KEPT_STATES - 1])
        if found.leader is not None and len(self.wanted[found.leader]) < KEPT_STATES:
            self.wanted[found.leader].add(found.expected)


def _blocks_on(path: Sequence[CachedBlock]) -> Ints:
    return np.array([node.block for node in path], dtype=np.int64)
