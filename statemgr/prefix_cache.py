"""PrefixCache: blocks whose keys and values are reused by rows that begin with the same tokens.

Contract: each salt has a radix tree whose edges are blocks: the contents of a block follow from the
salt and the tokens down to it. Texts are compared token by token, and match to the exact token: the
last block of a match may be shared in part. A request with another salt finds nothing. The cache
has a reference to each of its blocks. When memory is needed, blocks that no row has are evicted,
those of the least recently used texts first, and the end of a text before its beginning.

How far models have filled the blocks is in `ModelState.filled`.
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
    """A text's tokens, and a key for the tokens of each of its whole blocks."""

    def __init__(self, tokens: Sequence[int] | Ints) -> None:
        self.tokens: Ints = np.array(tokens, dtype=np.int64)
        starts = range(0, len(self.tokens) - BLOCK_SLOTS + 1, BLOCK_SLOTS)
        self.pieces = [self.tokens[at : at + BLOCK_SLOTS].tobytes() for at in starts]


@dataclass(frozen=True)
class CacheUse:
    """A request's use of the cache.

    Attributes:
        salt: only requests with the same salt share prefixes; None: it shares nothing.
        reads: if False, it reads its whole prompt itself, and later requests may reuse that.
    """

    salt: str | None = None
    reads: bool = True


