"""PrefixSharing: what rows need not read, since it was read before or is being read.

Contract: a row copies the keys and values of tokens that it begins with from a cached prefix, or
from a row that runs, under its own salt only; of recurrent layers a state that was kept, and tokens
as far as that. What others are still reading it may wait for: it
follows one leader, whose tokens it copies as they come. Only committed tokens are ever copied.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from statemgr.arrays import Ints
from statemgr.layer_state import KEPT_STATES, KeptStates
from statemgr.model_state import ModelState
from statemgr.prefix_cache import CachedPrefix, CacheUse, PrefixCache, TokenChain, common_tokens

logger = logging.getLogger(__name__)

_STRIDE = 2048  # tokens of a prompt between two of them


@dataclass(frozen=True, eq=False, kw_only=True)
class Found:
    """What is known of a text.

    Attributes:
        lengths: by model, of how many of its tokens there are keys and values in one place.
        entry, row: that place; `shared`: tokens that it has in common with the text; `parts`: that
            any place has.
        leader: a row that will have read `expected` of its tokens, more than there are now.
    """

    use: CacheUse
    lengths: dict[str, int] = field(default_factory=dict)
    entry: CachedPrefix | None = None
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
        copied: by model, tokens that the row copied. What it copies again, after the model's state
            was lost, counts once.
        reached: by model, how many of its first tokens there were at most after a copy.
    """

    number: int
    salt: str
    leader: tuple[int, int] | None = None
    expected: int = 0
    copied: dict[str, int] = field(default_factory=dict)
    reached: dict[str, int] = field(default_factory=dict)

    def note(self, model: str, own: int, length: int) -> None:
        """Tokens `own` .. `length - 1` were copied."""
        reached = max(own, self.reached.get(model, 0))
        self.copied[model] = self.copied.get(model, 0) + max(0, length - reached)
        self.reached[model] = max(reached, length)

    def inherited(self, model: str | None = None) -> int:
        if model is not None:
            return self.copied.get(model, 0)
        return max(self.copied.values(), default=0)


