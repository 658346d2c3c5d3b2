"""SpecRouter's policy as it was published, against values worked out by hand."""

from dataclasses import replace

import pytest

from research.policies.paper import predict_paper
from specrouter.config import SchedulerConfig, TreesConfig
from specrouter.config.policies import CHAIN_POLICIES
from specrouter.cycle import DraftShape
from specrouter.profile.acceptance import UNTRIED_ALPHA
from specrouter.slo.node_selection import WHOLE
from specrouter.slo.tree_planner import selection_of
from tests.specrouter.predictions import NAMES, PAIR, TRIPLE, flat, rising, snapshot
from tests.specrouter.routing.test_planner import ALONE, TWIN
from tests.specrouter.routing.test_scheduler import all_pairs, choose, scheduler


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


def test_of_these_it_alone_decides_in_every_cycle() -> None:
    found = {name: CHAIN_POLICIES.find(name).decides_every_cycle for name in CHAIN_POLICIES.names}
    assert [name for name, decides in found.items() if decides] == ["paper"]
    assert selection_of(TreesConfig(), SchedulerConfig(policy="paper")) is WHOLE


def test_it_may_choose_every_chain() -> None:
    assert set(scheduler("paper").drafters) == {*NAMES} - {"big"}


def test_the_target_decodes_alone_where_drafting_costs_too_much() -> None:
    times = dict.fromkeys(NAMES, rising(10.0))  # a draft costs as much as a token
    alpha = all_pairs(0.3)
    assert choose(snapshot(times, alpha=alpha, similarity=alpha), "paper").chain == ALONE


def test_it_takes_the_least_of_its_formula() -> None:
    similarity = all_pairs(0.1)
    times = {"small": flat(1.0), "twin": flat(1.0), "middle": flat(9.0), "big": flat(100.0)}
    # Every level costs W times: only what is nearly always accepted beats the target.
    known = snapshot(times, similarity=similarity | {TWIN: 0.99})
    mine = frozenset({"small", "twin"})
    decision = choose(known, "paper", available=mine, depth=2)
    assert (decision.chain, decision.shape) == (TWIN, DraftShape(2, 1))
    assert decision.predicted_ms[TWIN] == min(decision.predicted_ms.values())
