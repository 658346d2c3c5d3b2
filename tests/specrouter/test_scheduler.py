"""The scheduler's formulas against values computed by hand, and which chain follows from them."""

import dataclasses
import itertools
from collections.abc import Mapping

import pytest

from specrouter.config import SchedulerConfig
from specrouter.profiler import Acceptance, Pair, PerformanceSnapshot, TimeCurve
from specrouter.scheduler import (
    Chain,
    ChainDecision,
    ModelChainScheduler,
    acceptance_rate,
    candidate_chains,
    expected_accepted,
    fitting_width,
    predict_adaptive,
    predict_paper,
    similarity_to_acceptance,
)

NAMES = ("small", "twin", "middle", "big")
PARAMETERS = {"small": 10, "twin": 10, "middle": 100, "big": 1000}
ALL = frozenset(NAMES)
CERTAIN = 1e9  # tokens of evidence that silence the prior


def flat(ms: float) -> TimeCurve:
    """A forward that costs the same however many tokens it has."""
    return TimeCurve(((1, ms), (16, ms)))


def snapshot(
    times: Mapping[str, TimeCurve],
    rates: Mapping[Pair, float] | None = None,
    similarity: Mapping[Pair, float] | None = None,
) -> PerformanceSnapshot:
    acceptance = {
        (*pair, width): Acceptance(rate, CERTAIN)
        for pair, rate in (rates or {}).items()
        for width in (1, 2)
    }
    return PerformanceSnapshot(times, similarity or {}, acceptance, PARAMETERS)


def scheduler(policy: str = "adaptive", chain: Chain | None = None) -> ModelChainScheduler:
    config = SchedulerConfig.model_validate({"policy": policy, "depth": 4, "chain": chain})
    return ModelChainScheduler(config, NAMES, PARAMETERS, "big")


def choose(
    known: PerformanceSnapshot,
    policy: str = "adaptive",
    current: Chain | None = None,
    available: frozenset[str] = ALL,
) -> ChainDecision:
    return scheduler(policy).choose(known, 1, available, current)


# Candidates


def test_every_candidate_ends_in_the_target_and_the_target_alone_is_one() -> None:
    chains = candidate_chains(NAMES, PARAMETERS, "big")
    assert ("big",) in chains
    assert all(chain[-1] == "big" for chain in chains)
    assert ("small", "middle", "big") in chains
    assert len(set(chains)) == len(chains) == 6


def test_models_of_equal_size_never_verify_each_other() -> None:
    for chain in candidate_chains(NAMES, PARAMETERS, "big"):
        assert not {"small", "twin"} <= set(chain)
        sizes = [PARAMETERS[name] for name in chain[:-1]]
        assert all(a < b for a, b in itertools.pairwise(sizes))


def test_the_smallest_model_may_be_the_target() -> None:
    chains = candidate_chains(NAMES, PARAMETERS, "small")
    assert ("small",) in chains
    assert ("middle", "small") in chains


# Formulas


@pytest.mark.parametrize(
    ("alpha", "offered", "expected"),
    [(0.5, 3, 0.875), (0.0, 4, 0.0), (1.0, 4, 4.0), (0.8, 2, 1.44), (0.25, 0.5, 1 / 6)],
)
def test_expected_accepted_is_the_geometric_sum(
    alpha: float, offered: float, expected: float
) -> None:
    assert expected_accepted(alpha, offered) == pytest.approx(expected)


def test_equal_models_accept_all_and_disjoint_ones_nothing() -> None:
    assert similarity_to_acceptance(1.0) == 1.0
    assert similarity_to_acceptance(0.0) == 0.0
    assert similarity_to_acceptance(0.6) == pytest.approx((1 - 0.4) / (1 + 0.4))


def test_an_untried_pair_is_assumed_to_be_good() -> None:
    assert acceptance_rate("small", "big", snapshot({})) == 0.75


def test_observed_acceptance_weighs_by_its_evidence() -> None:
    pair = ("small", "big")
    known = PerformanceSnapshot({}, {pair: 0.6}, {(*pair, 1): Acceptance(0.9, 60.0)}, PARAMETERS)
    prior = 0.6 / 1.4
    assert acceptance_rate(*pair, known) == pytest.approx((0.9 * 60 + prior * 20) / 80)
    assert acceptance_rate(*pair, known, width=4) == pytest.approx(prior)


