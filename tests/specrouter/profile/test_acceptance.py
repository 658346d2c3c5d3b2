"""What is learned of trees agrees with trees that grow by a known law."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specrouter.profile.acceptance import (
    RANKS,
    SHAPES,
    AcceptanceEstimator,
    JudgedTrees,
    path_rates,
    tree_rates,
)
from specrouter.profile.evidence import HALF_LIFE, MEMORY
from tests.pure import few

Floats = NDArray[np.float64]
EASY, HARD = (0.8, 0.12, 0.05), (0.35, 0.25, 0.15)  # chances of a walked node's children
ROOT = -1


def beam(law: tuple[float, ...], depth: int, width: int) -> list[tuple[int, int, float, int]]:
    """Parent, depth, path probability and which child, of a beam's nodes, level by level."""
    nodes: list[tuple[int, int, float, int]] = []
    level = [(ROOT, 1.0)]
    for step in range(1, depth + 1):
        grown = [(at, p * q, k) for at, p in level for k, q in enumerate(law[:width])]
        best = sorted(grown, key=lambda node: -node[1])[:width]
        first = len(nodes)
        nodes += [(at, step, p, k) for at, p, k in best]
        level = [(first + i, p) for i, (_, p, _) in enumerate(best)]
    return nodes


def judged(
    rng: np.random.Generator, depth: int, width: int, count: int, boast: float = 1.0
) -> JudgedTrees:
    """Trees of requests that are easy or hard; `boast` below 1 makes drafters overconfident."""
    rows = []
    for _ in range(count):
        law = EASY if rng.random() < 0.5 else HARD
        nodes = beam(law, depth, width)
        accepted, at = np.zeros(len(nodes), dtype=np.bool_), ROOT
        while True:
            says = int(np.searchsorted(np.cumsum(law), rng.random(), side="right"))
            hit = [i for i, node in enumerate(nodes) if node[0] == at and node[3] == says]
            if not hit:
                break
            at = hit[0]
            accepted[at] = True
        rows.append((nodes, accepted))
    parents, depths = (np.array([[n[k] for n in nodes] for nodes, _ in rows]) for k in (0, 1))
    log_probs = boast * np.log(np.array([[n[2] for n in nodes] for nodes, _ in rows]))
    walks = np.stack([accepted for _, accepted in rows])
    return JudgedTrees(
        parents=parents,
        depths=depths,
        log_probs=log_probs,
        judged=np.ones_like(walks),
        accepted=walks,
    )


def taught(depth: int, width: int, cycles: int = 300, boast: float = 1.0) -> AcceptanceEstimator:
    rng, estimator = np.random.default_rng(1), AcceptanceEstimator()
    for cycle in range(cycles):
        estimator.record(judged(rng, depth, width, 8, boast), cycle)
    return estimator


def test_overconfident_probabilities_count_for_what_they_were_worth() -> None:
    estimator = taught(4, 1, boast=0.5)
    stated = np.log(np.sqrt([[0.8], [0.35]]))
    worth = estimator.worth(np.full((2, 1), ROOT), np.ones((2, 1), dtype=np.int64), stated)
    assert worth[:, 0] == pytest.approx([0.8, 0.35], abs=0.1)


def test_a_modest_first_choice_is_worth_more_than_it_says_and_the_others_are_not() -> None:
    rng, estimator = np.random.default_rng(1), AcceptanceEstimator()
    first, second = np.log(0.4), np.log(0.2)
    for cycle in range(200):
        accepted = np.zeros((8, 2), dtype=np.bool_)
        chance = rng.random(8)
        accepted[:, 0], accepted[:, 1] = chance < 0.7, (chance >= 0.7) & (chance < 0.9)
        trees = JudgedTrees(
            parents=np.full((8, 2), ROOT),
            depths=np.ones((8, 2), dtype=np.int64),
            log_probs=np.tile([first, second], (8, 1)),
            judged=np.ones((8, 2), dtype=np.bool_),
            accepted=accepted,
        )
        estimator.record(trees, cycle)
    worth = estimator.worth(trees.parents, trees.depths, trees.log_probs)
    assert worth[0] == pytest.approx([0.7, 0.2], abs=0.06)


