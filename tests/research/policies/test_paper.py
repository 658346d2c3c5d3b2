"""The formula of SpecRouter's paper against values worked out by hand."""

from dataclasses import replace

import pytest

from specrouter.profile.acceptance import UNTRIED_ALPHA
from specrouter.profile.paper_prediction import predict_paper
from tests.specrouter.predictions import PAIR, TRIPLE, flat, snapshot


def test_the_papers_cost_is_equation_7() -> None:
    similarity = {("small", "middle"): 2 / 3, ("middle", "big"): 8 / 9}  # alpha 1/2 and 4/5
    times = {"small": flat(1.0), "middle": flat(3.0), "big": flat(10.0)}
    known = snapshot(times, similarity=similarity, means_ms={"small": 1.0, "middle": 3.0})
    known = replace(known, times={**times, "middle": flat(99.0)})  # which the average does not see
    # W T_1 + W T_2 + W T_3 * P(level 2 passed), over tokens that both levels accept and one more.
    cost = 2 * 1.0 + 2 * 3.0 + 2 * 10.0 * 0.5
    expected = cost / (0.4 + 0.4**2 + 1)
    assert predict_paper(TRIPLE, known, 2) == pytest.approx(expected)
    assert predict_paper(("big",), known, 2) == 10.0
    untried = predict_paper(PAIR, known, 1)  # W (T_1 + T_2), and one accepted at the most
    assert untried == pytest.approx(11.0 / (1 + UNTRIED_ALPHA))


@pytest.mark.parametrize(
    ("similarity", "tokens"), [(1.0, 4.0), (0.0, 1.0), (0.6, 1.0 + 3 / 7 + 9 / 49 + 27 / 343)]
)
def test_equal_models_accept_all_and_disjoint_ones_nothing(
    similarity: float, tokens: float
) -> None:
    known = snapshot({"small": flat(1.0), "big": flat(10.0)}, similarity={PAIR: similarity})
    assert predict_paper(PAIR, known, 3) == pytest.approx(3 * 11.0 / tokens)
