"""Drawn texts: trees whose nodes are accepted as often as they say."""

import numpy as np
import pytest

from research.sim.text import LEAST, MOST, SimulatedText, SimulatedTexts, gain_over_law


@pytest.mark.parametrize("acceptance", [LEAST, 0.5, 0.7, MOST])
def test_best_tokens_are_accepted_as_often_as_is_asked_for(acceptance: float) -> None:
    draws = np.random.default_rng(1)
    drawn = SimulatedText(acceptance).draw(4000, (1,), draws)
    assert drawn.worth.mean() == pytest.approx(acceptance, abs=0.02)
    assert drawn.walk(drawn.worth > 0, draws).mean() == pytest.approx(acceptance, abs=0.03)


def test_nodes_are_accepted_as_often_as_they_say() -> None:
    draws = np.random.default_rng(2)
    drawn = SimulatedText(0.6).draw(4000, (3,) * 3, draws)
    accepted = drawn.walk(np.ones_like(drawn.worth, dtype=bool), draws).sum(axis=1)
    assert accepted.mean() == pytest.approx(drawn.worth.sum(axis=1).mean(), rel=0.03)
    assert accepted.max() == 3


def test_drawn_trees_are_trees_whose_worths_fall() -> None:
    drawn = SimulatedText(0.6).draw(50, (3,) * 4, np.random.default_rng(3))
    assert drawn.worth.shape == (50, 12)
    for row in range(50):
        for node in range(12):
            parent = drawn.parents[row, node]
            above = 1.0 if parent < 0 else drawn.worth[row, parent]
            assert drawn.worth[row, node] == pytest.approx(above * drawn.chances[row, node])
            depth = 0 if parent < 0 else drawn.candidates.depths[row, parent]
            assert drawn.candidates.depths[row, node] == depth + 1
        for parent in range(-1, 12):
            assert drawn.chances[row, drawn.parents[row] == parent].sum() <= 1.0 + 1e-9


def test_a_walk_is_a_path_of_chosen_nodes() -> None:
    draws = np.random.default_rng(5)
    drawn = SimulatedText(0.8).draw(300, (3,) * 4, draws)
    chosen = draws.random(drawn.worth.shape) < 0.8
    walked, depths = drawn.walk(chosen, draws), drawn.candidates.depths
    assert not (walked & ~chosen).any()
    for row in range(300):
        nodes = np.flatnonzero(walked[row])
        assert depths[row, nodes].tolist() == list(range(1, len(nodes) + 1))
        assert drawn.parents[row, nodes].tolist() == [-1, *nodes[:-1].tolist()][: len(nodes)]


def test_a_tree_of_a_fixed_form_has_all_its_branches() -> None:
    drawn = SimulatedText(0.7).draw(2, (1, 1, 3, 1), np.random.default_rng(6), beam=False)
    assert drawn.levels == (1, 1, 3, 3)
    assert drawn.parents[0].tolist() == [-1, 0, 1, 1, 1, 2, 3, 4]


def test_trees_end_where_their_texts_end() -> None:
    drawn = SimulatedText(0.9).draw(3, (2,) * 3, np.random.default_rng(7))
    cut = drawn.within(np.array([0, 2, 3]))
    assert cut.candidates.depths.max(axis=1).tolist() == [0, 2, 3]
    assert (cut.worth > 0).sum(axis=1).tolist() == [0, 4, 6]


def test_pairs_have_the_acceptance_that_is_known_of_them() -> None:
    texts = SimulatedTexts(0.6, {("a", "c"): 0.8, ("b", "c"): 0.99})
    assert texts.of("a", "c").acceptance == 0.8
    assert texts.of("a", "b").acceptance == 0.6
    assert texts.of("b", "c").acceptance == MOST


def test_trees_that_follow_the_text_bring_more_than_static_ones() -> None:
    assert gain_over_law(SimulatedText(0.7)) > 1.0
