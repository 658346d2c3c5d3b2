"""Trees from a request's own text: quotations are continued, and every tree is well formed."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from processors.drafts import DraftRequest
from processors.ngram import NgramDraftProcessor, NoiseLookup
from processors.noise import gumbel
from processors.token_tree import ROOT, Floats, Ints, TokenTree
from statemgr import StateManager, SuffixTable
from tests.processors.trees import nodes_of, path

VOCAB = 40
FLOOR = math.log(0.05)


def silent(row: int, position: int, ids: Ints) -> Floats:
    """The noise of greedy rows."""
    return np.zeros(len(ids))


def seeded(row: int, position: int, ids: Ints) -> Floats:
    return gumbel(row, position, VOCAB)[ids]


def opened(texts: list[list[int]]) -> tuple[SuffixTable, StateManager]:
    """The texts as committed tokens of rows 0 .., which the table has not read yet."""
    table, manager = SuffixTable(VOCAB), StateManager(rows=len(texts), max_tokens=256)
    for row, text in enumerate(texts):
        manager.allocate(text, most=256)
        table.open(row)
    return table, manager


def draft(
    texts: list[list[int]], depths: list[int], width: int = 1, noise: NoiseLookup = silent
) -> TokenTree:
    table, manager = opened(texts)
    rows = np.arange(len(texts))
    positions = np.full(len(texts), 5)
    request = DraftRequest(
        rows=rows, output_positions=positions, depths=np.array(depths), width=width
    )
    return NgramDraftProcessor().draft(table, manager, noise, request)


def paths(tree: TokenTree, index: int) -> list[list[int]]:
    """The path to each node of a row, in the order of the nodes."""
    nodes = nodes_of(tree)[index]
    return [list(path(nodes, place)) for place in range(len(nodes))]


def check(tree: TokenTree, depths: list[int], width: int) -> None:
    """What every tree promises."""
    assert tree.tokens.shape == (len(tree.rows), int(tree.sizes.max(initial=0)))
    assert {part.dtype for part in (tree.tokens, tree.parents, tree.depths)} == {np.dtype(np.int64)}
    assert not tree.tokens[~tree.real].any()
    for (index, nodes), depth in zip(nodes_of(tree).items(), depths, strict=True):
        found = tree.depths[index, : len(nodes)]
        assert (np.diff(found) >= 0).all()
        assert (np.bincount(found, minlength=1) <= width).all()
        assert found.max(initial=0) <= depth
        assert [node.origin for node in nodes] == list(range(len(nodes)))
        for node in nodes:
            above = 0.0 if node.parent == ROOT else nodes[node.parent].log_prob
            assert FLOOR <= node.log_prob <= above


def test_committed_output_is_read_before_drafting() -> None:
    table, manager = opened([[1, 2, 3, 4]])
    processor, one = NgramDraftProcessor(), np.array([0])
    arguments = (
        table,
        manager,
        silent,
        DraftRequest(rows=one, output_positions=one, depths=np.array([3])),
    )
    assert processor.draft(*arguments).sizes.tolist() == [0]
    manager.extend(0, np.array([1, 2]))
    assert processor.draft(*arguments).tokens.tolist() == [[3, 4, 1]]


def test_two_continuations_branch_and_the_better_stands_first() -> None:
    text = [1, 2, 3, 4, 9, 8, 1, 2, 3, 5, 9, 7, 1, 2, 3, 5, 9, 6, 1, 2, 3]
    tree = draft([text], [2], width=2)
    assert paths(tree, 0) == [[5], [4], [5, 9], [4, 9]]
    check(tree, [2], 2)


def test_log_probs_are_the_tables_where_a_row_is_greedy() -> None:
    text = [1, 2, 3, 4, 9, 8, 1, 2, 3, 5, 9, 7, 1, 2, 3]
    table, manager = opened([text])
    one = np.array([0])
    request = DraftRequest(rows=one, output_positions=one, depths=np.array([3]), width=3)
    tree = NgramDraftProcessor().draft(table, manager, silent, request)
    assert tree.sizes[0] > 3
    for text, log_prob in zip(paths(tree, 0), tree.log_probs[0], strict=True):
        expected, where = 1.0, table.end(0, manager.committed(0))
        for token in text:
            ids, probabilities = table.predict(0, where)
            expected *= dict(zip(ids.tolist(), probabilities.tolist(), strict=True))[token]
            where = table.after(0, where, token)
        assert math.exp(log_prob) == pytest.approx(expected)


def test_noise_shifts_the_choice_at_its_own_position() -> None:
    text = [1, 2, 3, 4, 9, 8, 1, 2, 3, 5, 9, 7, 1, 2, 3]
    asked = []

    def favours_4(row: int, position: int, ids: Ints) -> Floats:
        asked.append(position)
        return np.where((ids == 4) & (position == 5), 6.0, 0.0)

    assert draft([text], [2]).tokens.tolist() == [[5, 9]]
    tree = draft([text], [2], noise=favours_4)
    assert tree.tokens.tolist() == [[4, 9]]
    assert asked == [5, 6]
    assert tree.log_probs[0, 0] > math.log(0.9)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(0, 5)),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 4),
    st.sampled_from([silent, seeded]),
)
def test_every_tree_is_well_formed(
    rows: list[tuple[list[int], int]], width: int, noise: NoiseLookup
) -> None:
    texts, depths = [text for text, _ in rows], [depth for _, depth in rows]
    tree = draft(texts, depths, width, noise)
    check(tree, depths, width)
    for index, text in enumerate(texts):  # a row's tree does not depend on its neighbours
        if index == 0:
            alone = draft([text], [depths[index]], width, noise)
            assert paths(alone, 0) == paths(tree, 0)


def test_a_path_goes_on_as_far_as_it_may_and_is_likely() -> None:
    phrase = list(range(30))
    table, text = SuffixTable(VOCAB), np.array([*phrase, 35, *phrase[:10]])
    table.open(0)

    def path(most: int, least: float) -> list[tuple[int, float]]:
        return NgramDraftProcessor().path(table, text, silent, 0, 0, most, least)

    found = path(12, 0.0)
    assert [token for token, _ in found] == phrase[10:22]
    shares = np.cumprod([share for _, share in found])
    assert shares[-1] > 0.05
    # What together is less likely is left out; the first token is told in any case.
    assert path(12, float(shares[3])) == found[:4]
    assert path(12, 1.0) == found[:1]
    assert path(0, 0.0) == []
    assert [token for token, _ in path(64, 0.0)][:20] == phrase[10:]


def test_a_path_is_what_a_tree_of_width_1_has() -> None:
    text = [1, 2, 3, 4, 9, 8, 1, 2, 3, 5, 9, 7, 1, 2, 3]
    table, manager = opened([text])
    tree = draft([text], [3], noise=seeded)
    found = NgramDraftProcessor().path(table, manager.committed(0), seeded, 0, 5, 3, 0.0)
    count = int(tree.sizes[0])
    assert [token for token, _ in found[:count]] == tree.tokens[0, :count].tolist()
    together = np.log(np.cumprod([share for _, share in found[:count]]))
    np.testing.assert_allclose(together, tree.log_probs[0, :count])
