"""What trees of many rows answer at once is what a look at one node after the other answers."""

from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from processors.token_tree import ROOT, TokenTree, join
from tests.processors.trees import (
    Nodes,
    Path,
    build,
    by_path,
    forests,
    lineage,
    node_lists,
    nodes_of,
    path,
    trees,
    walk,
)
from tests.pure import few

many = settings(max_examples=few(150), deadline=None, database=None)


@many
@given(forests, st.integers(0, 2))
def test_descent_is_what_following_parents_finds(rows: dict[int, Nodes], spare: int) -> None:
    tree = build(rows, spare)
    assert nodes_of(tree) == rows
    routes, lines, paths, real = tree.routes(), tree.lineage, tree.paths(), tree.real
    depths = [len(lineage(rows[row], p)) for row in rows for p in range(len(rows[row]))]
    assert tree.height == max(depths, default=0)
    straight = (node.parent == place - 1 for row in rows for place, node in enumerate(rows[row]))
    assert tree.is_path == all(straight)
    for index, row in enumerate(sorted(rows)):
        for place in range(tree.tokens.shape[1]):
            is_node = place < len(rows[row])
            assert real[index, place] == is_node
            line = lineage(rows[row], place) if is_node else []
            text = path(rows[row], place) if is_node else ()
            rest = tree.height - len(line)
            if is_node:
                assert routes[index, place].tolist() == [*line[::-1], *[place] * rest]
            assert lines[index, place].tolist() == line + [ROOT] * rest
            assert paths[index, place].tolist() == [*text] + [0] * rest


_eight = st.lists(st.integers(0, 6), min_size=4, max_size=4)


@many
@given(trees, _eight, _eight)
def test_selected_are_the_most_probable_nodes_and_they_are_a_tree(
    tree: TokenTree, limits: list[int], heights: list[int]
) -> None:
    count = len(tree.rows)
    most, deepest = np.array(limits[:count]), np.array(heights[:count])
    chosen = nodes_of(tree.select(most, deepest))  # which asserts that it is a tree
    larger = nodes_of(tree.select(most + 1, deepest))
    for index, (row, nodes) in enumerate(nodes_of(tree).items()):
        possible = {
            text: node
            for text, node in by_path(nodes).items()
            if len(text) <= heights[index] and node.log_prob > -np.inf
        }
        kept = by_path(chosen[row])
        assert len(kept) == min(limits[index], len(possible))
        assert {text: possible[text][1:] for text in kept} == {t: n[1:] for t, n in kept.items()}
        best = sorted((node.log_prob for node in possible.values()), reverse=True)
        assert sorted((node.log_prob for node in kept.values()), reverse=True) == best[: len(kept)]
        assert kept.keys() <= by_path(larger[row]).keys()


@many
@given(trees, st.randoms(use_true_random=False))
def test_kept_nodes_keep_their_parents_and_all_that_is_known_of_them(
    tree: TokenTree, random: Random
) -> None:
    kept = np.zeros(tree.tokens.shape, dtype=np.bool_)
    rows = nodes_of(tree)
    for index, nodes in enumerate(rows.values()):
        for place, node in enumerate(nodes):
            above = node.parent == ROOT or kept[index, node.parent]
            kept[index, place] = above and random.random() < 0.7
    after = nodes_of(tree.keep(kept))
    for index, (row, nodes) in enumerate(rows.items()):
        places = np.flatnonzero(kept[index]).tolist()
        wanted = [(path(nodes, place), nodes[place][1:]) for place in places]
        found = [(path(after[row], place), node[1:]) for place, node in enumerate(after[row])]
        assert found == wanted, "in their order"
    assert nodes_of(tree) == rows, "the tree itself stays as it is"


@many
@given(trees, st.randoms(use_true_random=False))
def test_matching_is_a_walk_along_the_choices(tree: TokenTree, random: Random) -> None:
    width = tree.tokens.shape[1]
    choices = np.array([[int(random.random() * 3) for _ in range(width + 1)] for _ in tree.rows])
    matching = tree.matching(choices)
    for index, nodes in enumerate(nodes_of(tree).values()):
        said: dict[Path, int] = {(): int(choices[index, 0])}
        for place in range(len(nodes)):
            said[path(nodes, place)] = int(choices[index, place + 1])
        wanted = walk(nodes, lambda text, said=said: said[text])[:-1]  # type: ignore[misc]
        on_it = [path(nodes, place) for place in np.flatnonzero(matching[index]).tolist()]
        assert sorted(on_it) == [wanted[: k + 1] for k in range(len(wanted))]


@many
@given(trees, st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=4, max_size=4))
def test_on_text_are_the_nodes_that_spell_its_beginning(
    tree: TokenTree, texts: list[list[int]]
) -> None:
    rows = nodes_of(tree)
    texts = texts[: len(rows)]
    padded = np.zeros((len(rows), max(map(len, texts))), dtype=np.int64)
    for index, text in enumerate(texts):
        padded[index, : len(text)] = text
    found = tree.on_text(padded, np.array([len(text) for text in texts]))
    assert not found[~tree.real].any()
    for index, nodes in enumerate(rows.values()):
        for place in range(len(nodes)):
            spelt = list(path(nodes, place))
            assert found[index, place] == (texts[index][: len(spelt)] == spelt)


@many
@given(trees, st.randoms(use_true_random=False))
def test_what_can_be_kept_are_nodes_whose_parents_are_kept(tree: TokenTree, random: Random) -> None:
    kept = np.array(
        [[random.random() < 0.8 for _ in range(tree.tokens.shape[1])] for _ in tree.rows],
        dtype=np.bool_,
    ).reshape(tree.tokens.shape)
    wanted = True
    for index, nodes in enumerate(nodes_of(tree).values()):
        own = np.flatnonzero(kept[index]).tolist()
        wanted &= all(place < len(nodes) for place in own)
        above = [nodes[place].parent for place in own if place < len(nodes)]
        wanted &= all(place == ROOT or kept[index, place] for place in above)
    assert tree.holds_parents(kept) == wanted


@many
@given(trees, st.integers(0, 2**9))
def test_trees_of_some_rows_are_as_they_were(tree: TokenTree, which: int) -> None:
    rows = tree.rows[[bool(which >> place & 1) for place in range(len(tree.rows))]]
    every = nodes_of(tree)
    assert nodes_of(tree.of_rows(rows)) == {row: every[row] for row in rows.tolist()}


@many
@given(st.dictionaries(st.integers(0, 9), node_lists()), st.lists(st.integers(0, 2), min_size=10))
def test_joined_trees_ascend_and_keep_their_nodes(rows: dict[int, Nodes], group: list[int]) -> None:
    parts = [{row: rows[row] for row in rows if group[row] == which} for which in range(3)]
    joined = join([build(part, spare) for spare, part in enumerate(parts)])
    assert joined.rows.tolist() == sorted(rows)
    assert nodes_of(joined) == rows
