"""Trees of width 1: flattened, capped and joined without losing whose nodes they are."""

import numpy as np
import torch

from processors.token_tree import TokenTree, join

CPU = torch.device("cpu")


def make_tree(nodes: dict[int, list[int]], width: int = 3) -> TokenTree:
    """`nodes[row]`; the places behind a row's nodes hold 99."""
    rows = sorted(nodes)
    padded = [nodes[row] + [99] * (width - len(nodes[row])) for row in rows]
    tokens = torch.tensor(padded, dtype=torch.int64).reshape(len(rows), width)
    return TokenTree(np.array(rows), tokens, np.array([len(nodes[row]) for row in rows]))


def nodes_of(tree: TokenTree) -> dict[int, list[int]]:
    parts = np.split(tree.flat(CPU).numpy(), np.cumsum(tree.sizes)[:-1])
    return {int(row): part.tolist() for row, part in zip(tree.rows, parts, strict=True)}


def test_flat_has_the_nodes_row_after_row_and_no_padding() -> None:
    tree = make_tree({1: [4, 5, 6], 3: [], 4: [7]})
    assert tree.flat(CPU).tolist() == [4, 5, 6, 7]


def test_an_empty_tree_has_roots_only() -> None:
    tree = TokenTree.empty(np.array([2, 5]))
    assert tree.sizes.tolist() == [0, 0]
    assert tree.flat(CPU).shape == (0,)
    assert tree.flat(CPU).dtype == torch.int64


def test_a_capped_tree_keeps_its_first_nodes() -> None:
    tree = make_tree({0: [1, 2, 3], 1: [4], 2: [5, 6]})
    capped = tree.capped(np.array([2, 5, 0]))
    assert nodes_of(capped) == {0: [1, 2], 1: [4], 2: []}
    assert nodes_of(tree) == {0: [1, 2, 3], 1: [4], 2: [5, 6]}


def test_joined_trees_ascend_and_keep_their_nodes() -> None:
    first = make_tree({1: [4, 5, 6], 5: [7]})
    second = make_tree({0: [8], 3: [1, 2]}, width=2)
    joined = join([first, second, TokenTree.empty(np.array([2, 9]))])
    assert joined.rows.tolist() == [0, 1, 2, 3, 5, 9]
    assert nodes_of(joined) == {0: [8], 1: [4, 5, 6], 2: [], 3: [1, 2], 5: [7], 9: []}


def test_one_tree_joins_to_itself() -> None:
    tree = make_tree({1: [4]})
    assert join([tree]) is tree


def test_empty_trees_join_to_an_empty_tree() -> None:
    joined = join([TokenTree.empty(np.array([4])), TokenTree.empty(np.array([1]))])
    assert nodes_of(joined) == {1: [], 4: []}
