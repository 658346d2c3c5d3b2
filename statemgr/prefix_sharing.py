"""PrefixSharing: what rows need not read, since it was read before or is being read.

Contract: a row refers to the whole blocks of tokens that it begins with, of a cached prefix or of a
row that runs, under its own salt only, and copies the rest to the token; of recurrent layers it
copies a state that was kept, and goes on from there. What others are still reading it may wait for:
it follows one leader, whose blocks it takes over as they are filled, and the rest where the two
part. Only committed tokens are ever shared, and numbers.
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

_STRIDE = 2048  # tokens of a prompt between two of them


@dataclass(frozen=True, eq=False, kw_only=True)
class Found:
    """What is known of a text.

    Attributes:
        lengths: by model, of how many of its tokens there are keys and values in one place.
        path, row: that place: cached blocks, the last one maybe in part, or a row; `shared`: tokens
            that it has in common with the text; `parts`: that any place has.
        leader: a row that will have read `expected` of its tokens, more than there are now.
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
    """A row.

    Attributes:
        leader: whom it follows, with the number of that row's request.
        expected: tokens that the leader will have read of its own.
        taken: by model, tokens that the row took over. What it takes over again, after the model's
            state was lost, counts once.
        reached: by model, how many of its first tokens there were at most after that.
    """

    number: int
    salt: str
    leader: tuple[int, int] | None = None
    expected: int = 0
    taken: dict[str, int] = field(default_factory=dict)
    reached: dict[str, int] = field(default_factory=dict)

    def note(self, model: str, own: int, length: int) -> None:
        """Tokens `own` .. `length - 1` were taken over."""
        reached = max(own, self.reached.get(model, 0))
        self.taken[model] = self.taken.get(model, 0) + max(0, length - reached)
        self.reached[model] = max(reached, length)

    def inherited(self, model: str | None = None) -> int:
        if model is not None:
            return self.taken.get(model, 0)
        return max(self.taken.values(), default=0)