@settings(max_examples=few(100), deadline=None, database=None)
@given(st.integers(0, 2**32 - 1))
def test_siblings_together_are_worth_no_more_than_their_parent(seed: int) -> None:
    rng, estimator = np.random.default_rng(seed), AcceptanceEstimator()
    estimator.record(judged(rng, 3, 3, 4, boast=rng.uniform(0.3, 2.0)), 0)
    for _ in range(20):  # first choices that are better than they say, and of others now and then
        stated = np.sort(rng.dirichlet(np.full(3, 1.0), 40), axis=1)[:, ::-1]
        hits = rng.random((40, 3)) < rng.uniform(0.2, 1.0, 3)
        estimator.record_choices(stated, hits & (np.cumsum(hits, axis=1) == 1), 0)
    trees = judged(rng, 3, 3, 4, boast=rng.uniform(0.3, 1.0))
    worth = estimator.worth(trees.parents, trees.depths, trees.log_probs)
    above = np.concatenate((np.ones((4, 1)), worth), axis=1)
    for parent in range(ROOT, worth.shape[1]):
        children = np.where(trees.parents == parent, worth, 0.0).sum(axis=1)
        assert (children <= above[:, parent + 1] * (1 + 1e-9)).all()


def test_alpha_is_how_often_the_best_child_of_a_walked_node_is_accepted() -> None:
    seen = taught(1, 1).snapshot(300)
    assert seen.alpha == pytest.approx((EASY[0] + HARD[0]) / 2, abs=0.06)
    assert 0.9 * MEMORY < seen.trials < MEMORY  # older ones have faded
    trees = JudgedTrees(
        parents=np.array([[-1, -1, 0, 1]]),
        depths=np.array([[1, 1, 2, 2]]),
        log_probs=np.log([[0.6, 0.3, 0.5, 0.1]]),
        judged=np.ones((1, 4), dtype=np.bool_),
        accepted=np.array([[False, True, False, True]]),
    )
    # Of the first level the best was not accepted, below the second the only one was.
    estimator = AcceptanceEstimator()
    estimator.record(trees, 0)
    assert (estimator.snapshot(0).alpha, estimator.snapshot(0).trials) == (0.5, 2.0)


def test_padding_teaches_nothing() -> None:
    rng, one, other = np.random.default_rng(1), AcceptanceEstimator(), AcceptanceEstimator()
    trees = judged(rng, 3, 1, 2)
    more = ((0, 0), (0, 2))
    padded = JudgedTrees(
        parents=np.pad(trees.parents, more, constant_values=ROOT),
        depths=np.pad(trees.depths, more),
        log_probs=np.pad(trees.log_probs, more, constant_values=-np.inf),
        judged=np.pad(trees.judged, more, constant_values=True),
        accepted=np.pad(trees.accepted, more),
    )
    one.record(trees, 0)
    other.record(padded, 0)
    assert one.snapshot(0) == other.snapshot(0)


def test_evidence_counts_half_after_its_half_life_without_news() -> None:
    estimator = taught(2, 1)
    now, later = estimator.snapshot(299), estimator.snapshot(299 + int(HALF_LIFE))
    assert later.trials == pytest.approx(now.trials / 2)
    assert later.alpha == now.alpha


@pytest.mark.parametrize("alpha", [0.3, 0.7, 0.95])
@pytest.mark.parametrize(("depth", "width"), [(4, 1), (3, 3), (2, 4)])
def test_the_prior_is_sequoias_greedy_choice_among_all_products(
    alpha: float, depth: int, width: int
) -> None:
    holds = [1.0 - (1.0 - alpha) ** (w**0.64) for w in range(width + 1)]
    child = np.diff(holds)
    levels = [
        sorted((math.prod(ranks) for ranks in itertools.product(child, repeat=n)), reverse=True)
        for n in range(1, depth + 1)
    ]
    kept = sorted((p for level in levels for p in level[:width]), reverse=True)
    rates = tree_rates(alpha)[SHAPES.index((depth, width))]
    assert rates[: len(kept)] == pytest.approx(kept)
    assert not rates[depth * width :].any()


def test_a_path_is_a_geometric_series_up_to_its_mean_length() -> None:
    lengths = np.full(len(SHAPES), 2.5)
    rates = path_rates(0.5, lengths)
    assert rates.shape == (len(SHAPES), RANKS)
    assert rates[0, :4] == pytest.approx([0.5, 0.25, 0.5 * 0.125, 0.0])


