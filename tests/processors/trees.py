"""Token trees as plain lists, random ones, and what is said of them one node at a time."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from processors.token_tree import ROOT, TokenTree

Path = tuple[int, ...]


class Node(NamedTuple):
    parent: int
    token: int
    log_prob: float = 0.0  # of the path
    origin: int = 0


Nodes = list[Node]


def build(rows: dict[int, Nodes], spare: int = 0) -> TokenTree:
    """`spare`: places without a node in the widest row."""
    numbers = sorted(rows)
    width = max((len(rows[row]) for row in numbers), default=0) + spare
    shape = (len(numbers), width)
    tree = TokenTree(
        rows=np.array(numbers, dtype=np.int64),
        tokens=np.zeros(shape, dtype=np.int64),
        parents=np.full(shape, ROOT),
        depths=np.zeros(shape, dtype=np.int64),
        log_probs=np.full(shape, -np.inf),
        origins=np.zeros(shape, dtype=np.int64),
        sizes=np.array([len(rows[row]) for row in numbers], dtype=np.int64),
    )
    for index, row in enumerate(numbers):
        for place, node in enumerate(rows[row]):
            tree.tokens[index, place] = node.token
            tree.parents[index, place] = node.parent
            tree.depths[index, place] = len(lineage(rows[row], place))
            tree.log_probs[index, place] = node.log_prob
            tree.origins[index, place] = node.origin
    return tree


def nodes_of(tree: TokenTree) -> dict[int, Nodes]:
    """The tree as lists, once it is sound: padding and depths as they are promised."""
    rows: dict[int, Nodes] = {}
    for index, row in enumerate(tree.rows.tolist()):
        size = int(tree.sizes[index])
        parts = (tree.parents, tree.tokens, tree.log_probs, tree.origins)
        columns = [part[index, :size].tolist() for part in parts]
        nodes = [Node(*values) for values in zip(*columns, strict=True)]
        assert all(ROOT <= node.parent < place for place, node in enumerate(nodes))
        depths = [len(lineage(nodes, place)) for place in range(size)]
        assert tree.depths[index].tolist() == depths + [0] * (tree.tokens.shape[1] - size)
        assert np.all(tree.parents[index, size:] == ROOT)
        assert np.all(tree.log_probs[index, size:] == -np.inf)
        assert len({path(nodes, place) for place in range(size)}) == size, "equal siblings"
        rows[row] = nodes
    return rows


def line(*tokens: int) -> Nodes:
    return [Node(place - 1, token, 0.0, place) for place, token in enumerate(tokens)]


def lineage(nodes: Nodes, place: int) -> list[int]:
    """The node, its parent, and so on below the root."""
    found = []
    while place != ROOT:
        found.append(place)
        place = nodes[place].parent
    return found


def path(nodes: Nodes, place: int) -> Path:
    """Tokens from the root's child down to the node; () for the root."""
    return tuple(nodes[one].token for one in reversed(lineage(nodes, place)))


def by_path(nodes: Nodes) -> dict[Path, Node]:
    return {path(nodes, place): node for place, node in enumerate(nodes)}


def walk(nodes: Nodes, says: Callable[[Path], int]) -> Path:
    """Down from the root along what is said, as far as there are nodes, and one token more."""
    known = by_path(nodes)
    text: Path = (says(()),)
    while text in known:
        text = (*text, says(text))
    return text


def grown(
    random: np.random.Generator, size: int, says: Callable[[Path], int], vocab_size: int
) -> Nodes:
    """A random tree; most of its nodes are what `says` after their parents, where it is new."""
    nodes: Nodes = []
    while len(nodes) < size:
        parent = int(random.integers(max(ROOT, len(nodes) - 4), len(nodes)))
        text = path(nodes, parent)
        token = says(text) if random.random() < 0.6 else int(random.integers(vocab_size))
        if (*text, token) not in by_path(nodes):
            nodes.append(Node(parent, token, origin=len(nodes)))
    return nodes


@st.composite
def node_lists(draw: st.DrawFn, most: int = 9) -> Nodes:
    """Of tokens 0 .. 2, so that paths meet; log-probabilities have ties, and -inf among them."""
    nodes: Nodes = []
    for _ in range(draw(st.integers(0, most))):
        parent, token = draw(st.integers(ROOT, len(nodes) - 1)), draw(st.integers(0, 2))
        if (*path(nodes, parent), token) in by_path(nodes):
            continue
        above = 0.0 if parent == ROOT else nodes[parent].log_prob
        loss = draw(st.sampled_from((0.0, 0.5, 1.0, 1.5, float("inf"))))
        nodes.append(Node(parent, token, above - loss, draw(st.integers(0, 20))))
    return nodes


forests = st.dictionaries(st.integers(0, 9), node_lists(), min_size=1, max_size=4)
trees = st.builds(build, forests, st.integers(0, 2))
