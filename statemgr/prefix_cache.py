"""PrefixCache: blocks whose keys and values rows that begin with the same tokens go on from.

Contract: a radix tree for each salt, whose edges are blocks: what a block holds follows from the
salt and the tokens down to it. Texts are compared token by token, and found to the token: the last
block of a match may be shared in part. Who asks under another salt finds nothing. The cache has a
reference to each of its blocks; where memory is needed, those that no row has go, the least
recently used texts first and of a text the end before the beginning.

Not here: how far models have filled the blocks (`ModelState.filled`).
Sources: the block hashes of vLLM's automatic prefix caching; SGLang's RadixAttention (Zheng et al.,
arXiv 2312.07104) for the tree and the order of eviction.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np

from statemgr.arrays import Bools, Ints
from statemgr.blocks import BLOCK_SLOTS, BlockTables
from statemgr.recurrent_store import KeptState, KeptStates

NO_BLOCK = -1


class TokenChain:
    """A text's tokens, and those of each of its whole blocks as a key."""

    def __init__(self, tokens: Sequence[int] | Ints) -> None:
        self.tokens: Ints = np.array(tokens, dtype=np.int64)
        starts = range(0, len(self.tokens) - BLOCK_SLOTS + 1, BLOCK_SLOTS)
        self.pieces = [self.tokens[at : at + BLOCK_SLOTS].tobytes() for at in starts]


@dataclass(frozen=True)
class CacheUse:
    """What a request wants of the cache.

    Attributes:
        salt: only requests with the same one share prefixes; None: it shares nothing.
        reads: False: it reads its whole prompt, and leaves it to others.
    """

    salt: str | None = None
    reads: bool = True


@dataclass(kw_only=True)
class CacheCounts:
    """Since the start.

    Attributes:
        lookups: requests that were looked for; `hits`: that found something.
        lookup_tokens: of these requests; `cached_tokens`: that they did not read again.
        evictions: cached blocks that were given up for memory.
        failures: of what was to be kept or taken over, and was read again.
        imported_tokens: whose keys and values came from another process.
    """

    lookups: int = 0
    hits: int = 0
    lookup_tokens: int = 0
    cached_tokens: int = 0
    evictions: int = 0
    failures: int = 0
    imported_tokens: int = 0


@dataclass(eq=False, kw_only=True)
class CachedBlock:
    """A node of a salt's tree; its root has no block.

    Attributes:
        tokens: of the block, fewer than it has slots only where the text ends.
        whole: children by all of their tokens; `by_first`: by the first one, those that are not
            whole included.
        states: by model with recurrent layers, their states by number of tokens of the text, which
            end in this block.
        used: when a text with it was used last.
        salt: of a root.
    """

    block: int
    tokens: Ints
    parent: "CachedBlock | None" = None
    whole: dict[bytes, "CachedBlock"] = field(default_factory=dict)
    by_first: dict[int, list["CachedBlock"]] = field(default_factory=dict)
    states: dict[str, dict[int, KeptState]] = field(default_factory=dict)
    used: int = 0
    salt: str = ""

    @property
    def above(self) -> "list[CachedBlock]":
        """The blocks of its text, its own the last one."""
        return [*self.parent.above, self] if self.parent is not None else []

    @property
    def children(self) -> list["CachedBlock"]:
        return [child for each in self.by_first.values() for child in each]

    def add(self, child: "CachedBlock") -> None:
        self.by_first.setdefault(int(child.tokens[0]), []).append(child)
        if len(child.tokens) == BLOCK_SLOTS:
            self.whole[child.tokens.tobytes()] = child

    def remove(self, child: "CachedBlock") -> None:
        first = int(child.tokens[0])
        self.by_first[first].remove(child)
        if not self.by_first[first]:
            del self.by_first[first]
        if len(child.tokens) == BLOCK_SLOTS:
            del self.whole[child.tokens.tobytes()]

    def take_over(self, states: dict[str, dict[int, KeptState]]) -> None:
        for name, own in states.items():
            self.states.setdefault(name, {}).update(own)