def choices(accepted: int, count: int, width: int = 2) -> tuple[Floats, NDArray[np.bool_]]:
    """Places at which the best token was said to have a chance of 0.6, and so many were right."""
    stated = np.tile([0.6, 0.2, 0.1][:width], (count, 1))
    said = np.zeros((count, width), dtype=np.bool_)
    said[:accepted, 0] = True
    return stated, said


def test_what_was_seen_just_now_tells_of_the_text_of_now() -> None:
    estimator = AcceptanceEstimator()
    for cycle in range(200):
        estimator.record_choices(*choices(2, 3), cycle)
    steady = estimator.snapshot(199)
    assert steady.alpha_now == pytest.approx(steady.alpha) == pytest.approx(2 / 3)
    for cycle in range(200, 230):
        estimator.record_choices(*choices(1, 3), cycle)
    turned = estimator.snapshot(229)
    assert turned.alpha > 0.58
    assert turned.alpha_now < 0.46
    assert estimator.snapshot(229 + 240).alpha_now == pytest.approx(turned.alpha, abs=0.01)


def test_first_choices_that_a_selection_left_say_nothing_of_the_text_of_now() -> None:
    rng, estimator = np.random.default_rng(3), AcceptanceEstimator()
    trees = judged(rng, 2, 2, 4)
    estimator.record(trees, 0)
    before = estimator.snapshot(0).recent_trials
    assert before >= 4
    seen = trees.judged.copy()
    seen[1] = False  # all of one request's nodes
    estimator.record(replace(trees, judged=seen), 0)
    assert estimator.snapshot(0).recent_trials == before
    assert estimator.snapshot(0).trials > before


def test_deeper_choices_that_a_selection_left_do_not_flatter_the_text_of_now() -> None:
    """A selection by worth leaves the better of the deeper nodes: the roots alone are fair."""
    rng, estimator = np.random.default_rng(5), AcceptanceEstimator()
    for cycle in range(400):
        trees = judged(rng, 6, 1, 8)
        seen = trees.judged & (trees.depths == 1)
        best = np.argsort(np.where(trees.depths == 2, trees.log_probs, -np.inf), axis=None)[-4:]
        seen.flat[best] = trees.judged.flat[best]
        estimator.record(replace(trees, judged=seen), cycle)
    found, usual = estimator.snapshot(400), (EASY[0] + HARD[0]) / 2
    assert found.recent_accepted / found.recent_trials == pytest.approx(usual, abs=0.06)


def test_drafts_that_were_picked_teach_what_they_are_worth_and_nothing_of_others() -> None:
    estimator, one = AcceptanceEstimator(), np.ones((40, 1), dtype=np.bool_)
    tree = np.full((40, 1), -1), np.ones((40, 1), dtype=np.int64), np.full((40, 1), math.log(0.5))
    parents, depths, log_probs = tree
    judged = JudgedTrees(
        parents=parents,
        depths=depths,
        log_probs=log_probs,
        judged=one,
        accepted=one,
        is_usual=False,
    )
    estimator.record(judged, 0)
    assert estimator.snapshot(0).trials == 0.0
    assert estimator.worth(*tree).max() > 0.7


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6), st.booleans())
def test_the_worth_of_a_path_is_that_of_its_tree(stated: list[float], quotes: bool) -> None:
    estimator = AcceptanceEstimator(quotes=quotes, factor=0.7)
    right = np.arange(40)[:, None] % 3 == 0
    estimator.record_choices(np.full((40, 1), 0.8), right, cycle=1)
    count = len(stated)
    log_probs = np.cumsum(np.log(stated))[None]
    parents, depths = np.arange(count)[None] - 1, 1 + np.arange(count)[None]
    whole = estimator.worth(parents, depths, log_probs)[0]
    rounded = np.exp(np.diff(log_probs[0], prepend=0.0))  # may have crossed the bound of a bin
    np.testing.assert_allclose(estimator.path_worth(rounded.tolist()), whole)


def test_how_a_quotation_begins_says_nothing_of_how_it_goes_on() -> None:
    estimator = AcceptanceEstimator(quotes=True)
    estimator.record_choices(np.full((200, 1), 0.5), np.zeros((200, 1), dtype=np.bool_), cycle=1)
    first, second = estimator.path_worth([0.5, 0.5])
    assert first < 0.05
    assert second == pytest.approx(0.5 * first), "nothing was seen below the first level"