def test_adaptive_cost_of_the_target_alone_is_its_curve_at_the_number_of_requests() -> None:
    known = snapshot({"big": TimeCurve(((1, 10.0), (8, 24.0)))})
    assert predict_adaptive(("big",), known, 1, 4) == 10.0
    assert predict_adaptive(("big",), known, 8, 4) == 24.0


def test_adaptive_cost_of_a_pair() -> None:
    times = {"small": flat(1.0), "big": TimeCurve(((1, 10.0), (9, 18.0)))}
    known = snapshot(times, {("small", "big"): 0.5})
    # 4 drafts, one verification of 5 tokens; 1/2 + 1/4 + 1/8 + 1/16 accepted, and the own choice.
    assert predict_adaptive(("small", "big"), known, 1, 4) == pytest.approx((4 + 14) / 1.9375)


def test_adaptive_cost_of_three_levels_counts_what_the_intermediate_adds() -> None:
    times = {"small": flat(1.0), "middle": flat(3.0), "big": TimeCurve(((1, 10.0), (11, 20.0)))}
    known = snapshot(times, {("small", "middle"): 0.5, ("middle", "big"): 1.0})
    # depth 2: 0.75 accepted by the middle, 1.75 offered to the target in 2.75 tokens.
    expected = (2 * 1 + 3 + 11.75) / 2.75
    assert predict_adaptive(("small", "middle", "big"), known, 1, 2) == pytest.approx(expected)


def test_adaptive_cost_grows_with_the_requests_in_the_pack() -> None:
    times = {"small": flat(1.0), "big": TimeCurve(((1, 10.0), (32, 41.0)))}
    known = snapshot(times, {("small", "big"): 0.5})
    # 4 requests: the target sees 20 tokens.
    assert predict_adaptive(("small", "big"), known, 4, 4) == pytest.approx((4 + 29) / 1.9375)


def test_adaptive_cost_of_a_wide_tree_counts_all_its_nodes() -> None:
    times = {"small": TimeCurve(((1, 1.0), (5, 5.0))), "big": TimeCurve(((1, 10.0), (17, 26.0)))}
    known = snapshot(times, {("small", "big"): 0.5})
    # Width 2, depth 4: drafts of 2 nodes in 2 ms each, one verification of 9 tokens.
    expected = (4 * 2 + 18) / 1.9375
    assert predict_adaptive(("small", "big"), known, 1, 4, 2) == pytest.approx(expected)


def test_every_level_is_offered_a_wide_tree_whole() -> None:
    times = {"small": flat(1.0), "middle": TimeCurve(((1, 1.0), (17, 17.0))), "big": flat(10.0)}
    known = snapshot(times, {("small", "middle"): 0.0, ("middle", "big"): 0.5})
    # Depth 2: the middle reads 5 tokens, accepts none and offers 1, which succeeds half the time.
    expected = (2 * 1 + 5 + 10) / 1.5
    assert predict_adaptive(("small", "middle", "big"), known, 1, 2, 2) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("depth", "width", "fitting"), [(4, 1, 1), (8, 8, 8), (9, 8, 7), (16, 8, 4), (16, 3, 3)]
)
def test_a_tree_stays_within_the_most_tokens(depth: int, width: int, fitting: int) -> None:
    assert fitting_width(depth, width) == fitting


def test_paper_cost_is_the_published_formula() -> None:
    similarity = {("small", "middle"): 2 / 3, ("middle", "big"): 8 / 9}  # alpha 1/2 and 4/5
    times = {"small": flat(1.0), "middle": flat(3.0), "big": flat(10.0)}
    known = snapshot(times, similarity=similarity)
    # W T_1 + W T_2 + W T_3 * P(level 2 passed), over tokens that both levels accept and one more.
    accepted = 0.4 + 0.4**2
    cost = 2 * 1.0 + 2 * 3.0 + 2 * 10.0 * 0.5
    assert predict_paper(("small", "middle", "big"), known, 1, 2) == pytest.approx(
        cost / (accepted + 1)
    )
    assert predict_paper(("big",), known, 1, 2) == 10.0


def test_an_untried_model_is_assumed_to_cost_its_share_of_the_targets_time() -> None:
    known = snapshot({"big": flat(10.0)}, {("middle", "big"): 0.5, ("small", "big"): 0.5})
    assert predict_adaptive(("middle", "big"), known, 1, 4) == pytest.approx((4 + 10) / 1.9375)
    # 1% of the parameters counts as 2% of the time.
    assert predict_adaptive(("small", "big"), known, 1, 4) == pytest.approx((0.8 + 10) / 1.9375)