@dataclass(kw_only=True)
class CacheCounts:
    """Counts since the start.

    Attributes:
        lookups: requests for which the cache was searched.
        hits: those that found something.
        lookup_tokens: prompt tokens of `lookups`, except for the last of each.
        cached_tokens: tokens that rows did not have to read again.
        evictions: cached blocks that were given up for memory.
        failures: errors while a prefix was kept or taken over; it is then read again.
        imported_tokens: tokens whose keys and values came from another process.
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
    """A node of a salt's tree, whose root has no block.

    Attributes:
        tokens: tokens of the block; fewer than it has slots only if the text ends there.
        whole: children that are whole blocks, by all of their tokens.
        by_first: all children, by their first token.
        states: states of models with recurrent layers, by model and by number of tokens of the
            text, which end in this block.
        used: number of the last use of a text with this block.
        salt: salt of the tree; set for roots only.
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
        """The blocks of its text from the root, with this block last."""
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
    """Cached blocks in a tree for each salt.

    Users of the cache update `counts`, except for evictions.
    """

    def __init__(self, tables: BlockTables) -> None:
        self.counts = CacheCounts()
        self._tables = tables
        self._roots: dict[str, CachedBlock] = {}  # by salt
        # By block, least recently used first; the end of a text before its beginning.
        self._nodes: OrderedDict[int, CachedBlock] = OrderedDict()
        self._uses = 0
        self.is_cached: Bools = np.zeros(tables.blocks, dtype=np.bool_)
        tables.cache = self

    def __iter__(self) -> Iterator[CachedBlock]:
        """Iterate over the nodes, least recently used first."""
        return iter(list(self._nodes.values()))

    @property
    def blocks(self) -> int:
        """Number of cached blocks that no row has; may be read from any thread."""
        return int((self.is_cached & (self._tables.references == 1)).sum())

    def walk(self, chain: TokenChain, limit: int, salt: str) -> list[CachedBlock]:
        """Return the whole blocks that a text begins with, up to `limit` tokens."""
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
        """Return the blocks after a path of `walk` that share some of the text's next tokens.

        Each comes with the number of tokens that it shares.
        """
        node, start = path[-1] if path else self._roots.get(salt), len(path) * BLOCK_SLOTS
        wanted = chain.tokens[start:limit]
        if node is None or not len(wanted):
            return []
        likes = node.by_first.get(int(wanted[0]), ())
        return [(each, common_start(each.tokens, wanted)) for each in likes]

    def parent_of(self, path: Sequence[CachedBlock], salt: str) -> CachedBlock:
        """Return the node that the next block of a path is added to."""
        if path:
            return path[-1]
        return self._roots.setdefault(salt, _root(salt))

    def add(self, parent: CachedBlock, tokens: Ints, block: int) -> CachedBlock:
        """Add a block that is not cached yet, without marking it as used (`touch`)."""
        node = CachedBlock(block=block, tokens=tokens.copy(), parent=parent)
        parent.add(node)
        self._hold(node)
        return node

    def replace(self, node: CachedBlock, block: int) -> None:
        """Replace the block of a node by one with the same contents."""
        self._give_back(node)
        node.block = block
        self._hold(node)

    def remove(self, node: CachedBlock) -> None:
        """Remove a node that has no children."""
        assert not node.by_first, "what follows would be lost"
        assert node.parent is not None, "the root is no block"
        node.parent.remove(node)
        if node.parent.block == NO_BLOCK and not node.parent.by_first:
            del self._roots[node.parent.salt]
        self._give_back(node)

    def touch(self, path: Sequence[CachedBlock]) -> None:
        """Mark the blocks of a text as used, given from its beginning on."""
        self._uses += 1
        for node in reversed(path):
            self._nodes.move_to_end(node.block)
            node.used = self._uses

    def evict(self) -> bool:
        """Give back a block that no row has; see `BlockCache`."""
        for _ in range(len(self._nodes)):
            block, node = next(iter(self._nodes.items()))
            if not node.by_first and self._tables.references[block] == 1:
                self.remove(node)
                self.counts.evictions += 1
                return True
            self._nodes.move_to_end(block)  # in use, or not the end of a text
        for block in self._nodes:  # rows have blocks below it, and their own copy of this one
            if self._tables.references[block] == 1:
                self.uncache(block)
                self.counts.evictions += 1
                return True
        return False

    def uncache(self, block: int) -> None:
        """Remove a block and all blocks below it; see `BlockCache`."""
        top = self._nodes.get(block)
        for node in reversed(_with_all_below([top] if top else [])):
            self.remove(node)

    def drop_unfilled(self, is_filled: Bools) -> None:
        """Remove blocks that no model has filled, except those that lead to filled ones.

        `is_filled` is a mask, [blocks].
        """
        for node in reversed(_with_all_below(self._roots.values())):
            if node.block != NO_BLOCK and not (node.by_first or is_filled[node.block]):
                self.remove(node)

    def trim_states(self, name: str, most: int) -> None:
        """Keep at most `most` recurrent states of a model.

        States of texts that were used last stay, and of one text those with the most tokens.
        """
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
        """Assert that the trees have exactly the cached blocks."""
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
    """Return nodes and all nodes below them, parents before their children."""
    found = list(nodes)
    for node in found:  # the list grows in the loop
        found += node.children
    return found


def states_on(path: Sequence[CachedBlock], name: str) -> KeptStates:
    """Return a model's states that apply to a path, by number of tokens.

    They are the states on the path, and those of its siblings up to the token where these part from
    it.
    """
    found = dict[int, KeptState]()
    for place, node in enumerate(path):
        assert node.parent is not None, "the root is on no path"
        for each in node.parent.by_first[int(node.tokens[0])]:
            most = place * BLOCK_SLOTS + common_start(each.tokens, node.tokens)
            found |= {n: state for n, state in each.states.get(name, {}).items() if n <= most}
    return found


def deepest(states: KeptStates | None, most: int) -> int:
    """Return the most tokens, up to `most`, at which there is a state to continue from.

    If `states` is None, a row can continue from any number of tokens.
    """
    return most if states is None else max((n for n in states if n <= most), default=0)


def common_start(ours: Ints, theirs: Ints) -> int:
    """Return how many leading numbers two arrays have in common."""
    count = min(len(ours), len(theirs))
    if not count:
        return 0
    differs = ours[:count] != theirs[:count]
    first = int(differs.argmax())
    return first if differs[first] else count
