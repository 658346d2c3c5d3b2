"""PrefixCache: texts whose keys and values are still in the stores, found by what they begin with.

Contract: a prefix is found by the longest chain of whole blocks that it shares with a text, and
among those by how many tokens of the next block they share; for models that go on from few places,
by the deepest of these. Hashes only say where to look: tokens are compared. Who asks under another
salt finds nothing. Least recently used prefixes go first.

Not here: where keys and values stand (`Arena`), and how they are copied (`StateManager`).
Source of the chain of hashes: vLLM's automatic prefix caching, design document.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field

import numpy as np

from statemgr.arena import KV_QUANTUM
from statemgr.arrays import Ints
from statemgr.layer_state import KeptState, KeptStates

_Key = tuple[str, int]  # salt, and the hash of a chain of blocks


class TokenChain:
    """A text's tokens, and the hash of every chain of whole blocks that it begins with."""

    def __init__(self, tokens: Sequence[int] | Ints) -> None:
        self.tokens: Ints = np.array(tokens, dtype=np.int64)
        self.hashes = [0]  # by number of blocks
        for start in range(0, len(self.tokens) - KV_QUANTUM + 1, KV_QUANTUM):
            block = self.tokens[start : start + KV_QUANTUM].tobytes()
            self.hashes.append(hash((self.hashes[-1], block)))

    def first(self, count: int) -> "TokenChain":
        """The chain of the first `count` tokens."""
        chain = copy(self)
        chain.tokens = self.tokens[:count]
        chain.hashes = self.hashes[: count // KV_QUANTUM + 1]
        return chain


@dataclass(frozen=True)
class CacheUse:
    """What a request wants of the cache.

    Attributes:
        salt: only requests with the same one share prefixes; None: it shares nothing.
        reads: False: it reads its whole prompt, and leaves it to others.
    """

    salt: str | None = None
    reads: bool = True


@dataclass(eq=False, kw_only=True)
class CachedPrefix:
    """
    Attributes:
        owner: its number in the arena.
        start, blocks: of its extent.
        lengths: by model, of how many of its tokens the model's store has keys and values: those
            of positions 0, 1, .. in the slots from its start on.
        states: by model with recurrent layers, their states by number of tokens. Keys and values
            are of use up to there alone.
    """

    owner: int
    salt: str
    chain: TokenChain
    start: int
    blocks: int
    lengths: dict[str, int]
    states: dict[str, dict[int, KeptState]] = field(default_factory=dict)

    def reach(self, most: int) -> dict[str, int]:
        """By model: how many tokens, of the first `most`, a row need not read."""
        return {
            name: deepest(self.states.get(name), min(length, most))
            for name, length in self.lengths.items()
        }

    def worth(self, common: int, models: Collection[str]) -> int:
        """The most that one of `models` need not read, of so many tokens; without models these."""
        reach = self.reach(common) if models else {}
        return max((reach.get(name, 0) for name in models), default=common)

    def take_over(self, states: Mapping[str, KeptStates], most: int) -> None:
        """States of another one that shares `most` tokens."""
        for name, own in self.states.items():
            bound, theirs = min(most, self.lengths[name]), states.get(name, {})
            own.update({count: state for count, state in theirs.items() if count <= bound})

    @property
    def longest(self) -> int:
        return max(self.lengths.values(), default=0)

    @property
    def slots(self) -> Ints:
        """[longest] flat slots by position."""
        return self.start * KV_QUANTUM + np.arange(self.longest)


@dataclass(kw_only=True)
class CacheCounts:
    """Since the start.

    Attributes:
        lookups: requests that were looked for; `hits`: that found something.
        lookup_tokens: of these requests; `cached_tokens`: that they did not read again.
        failures: copies that failed, whose tokens were read again.
        imported_tokens: whose keys and values came from another process.
    """

    lookups: int = 0
    hits: int = 0
    lookup_tokens: int = 0
    cached_tokens: int = 0
    evictions: int = 0
    failures: int = 0
    imported_tokens: int = 0


@dataclass
class PrefixCache:
    """`counts` is kept by who uses it, but for evictions."""

    counts: CacheCounts = field(default_factory=CacheCounts)
    _entries: OrderedDict[int, CachedPrefix] = field(default_factory=OrderedDict)
    _index: dict[_Key, dict[int, CachedPrefix]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[CachedPrefix]:
        """Least recently used first."""
        return iter(list(self._entries.values()))

    def __contains__(self, owner: int) -> bool:
        return owner in self._entries

    def __getitem__(self, owner: int) -> CachedPrefix:
        return self._entries[owner]

    @property
    def blocks(self) -> int:
        """May be asked from any thread."""
        return sum(entry.blocks for entry in self)

    def add(self, entry: CachedPrefix) -> None:
        """As the most recently used one."""
        self._entries[entry.owner] = entry
        self._list(entry)

    def remove(self, entry: CachedPrefix) -> None:
        del self._entries[entry.owner]
        self._unlist(entry)

    def touch(self, entry: CachedPrefix) -> None:
        """It has been used."""
        self._entries.move_to_end(entry.owner)

    def oldest(self, but: CachedPrefix | None = None) -> CachedPrefix | None:
        """The least recently used one."""
        return next((entry for entry in self._entries.values() if entry is not but), None)

    def find(
        self, chain: TokenChain, limit: int, salt: str, models: Collection[str] = ()
    ) -> tuple[CachedPrefix, int, int] | None:
        """The best prefix, how many of the first `limit` tokens it shares, and how many any prefix
        shares. None: not one token.

        The best one shares the most; with `models`, one of these need read the fewest. Of equal
        ones it is the most recently added.
        """
        best, most, shared, seen = None, (0, 0), 0, set[int]()
        for blocks in range(min(limit // KV_QUANTUM, len(chain.hashes) - 1), -1, -1):
            if most[0] >= (blocks + 1) * KV_QUANTUM:  # all others share less
                break
            bucket = self._index.get((salt, chain.hashes[blocks]), {})
            if len(bucket) == len(seen):  # it holds all that share more
                continue
            for entry in [one for owner, one in bucket.items() if owner not in seen]:
                common = common_tokens(entry.chain.tokens, chain.tokens[:limit])
                value = entry.worth(common, models), common
                if common and value >= most:
                    best, most = entry, value
                shared = max(shared, common)
            seen |= bucket.keys()
        return None if best is None else (best, most[1], shared)

    def forget_model(self, name: str) -> list[CachedPrefix]:
        """A model's store is gone. A prefix ends where the other models' tokens do. Returns the
        prefixes that became shorter, those of which nothing is left among them."""
        return [entry for entry in self._entries.values() if self._forget(entry, name)]

    def trim_states(self, name: str, most: int) -> list[CachedPrefix]:
        """Leaves so many recurrent states of a model: those of prefixes that were used last, and
        of one prefix those with the most tokens. Returns as `forget_model`."""
        held = [
            (entry, count)
            for entry in self._entries.values()
            for count in sorted(entry.states.get(name, ()))
        ]
        shorter = []
        for entry, count in held[: max(0, len(held) - most)]:
            del entry.states[name][count]
            if not entry.states[name] and self._forget(entry, name):
                shorter.append(entry)
        return shorter

    def _forget(self, entry: CachedPrefix, name: str) -> bool:
        """Whether a prefix became shorter without a model's tokens."""
        entry.lengths.pop(name, None)
        entry.states.pop(name, None)
        is_shorter = entry.longest < len(entry.chain.tokens)
        if is_shorter:
            self._shorten(entry)
        return is_shorter

    def _shorten(self, entry: CachedPrefix) -> None:
        """To what its longest model has read: a text that is compared with more of it would take
        it for the best one, and find nothing."""
        self._unlist(entry)
        entry.chain = entry.chain.first(entry.longest)
        self._list(entry)

    def _list(self, entry: CachedPrefix) -> None:
        for key in _keys(entry):
            self._index.setdefault(key, {})[entry.owner] = entry

    def _unlist(self, entry: CachedPrefix) -> None:
        for key in _keys(entry):
            bucket = self._index[key]
            del bucket[entry.owner]
            if not bucket:
                del self._index[key]

    def check_integrity(self) -> None:
        """Asserts that the index knows all prefixes, and no others."""
        wanted: dict[_Key, set[int]] = {}
        for entry in self._entries.values():
            assert 0 < entry.longest == len(entry.chain.tokens), "a prefix claims other tokens"
            assert entry.blocks == -(-entry.longest // KV_QUANTUM), "blocks that a prefix needs not"
            assert all(entry.lengths.values()), "a model that has nothing of a prefix"
            for name, states in entry.states.items():
                assert 0 < min(states) <= max(states) <= entry.lengths[name], "states of no tokens"
            for key in _keys(entry):
                wanted.setdefault(key, set()).add(entry.owner)
        assert wanted == {key: set(bucket) for key, bucket in self._index.items()}, "the index"


def deepest(states: KeptStates | None, most: int) -> int:
    """The most tokens, of `most`, that states can be gone on from; None: any number."""
    return most if states is None else max((n for n in states if n <= most), default=0)


def common_tokens(ours: Ints, theirs: Ints) -> int:
    """How many tokens two texts begin with together."""
    count = min(len(ours), len(theirs))
    if not count:
        return 0
    differs = ours[:count] != theirs[:count]
    first = int(differs.argmax())
    return first if differs[first] else count


def _keys(entry: CachedPrefix) -> Iterable[_Key]:
    return ((entry.salt, each) for each in entry.chain.hashes)
