"""What stated probabilities turn out to be worth, and how that is measured."""

import numpy as np
import pytest

from specrouter.profile.calibration import Calibration


def taught(stated: float, truth: float, place: int = 0, nodes: int = 4000) -> Calibration:
    """A drafter that says `stated` of nodes that are accepted in `truth` of cases."""
    rng = np.random.default_rng(0)
    known = Calibration()
    for _ in range(nodes // 20):
        known.record(np.full(20, stated), np.full(20, place), rng.random(20) < truth)
    return known


def said(known: Calibration, stated: float, place: int) -> float:
    return float(known.probability(np.array([stated]), np.array([place]))[0])


@pytest.mark.parametrize(("stated", "truth"), [(0.3, 0.6), (0.7, 0.35), (0.02, 0.2)])
def test_a_stated_probability_becomes_the_observed_share(stated: float, truth: float) -> None:
    assert said(taught(stated, truth), stated, 0) == pytest.approx(truth, abs=0.03)


def test_places_among_siblings_are_told_apart() -> None:
    known = taught(0.3, 0.6, place=1)
    assert said(known, 0.3, 1) > 0.5
    assert said(known, 0.3, 0) == pytest.approx(0.3)
    assert said(known, 0.3, 5) == said(known, 0.3, 2)  # all later ones are alike


def test_figures_are_of_predictions_made_before_their_outcomes() -> None:
    known = Calibration()
    known.record(np.array([0.8, 0.8]), np.zeros(2, np.int64), np.array([True, False]))
    figures = known.figures()
    assert figures.nodes == 2.0
    assert figures.expected_error == pytest.approx(abs(0.8 - 0.5))
    assert figures.brier == pytest.approx((0.2**2 + 0.8**2) / 2)
    assert figures.base_brier == pytest.approx(0.25)


def test_old_errors_are_forgotten() -> None:
    known = taught(0.5, 1.0, nodes=400)
    early = known.figures().expected_error
    for _ in range(400):
        known.record(np.full(20, 0.5), np.zeros(20, np.int64), np.ones(20, np.bool_))
    assert known.figures().expected_error < early / 2
    assert known.figures().nodes < 2500
