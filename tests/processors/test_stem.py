"""A tree that is grafted onto a path says what the two say one after the other."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from processors.stem import graft, graft_values, renumbered
from processors.token_tree import TokenTree
from tests.processors.trees import Node, Nodes, build, by_path, nodes_of, path

STEMS = {2: [7, 8, 9], 5: [4], 6: [1, 2]}
TOPS: dict[int, Nodes] = {
    2: [Node(-1, 3, -0.5, 0), Node(-1, 4, -1.0, 1), Node(0, 5, -0.7, 2)],
    5: [Node(-1, 6, -0.1, 0)],
    6: [Node(-1, 3, -0.2, 0), Node(0, 3, -0.4, 1)],
}


def as_stem(texts: dict[int, list[int]]) -> TokenTree:
    width = max(map(len, texts.values()))
    tokens = np.array([text + [0] * (width - len(text)) for text in texts.values()])
    sizes = np.array([len(text) for text in texts.values()])
    return TokenTree.path(np.array(list(texts)), tokens, sizes)


def test_a_graft_has_the_stem_then_the_tree_behind_its_end() -> None:
    whole = nodes_of(graft(as_stem(STEMS), build(TOPS)))
    for row, text in STEMS.items():
        places = range(len(whole[row]))
        paths = [path(whole[row], place) for place in places]
        stem = [tuple(text[: k + 1]) for k in range(len(text))]
        top = [(*text, *path(TOPS[row], place)) for place in range(len(TOPS[row]))]
        assert paths == stem + top


def test_a_stem_is_certain_and_the_tree_keeps_its_probabilities() -> None:
    whole = nodes_of(graft(as_stem(STEMS), build(TOPS)))
    for row, text in STEMS.items():
        log_probs = [node.log_prob for node in whole[row]]
        assert log_probs == [0.0] * len(text) + [node.log_prob for node in TOPS[row]]


def test_values_follow_their_nodes() -> None:
    stem, top = as_stem(STEMS), build(TOPS)
    whole = graft(stem, top)
    tokens = graft_values(stem, top, stem.tokens, top.tokens, -9)
    assert np.array_equal(tokens[whole.real], whole.tokens[whole.real])
    assert (tokens[~whole.real] == -9).all()


def test_a_renumbered_tree_is_its_own_origin() -> None:
    whole = renumbered(graft(as_stem(STEMS), build(TOPS)))
    for nodes in nodes_of(whole).values():
        assert [node.origin for node in nodes] == list(range(len(nodes)))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 4), st.integers(0, 9))
def test_stems_may_be_grafted_onto_stems(first: list[int], length: int, token: int) -> None:
    second = [token] * length
    whole = graft(as_stem({0: first}), as_stem({0: second}))
    assert whole.is_path
    assert whole.tokens.tolist() == [first + second]
    assert whole.depths.tolist() == [list(range(1, len(first) + length + 1))]
    assert set(by_path(nodes_of(whole)[0])) == {
        tuple((first + second)[: k + 1]) for k in range(len(first) + length)
    }