class PrefixCache:
    """`counts` is kept by who uses it, but for evictions."""

    def __init__(self, tables: BlockTables) -> None:
        self.counts = CacheCounts()
        self._tables = tables
        self._roots: dict[str, CachedBlock] = {}  # by salt
        # By block, the least recently used first; of a text the end before the beginning.
        self._nodes: OrderedDict[int, CachedBlock] = OrderedDict()
        self._uses = 0
        self.is_cached: Bools = np.zeros(tables.blocks, dtype=np.bool_)
        tables.cache = self

    def __iter__(self) -> Iterator[CachedBlock]:
        """Least recently used first."""
        return iter(list(self._nodes.values()))

    @property
    def blocks(self) -> int:
        """That no row has. May be asked from any thread."""
        return int((self.is_cached & (self._tables.references == 1)).sum())

    def walk(self, chain: TokenChain, limit: int, salt: str) -> list[CachedBlock]:
        """The whole blocks that a text begins with, up to `limit` tokens."""
        node, path = self._roots.get(salt), list[CachedBlock]()
        for piece in chain.pieces[: limit // BLOCK_SLOTS]:
            node = None if node is None else node.whole.get(piece)
            if node is None:
                break
            path.append(node)
        return path

    def below(
        self, path: Sequence[CachedBlock], chain: TokenChain, limit: int, salt: str
    ) -> list[tuple[CachedBlock, int]]:
        """Blocks behind a path that `walk` gave which share some of the text's next tokens, and
        how many."""
        node, start = path[-1] if path else self._roots.get(salt), len(path) * BLOCK_SLOTS
        wanted = chain.tokens[start:limit]
        if node is None or not len(wanted):
            return []
        likes = node.by_first.get(int(wanted[0]), ())
        return [(each, common_start(each.tokens, wanted)) for each in likes]

    def parent_of(self, path: Sequence[CachedBlock], salt: str) -> CachedBlock:
        """Where the next block of a path belongs."""
        if path:
            return path[-1]
        return self._roots.setdefault(salt, _root(salt))

    def add(self, parent: CachedBlock, tokens: Ints, block: int) -> CachedBlock:
        """A block that is not cached yet; it has not been used (`touch`)."""
        node = CachedBlock(block=block, tokens=tokens.copy(), parent=parent)
        parent.add(node)
        self._hold(node)
        return node

    def replace(self, node: CachedBlock, block: int) -> None:
        """Another block holds what the node's did."""
        self._give_back(node)
        node.block = block
        self._hold(node)

    def remove(self, node: CachedBlock) -> None:
        """One that has no children."""
        assert not node.by_first, "what follows would be lost"
        assert node.parent is not None, "the root is no block"
        node.parent.remove(node)
        if node.parent.block == NO_BLOCK and not node.parent.by_first:
            del self._roots[node.parent.salt]
        self._give_back(node)

    def touch(self, path: Sequence[CachedBlock]) -> None:
        """A text has been used, from its beginning on."""
        self._uses += 1
        for node in reversed(path):
            self._nodes.move_to_end(node.block)
            node.used = self._uses

    def evict(self) -> bool:
        """See `BlockCache`."""
        for _ in range(len(self._nodes)):
            block, node = next(iter(self._nodes.items()))
            if not node.by_first and self._tables.references[block] == 1:
                self.remove(node)
                self.counts.evictions += 1
                return True
            self._nodes.move_to_end(block)  # in use, or not the end of a text
        for block in self._nodes:  # rows have what follows it, and a copy of their own of this one
            if self._tables.references[block] == 1:
                self.uncache(block)
                self.counts.evictions += 1
                return True
        return False

    def uncache(self, block: int) -> None:
        """See `BlockCache`."""
        top = self._nodes.get(block)
        for node in reversed(_with_all_below([top] if top else [])):
            self.remove(node)

    def drop_unfilled(self, is_filled: Bools) -> None:
        """Blocks go in which no model has anything, [blocks], but for those that lead to others."""
        for node in reversed(_with_all_below(self._roots.values())):
            if node.block != NO_BLOCK and not (node.by_first or is_filled[node.block]):
                self.remove(node)

    def trim_states(self, name: str, most: int) -> None:
        """Leaves so many recurrent states of a model: those of texts that were used last, and of
        one text those with the most tokens."""
        held = [
            (node.used, count, node.states[name])
            for node in self._nodes.values()
            for count in node.states.get(name, ())
        ]
        held.sort(key=itemgetter(0, 1))
        for _, count, states in held[: max(0, len(held) - most)]:
            del states[count]

    def forget_states(self, name: str) -> None:
        for node in self._nodes.values():
            node.states.pop(name, None)

    def _hold(self, node: CachedBlock) -> None:
        self._tables.hold(np.array([node.block]))
        self._nodes[node.block] = node
        self.is_cached[node.block] = True

    def _give_back(self, node: CachedBlock) -> None:
        del self._nodes[node.block]
        self.is_cached[node.block] = False
        self._tables.release(np.array([node.block]))

    def check_integrity(self) -> None:
        """Asserts that each salt's tree has all blocks, and no others."""
        found = dict[int, CachedBlock]()
        for node in _with_all_below(self._roots.values()):
            whole = [each for each in node.children if len(each.tokens) == BLOCK_SLOTS]
            assert len(whole) == len(node.whole), "a block is in a tree twice, or not found"
            assert not node.children or len(node.tokens) in (0, BLOCK_SLOTS), "a gap in a text"
            found |= {child.block: child for child in node.children}
        assert found == self._nodes, "blocks of no text are cached"
        assert np.flatnonzero(self.is_cached).tolist() == sorted(found), "cached blocks"


def _root(salt: str) -> CachedBlock:
    return CachedBlock(block=NO_BLOCK, tokens=np.zeros(0, dtype=np.int64), salt=salt)


def _with_all_below(nodes: Iterable[CachedBlock]) -> list[CachedBlock]:
    """Parents before their children."""
    found = list(nodes)
    for node in found:  # which grows
        found += node.children
    return found


def states_on(path: Sequence[CachedBlock], name: str) -> KeptStates:
    """A model's states behind tokens of a path, by their number: its own, and those on the way to
    blocks that part from it."""
    found = dict[int, KeptState]()
    for place, node in enumerate(path):
        assert node.parent is not None, "the root is on no path"
        for each in node.parent.by_first[int(node.tokens[0])]:
            most = place * BLOCK_SLOTS + common_start(each.tokens, node.tokens)
            found |= {n: state for n, state in each.states.get(name, {}).items() if n <= most}
    return found


def deepest(states: KeptStates | None, most: int) -> int:
    """The most tokens, of `most`, that states can be gone on from; None: any number."""
    return most if states is None else max((n for n in states if n <= most), default=0)


def common_start(ours: Ints, theirs: Ints) -> int:
    """How many numbers two arrays begin with together."""
    count = min(len(ours), len(theirs))
    if not count:
        return 0
    differs = ours[:count] != theirs[:count]
    first = int(differs.argmax())
    return first if differs[first] else count