class PrefixSharing:
    """Args: `states`: by name, those that there are now; `committed`: a row's tokens."""

    def __init__(
        self,
        cache: PrefixCache,
        states: Mapping[str, ModelState],
        committed: Callable[[int], Ints],
    ) -> None:
        self._cache = cache
        self._states = states
        self._committed = committed
        self._rows: dict[int, _Sharer] = {}
        self.wanted: dict[int, set[int]] = {}
        self._requests = 0

    def cached(self, chain: TokenChain, use: CacheUse) -> Found:
        """What is kept of a text, without its last token, whose logits are wanted."""
        if use.salt is None or not use.reads:
            return Found(use=use)
        cached = self._find(chain, use.salt)
        if cached is None:
            return Found(use=use)
        entry, shared, parts = cached
        reach = entry.reach(shared)
        return Found(use=use, lengths=reach, entry=entry, shared=shared, parts=parts)

    def find(self, chain: TokenChain, use: CacheUse) -> Found:
        """The same, and what running rows have read of it or will read."""
        best, limit = self.cached(chain, use), len(chain.tokens) - 1
        if use.salt is None or not use.reads:
            return best
        leader, expected, usable = None, 0, self._usable(best.lengths)
        for row, other in self._rows.items():
            if other.salt != use.salt:
                continue
            shared = common_tokens(self._committed(row), chain.tokens[:limit])
            if shared > expected:
                leader, expected = row, shared
            if shared > usable:  # whoever will have read the most may have read nothing yet
                lengths = self._reach(row, shared)
                if self._usable(lengths) > usable:
                    usable = self._usable(lengths)
                    best = replace(best, lengths=lengths, entry=None, row=row, shared=shared)
        best = replace(best, parts=max(best.parts, expected))
        if leader is None or expected <= usable:
            return best
        return replace(best, leader=leader, expected=expected)

    def begin(self, row: int, found: Found, is_there: bool) -> None:
        """A row begins with what was found for it; `is_there`: and is still where it was."""
        salt, counts = found.use.salt, self._cache.counts
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
        if found.entry is not None and is_there:
            self._copy_entry(row, found.entry, found.shared)
        elif found.row is not None:
            self._copy_row(row, found.row, found.shared)
        counts.hits += sharer.inherited() > 0

    def end(self, row: int) -> str | None:
        """A row ends. Returns its salt."""
        self.wanted.pop(row, None)
        sharer = self._rows.pop(row, None)
        return None if sharer is None else sharer.salt

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
        return [
            row
            for row, sharer in self._rows.items()
            if sharer.leader is not None and self._follow(row, sharer, sharer.leader)
        ]

    def _follow(self, row: int, sharer: _Sharer, leader: tuple[int, int]) -> bool:
        """Whether the row has copied anything."""
        if self._is_there(leader):
            has_copied = self._copy_row(row, leader[0], sharer.expected)
            # A leader that has passed what was wanted of it has no state there, and never will.
            if self._has_read(row, sharer.expected) or self._has_read(leader[0], sharer.expected):
                sharer.leader = None
            return has_copied
        sharer.leader = None  # it has ended, and what it has read is cached
        chain = TokenChain(self._committed(row))
        cached = self._find(chain, sharer.salt)
        return cached is not None and self._copy_entry(row, *cached[:2])

    def _has_read(self, row: int, tokens: int) -> bool:
        """Where there are models whose rows are canonical, the others read what they lack
        themselves: with their leader, which lacks it as well."""
        known = self._lengths(row)
        canonical = [known[name] for name, state in self._states.items() if state.canonical]
        return min(canonical or known.values(), default=0) >= tokens

    def _is_there(self, leader: tuple[int, int]) -> bool:
        row, number = leader
        return row in self._rows and self._rows[row].number == number

    def _lengths(self, row: int) -> dict[str, int]:
        rows = np.array([row])
        return {name: int(state.lengths(rows)[0]) for name, state in self._states.items()}

    def _copy_entry(self, row: int, entry: CachedPrefix, shared: int) -> bool:
        if entry.owner in self._cache:
            self._cache.touch(entry)
        slots, reach = entry.slots, entry.reach(shared)
        held = {name: slots[:length] for name, length in reach.items()}
        return self._copy(row, held, entry.states)

    def _copy_row(self, row: int, leader: int, shared: int) -> bool:
        reach, own = self._reach(leader, shared), self._lengths(row)
        held = {
            name: self._states[name].slots_of(leader, length)
            for name, length in reach.items()
            if length > own[name]
        }
        return self._copy(row, held, {name: self._states[name].passed(leader) for name in held})

    def _copy(
        self, row: int, held: Mapping[str, Ints], states: Mapping[str, KeptStates | None]
    ) -> bool:
        """Returns whether any tokens were copied.

        Args:
            held: by model, flat slots of the row's first tokens, by position.
            states: by model, recurrent states that go with them.
        """
        sharer, tokens = self._rows[row], self._committed(row)
        before, has_copied = sharer.inherited(), False
        for name, slots in held.items():
            state = self._states[name]
            own = int(state.lengths(np.array([row]))[0])
            if len(slots) <= own:
                continue
            try:
                state.inherit(row, tokens[own : len(slots)], slots[own:], states.get(name))
            except Exception:  # it reads them itself
                logger.exception("%s: row %d could not copy what is cached", name, row)
                self._cache.counts.failures += 1
            else:
                sharer.note(name, own, len(slots))
                has_copied = True
        self._cache.counts.cached_tokens += sharer.inherited() - before
        return has_copied

    def _find(self, chain: TokenChain, salt: str) -> tuple[CachedPrefix, int, int] | None:
        """See `PrefixCache.find`."""
        return self._cache.find(chain, len(chain.tokens) - 1, salt, self._deciding)

    @property
    def _deciding(self) -> list[str]:
        """Models that go on from few places, the target among them if it is one: what they need not
        read decides what a row copies. Others read what they lack then in little time."""
        states = self._states.items()
        return [name for name, state in states if state.is_recurrent and state.canonical]

    def _usable(self, lengths: Mapping[str, int]) -> int:
        """Tokens whose reading a place saves."""
        return max((lengths.get(name, 0) for name in self._deciding or lengths), default=0)

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