# Decisions


def test_the_fastest_prediction_is_chosen() -> None:
    decision = choose(snapshot({"big": flat(100.0)}))
    assert set(decision.predicted_ms) == set(scheduler().candidates)
    assert decision.predicted_ms[decision.chain] == min(decision.predicted_ms.values())
    assert len(decision.chain) > 1


@pytest.mark.parametrize("policy", ["adaptive", "paper"])
def test_the_target_decodes_alone_where_drafting_cannot_pay(policy: str) -> None:
    times = dict.fromkeys(NAMES, flat(10.0))  # a draft costs as much as a token
    pairs = {(a, b): 0.3 for a in NAMES for b in NAMES}
    assert choose(snapshot(times, pairs, pairs), policy).chain == ("big",)


def test_the_target_decodes_alone_where_nothing_is_accepted() -> None:
    times = {name: flat(PARAMETERS[name] / 100) for name in NAMES}
    rates = {(a, b): 0.0 for a in NAMES for b in NAMES}
    assert choose(snapshot(times, rates)).chain == ("big",)


def two_chains(twin_rate: float) -> PerformanceSnapshot:
    times = {"small": flat(1.0), "twin": flat(1.0), "middle": flat(90.0), "big": flat(100.0)}
    rates = {(a, b): 0.0 for a in NAMES for b in NAMES}
    return snapshot(times, rates | {("small", "big"): 0.6, ("twin", "big"): twin_rate})


def test_a_chain_in_use_is_kept_while_another_is_hardly_better() -> None:
    current = ("small", "big")
    assert choose(two_chains(0.605)).chain == ("twin", "big")
    assert choose(two_chains(0.605), current=current).chain == current
    assert choose(two_chains(0.7), current=current).chain == ("twin", "big")


def test_a_chain_in_use_is_left_when_one_of_its_models_fails() -> None:
    current = ("small", "big")
    decision = choose(two_chains(0.605), current=current, available=ALL - {"small"})
    assert decision.chain == ("twin", "big")


def test_models_that_are_not_available_are_not_used() -> None:
    known = snapshot({"big": flat(100.0)})
    chains = choose(known, available=frozenset({"middle"})).predicted_ms
    assert set(chains) == {("big",), ("middle", "big")}
    assert choose(known, available=frozenset()).chain == ("big",)


def test_the_static_policy_uses_its_chain_without_the_models_that_failed() -> None:
    static = scheduler("static", ("small", "middle", "big"))
    known = snapshot({})
    assert static.choose(known, 1, ALL, None).chain == ("small", "middle", "big")
    assert static.choose(known, 1, ALL - {"small"}, None).chain == ("middle", "big")


def test_the_target_only_policy_never_speculates() -> None:
    assert choose(snapshot({"big": flat(100.0)}), "target-only").chain == ("big",)


def test_only_the_paper_policy_rejects_hard() -> None:
    known = snapshot({"big": flat(100.0)})
    assert choose(known, "paper").hard_rejection
    assert not choose(known, "adaptive").hard_rejection


def test_an_override_of_the_depth_replaces_the_configured_one() -> None:
    known = snapshot({"big": flat(100.0)})
    assert scheduler().choose(known, 1, ALL, None).depth == 4
    assert scheduler().choose(known, 1, ALL, None, depth=7).depth == 7


def test_an_override_of_the_width_replaces_the_configured_one() -> None:
    known = snapshot({"big": flat(100.0)})
    assert scheduler().choose(known, 1, ALL, None).width == 1
    assert scheduler().choose(known, 1, ALL, None, width=3).width == 3
    assert scheduler().choose(known, 1, ALL, None, depth=16, width=8).width == 4


# Probing


def test_a_drafter_that_was_idle_for_long_is_tried_however_slow_it_was() -> None:
    known = snapshot({"small": flat(500.0), "big": flat(10.0)})
    assert choose(known).chain[0] != "small"
    stale = dataclasses.replace(known, stale=frozenset({"small"}))
    decision = choose(stale)
    assert decision.chain == ("small", "big")
    assert decision.is_probe
    assert not choose(stale, available=ALL - {"small"}).is_probe


def test_only_the_router_that_learns_probes() -> None:
    stale = dataclasses.replace(snapshot({"big": flat(10.0)}), stale=frozenset({"small"}))
    assert not choose(stale, policy="target-only").is_probe
    assert not scheduler("static", ("middle", "big")).choose(stale, 1, ALL, None).is_probe