class PrefixSharing:
    """Args: `states`: by name, those that there are now; `committed`: a row's tokens.

    Attributes:
        target: the model that decides what a row takes over, where there are several.
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

    def cached(self, chain: TokenChain, use: CacheUse) -> Found:
        """What is kept of a text, without its last token, whose logits are wanted."""
        best, limit = Found(use=use), len(chain.tokens) - 1
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
                best = Found(use=use, lengths=lengths, path=way, shared=shared)
            best = replace(best, parts=parts)
        return best

    def find(self, chain: TokenChain, use: CacheUse) -> Found:
        """The same, and what running rows have read of it or will read."""
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
            if shared > usable:  # whoever will have read the most may have read nothing yet
                lengths = self._reach(row, shared)
                if self._usable(lengths) > usable:
                    usable = self._usable(lengths)
                    best = replace(best, lengths=lengths, path=(), row=row, shared=shared)
        best = replace(best, parts=max(best.parts, expected))
        if leader is None or expected <= usable:
            return best
        return replace(best, leader=leader, expected=expected)

    def held(self, found: Found) -> int:
        """Blocks of what was found that rows have: whoever shares them takes no memory."""
        whole = max(found.lengths.values(), default=0) // BLOCK_SLOTS
        if found.row is not None:
            return whole
        return int((self._tables.references[_blocks_on(found.path[:whole])] > 1).sum())

    def begin(self, row: int, found: Found) -> None:
        """A row begins with what was found for it."""
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
        """A row ends. `keep`: what it has read is good for others."""
        self.wanted.pop(row, None)
        sharer = self._rows.pop(row, None)
        if keep and sharer is not None:
            try:
                self._keep(row, sharer.salt)
            except Exception:
                logger.exception("row %d is not kept", row)
                self.cache.counts.failures += 1

    def inherited(self, row: int, model: str | None = None) -> int:
        """See `StateManager.inherited`."""
        return self._rows[row].inherited(model) if row in self._rows else 0

    def leaders(self) -> dict[int, tuple[int, int]]:
        """See `StateManager.leaders`."""
        return {
            row: (sharer.leader[0], sharer.expected)
            for row, sharer in self._rows.items()
            if sharer.leader is not None and self._is_there(sharer.leader)
        }

    def follow(self) -> list[int]:
        """See `StateManager.follow`."""
        followed = [
            row
            for row, sharer in self._rows.items()
            if sharer.leader is not None and self._follow(row, sharer, sharer.leader)
        ]
        return sorted({*followed, *self._catch_up()})

    def waits(self, name: str, rows: Ints) -> Bools:
        """See `StateManager.waits`."""
        waits = np.zeros(len(rows), dtype=np.bool_)
        if (state := self._states.get(name)) is not None:
            for at in self._sharing_next(state, rows).tolist():
                own = int(state.ends[rows[at]])
                others = self._tables.sharers(int(rows[at]), own // BLOCK_SLOTS)
                waits[at] = (others[rows[:at]] & (state.ends[rows[:at]] >= own)).any()
        return waits

    def forget_model(self, name: str) -> None:
        """A model's store is gone."""
        self.cache.forget_states(name)
        is_filled = np.zeros(self._tables.blocks, dtype=np.bool_)
        for state in self._states.values():
            is_filled |= state.filled > 0
        self.cache.drop_unfilled(is_filled)

    def check_integrity(self) -> None:
        """Asserts that blocks are shared by rows of the same tokens only, and none is that may be
        written to."""
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
        """Whether the row has taken over anything."""
        if not self._is_there(leader):  # it has ended, and what it has read is cached
            sharer.leader = None
            chain = TokenChain(self._committed(row))
            return self._take_found(row, self.cached(chain, CacheUse(sharer.salt)))
        reach = self._reach(leader[0], sharer.expected)
        # A leader that has passed what was wanted of it has no state there, and never will.
        if any(self._has_read(each, sharer.expected) for each in (row, leader[0])):
            sharer.leader = None
        else:  # the rest of a block is copied once, when they part
            for name, state in self._states.items():
                reach[name] -= 0 if state.is_recurrent else reach[name] % BLOCK_SLOTS
        return self._take_row(row, leader[0], reach)

    def _catch_up(self) -> list[int]:
        """Models go on behind what others have filled meanwhile of the blocks that rows share."""
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
        """Places among `rows` of those whose next block for a model to fill others have as well."""
        place = state.ends[rows] // BLOCK_SLOTS
        has = place < self._tables.sizes[rows]
        blocks = self._tables.table[rows, np.where(has, place, 0)]
        return np.flatnonzero(has & (self._tables.references[blocks] > 1))

    def _has_read(self, row: int, tokens: int) -> bool:
        """Whether the target has, or all models where there is none; the others read what they
        lack themselves: with their leader, which lacks it as well."""
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
        """By model: how many of a path's tokens, `shared` at most, a row need not read."""
        blocks, lengths = _blocks_on(path), dict[str, int]()
        for name, state in self._states.items():
            states = states_on(path, name) if state.is_recurrent else None
            lengths[name] = deepest(states, state.covered(blocks, shared))
        return lengths

    def _take_found(self, row: int, found: Found) -> bool:
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
        """Returns whether any tokens were taken over.

        Args:
            blocks: of the row's first tokens.
            lengths: by model, for how many of these it is to go on from there.
            states: by model, recurrent states that go with them.
        """
        sharer, tokens, own = self._rows[row], self._committed(row), self._lengths(row)
        lengths = {name: length for name, length in lengths.items() if length > own[name]}
        if not lengths:
            return False
        before, has_taken = sharer.inherited(), False
        blocks = blocks[: -(-max(lengths.values()) // BLOCK_SLOTS)]
        whole, held = max(lengths.values()) // BLOCK_SLOTS, blocks
        self._tables.hold(blocks)  # as long as anything is copied
        try:
            start = self._refer(row, blocks, whole, own) * BLOCK_SLOTS
            if start >= whole * BLOCK_SLOTS:  # if nothing else is free, the row has the rest itself
                self._tables.release(blocks[whole:])
                held = blocks[:whole]
            for name, length in lengths.items():
                state, first = self._states[name], max(own[name], start)
                try:
                    if first < length:
                        places = np.arange(first, length)
                        source = blocks[places // BLOCK_SLOTS] * BLOCK_SLOTS + places % BLOCK_SLOTS
                        state.take_copy(row, first, source)
                except NoFreeBlocksError:  # it reads them itself
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
        """The row refers to the first `whole` ones of `blocks`, if nothing that it has itself is
        lost. Returns how many of them it has then."""
        common = common_start(self._tables.of(row), blocks)
        known = {name: self._states[name].covered(blocks, has) for name, has in own.items()}
        is_lost = any(max(known[name], common * BLOCK_SLOTS) < has for name, has in own.items())
        if common >= whole or is_lost:
            return common
        self._tables.share(row, common, blocks[common:whole])
        return whole

    def _keep(self, row: int, salt: str) -> None:
        """Caches what a row has read, and what a model that gave it up since had read before."""
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
        for name in states:  # there is room for so many as rows have that run
            self.cache.trim_states(name, KEPT_STATES * len(self._tables.sizes))

    def _cache_block(
        self, path: Sequence[CachedBlock], salt: str, piece: Ints, block: int
    ) -> CachedBlock:
        """The node behind a path that holds what a row's block does, and maybe more."""
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
        """Whether a block holds all that another one does, whose tokens it begins with: it is
        given what it lacks, if nobody else has it."""
        states = self._states.values()
        if all(state.filled[block] >= state.filled[other] for state in states):
            return True
        if self._tables.references[block] > 1:
            return False
        for state in states:
            state.fill_block(block, other)
        return True

    def _usable(self, lengths: Mapping[str, int]) -> int:
        """Tokens whose reading a place saves: where the target goes on from few places, what it
        need not read; other models read what they lack then in little time."""
        target = self._states.get(self.target or "")
        if self.target is not None and target is not None and target.is_recurrent:
            return lengths.get(self.target, 0)
        return max(lengths.values(), default=0)

    def _reach(self, row: int, most: int) -> dict[str, int]:
        return {name: state.reach(row, most) for name, state in self._states.items()}

    def _want(self, row: int, found: Found) -> None:
        """Where recurrent states are to be kept on the row's way: before the last token of its
        prompt, which may be sent again; where texts part; and now and then. And where it parts from
        its leader, on the leader's way."""
        last = len(self._committed(row)) - 1
        wanted = [last, found.parts, *range(last // _STRIDE * _STRIDE, 0, -_STRIDE)]
        known = min(found.lengths.values(), default=0)
        self.wanted[row] = set([count for count in wanted if count > known][: KEPT_STATES - 1])
        if found.leader is not None and len(self.wanted[found.leader]) < KEPT_STATES:
            self.wanted[found.leader].add(found.expected)


def _blocks_on(path: Sequence[CachedBlock]) -> Ints:
    return np.array([node.block for node in path], dtype=np.int64)
