"""Which chain and which trees follow from what is known."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from modelpool import ConfigError
from specrouter.config import SchedulerConfig
from specrouter.cycle import DraftShape
from specrouter.profile.cycle_times import Workload, curve_of
from specrouter.profile.snapshot import Pair, PerformanceSnapshot
from specrouter.request.params import Chain
from specrouter.routing.chain_policy import ModelNames
from specrouter.routing.scheduler import ModelChainScheduler, candidate_chains
from specrouter.view import SCHEDULED, ChainDecision, Override
from tests.specrouter.predictions import (
    ALL,
    NAMES,
    PAIR,
    PARAMETERS,
    TRIPLE,
    flat,
    rising,
    snapshot,
)
from tests.specrouter.routing.test_planner import ALONE, TIMES, TWIN

ONE = Workload(requests=1)


def scheduler(policy: str = "adaptive", **settings: Any) -> ModelChainScheduler:
    config = SchedulerConfig.model_validate({"policy": policy, **settings})
    return ModelChainScheduler(config, NAMES, PARAMETERS, "big")


def choose(
    known: PerformanceSnapshot,
    policy: str = "adaptive",
    current: ChainDecision | None = None,
    available: frozenset[str] = ALL,
    workload: Workload = ONE,
    **settings: Any,
) -> ChainDecision:
    return scheduler(policy, **settings).choose(known, workload, ModelNames(available), current)


def all_pairs(value: float) -> dict[Pair, float]:
    return dict.fromkeys(itertools.permutations(NAMES, 2), value)


def two_pairs(twin_alpha: float, **others: Any) -> PerformanceSnapshot:
    """Two drafters that differ in nothing but what is accepted of them; the middle is useless."""
    alpha = all_pairs(0.05) | {PAIR: 0.6, TWIN: twin_alpha}
    return snapshot(TIMES, alpha=alpha, **others)


def test_candidates_are_chains_of_rising_size_that_end_in_the_target() -> None:
    """Models of equal size never verify each other."""
    pairs = [(name, "big") for name in NAMES[:-1]]
    chains = candidate_chains(NAMES, PARAMETERS, "big")
    assert sorted(chains) == sorted([ALONE, *pairs, TRIPLE, ("twin", "middle", "big")])
    of_the_smallest = candidate_chains(NAMES, PARAMETERS, "small")
    assert {("small",), ("middle", "small")} < set(of_the_smallest)


MANY = tuple(f"m{size}" for size in range(1, 13))
SIZES = {name: 10 * size for size, name in enumerate(MANY, 1)} | {"big": 1000}


def of_many(**others: Any) -> tuple[ModelChainScheduler, PerformanceSnapshot]:
    """Twelve drafters; the smaller one is the faster, the larger one the better."""
    many = ModelChainScheduler(SchedulerConfig(), (*MANY, "big"), SIZES, "big")
    times = {name: flat(0.1 * size) for size, name in enumerate(MANY, 1)} | {"big": rising(50.0)}
    alpha = dict.fromkeys(itertools.combinations(MANY, 2), 0.3)
    alpha |= {(name, "big"): 0.3 + 0.01 * size for size, name in enumerate(MANY)}
    return many, replace(snapshot(times, alpha=alpha, **others), parameters=SIZES)


def test_a_twin_of_the_target_is_chosen_where_its_times_and_acceptances_pay() -> None:
    """It has as many parameters as the target, and stands alone or behind a smaller drafter."""
    names, sizes = ("small", "twin", "big"), {"small": 10, "twin": 1000, "big": 1000}
    of_twins = ModelChainScheduler(SchedulerConfig(), names, sizes, "big")
    assert set(of_twins.candidates) == {ALONE, PAIR, TWIN, ("small", "twin", "big")}
    seen = {PAIR: 0.5, ("small", "twin"): 0.5, TWIN: 0.98, ("small", "twin", "big"): 0.9}
    chosen = set()
    for twin_ms in (1.0, 25.0, 49.0):
        times = {"small": flat(0.5), "twin": rising(twin_ms, 0.01), "big": rising(50.0)}
        known = replace(snapshot(times, seen), parameters=sizes)
        chosen.add(of_twins.choose(known, ONE, ModelNames(frozenset(names))).chain)
    assert chosen == {TWIN, ("small", "twin", "big"), PAIR}


def test_no_more_than_three_models_are_chosen_and_of_many_the_promising_ones() -> None:
    many, known = of_many()
    assert {len(chain) for chain in many.candidates} == {1, 2, 3}
    decision = many.choose(known, ONE, ModelNames(frozenset(MANY)))
    looked_at = set(decision.predicted_ms)
    assert {(name, "big") for name in MANY} < looked_at
    pairs = sorted((decision.predicted_ms[name, "big"], name) for name in MANY)
    longer = [chain for chain in looked_at if len(chain) == 3]
    assert 0 < len(longer) <= 16
    assert {chain[0] for chain in longer} <= {name for _, name in pairs[:5]}
    assert {chain[1] for chain in longer} <= {"m9", "m10", "m11", "m12"}


def test_the_chain_in_use_is_looked_at_however_little_its_parts_promise() -> None:
    many, known = of_many()
    chain = ("m1", "m2", "big")
    assert chain not in many.choose(known, ONE, ModelNames(frozenset(MANY))).predicted_ms
    current = ChainDecision(chain=chain, shape=DraftShape(1))
    assert chain in many.choose(known, ONE, ModelNames(frozenset(MANY)), current).predicted_ms


def test_the_fastest_prediction_is_chosen_and_the_others_are_its_alternatives() -> None:
    decision = choose(two_pairs(0.7))
    assert decision.chain == TWIN
    assert set(decision.predicted_ms) == set(scheduler().candidates)
    assert decision.predicted is not None
    assert decision.predicted.ms_per_token == min(decision.predicted_ms.values())
    others = [option.ms_per_token for option in decision.alternatives]
    assert others == sorted(others)
    told = {option.chain for option in decision.alternatives}
    assert told == set(scheduler().candidates) - {TWIN}
    assert decision.reason == "first decision"
    assert decision.route == decision.predicted.route


def test_a_model_that_never_ran_is_loaded_for_a_clear_gain_only() -> None:
    mine, drafts = frozenset({"small"}), set()
    for each_ms in range(40):
        never = snapshot({"big": rising(100.0, float(each_ms))}, alpha=all_pairs(0.3))
        small = curve_of(never, "small", "big")  # what is assumed of it
        ran = replace(never, times={**never.times, "small": small})
        predicted = choose(never, available=mine).predicted_ms
        gain = predicted[PAIR] / predicted[ALONE]
        for known, least in ((never, 0.9), (ran, 0.97)):
            has_drafts = choose(known, available=mine).chain == PAIR
            assert has_drafts == (gain <= least)
            drafts.add((known is ran, has_drafts))
    assert len(drafts) == 4


def test_the_target_decodes_alone_where_drafting_costs_too_much() -> None:
    times = dict.fromkeys(NAMES, rising(10.0))  # a draft costs as much as a token
    assert choose(snapshot(times, alpha=all_pairs(0.3))).chain == ALONE


def test_a_drafter_that_lags_far_behind_a_short_text_is_not_worth_it() -> None:
    known = snapshot({"small": rising(1.0), "big": flat(10.0)}, {PAIR: 0.8})
    mine = frozenset({"small"})
    assert choose(known, available=mine).chain == PAIR
    late = Workload(requests=1, remaining=5.0, lags={"small": 1000.0})
    assert choose(known, available=mine, workload=late).chain == ALONE


def test_a_decision_carries_the_grid_of_every_chain_that_drafts() -> None:
    decision = choose(two_pairs(0.7))
    assert set(decision.grids) == set(scheduler().candidates) - {ALONE}
    for option in (decision.predicted, *decision.alternatives):
        assert option is not None
        if option.chain != ALONE:
            grid = decision.grids[option.chain]
            assert grid.chain == option.chain
            assert grid.best() == option
    assert choose(snapshot({}), "static", chain=TRIPLE).grids == {}
    assert set(choose(two_pairs(0.7), available=frozenset({"small"})).grids) == {PAIR}


def limited(most: int, policy: str = "adaptive", **settings: Any) -> ModelChainScheduler:
    """In a pool that holds so many models."""
    config = SchedulerConfig.model_validate({"policy": policy, **settings})
    return ModelChainScheduler(
        config, NAMES, PARAMETERS, "big", fit_together=lambda names: len(names) <= most
    )


def test_chains_whose_members_have_no_room_at_once_are_no_candidates() -> None:
    assert set(limited(2).candidates) == {ALONE, PAIR, TWIN, ("middle", "big")}
    assert limited(1).candidates == (ALONE,)
    assert limited(1, "smallest").choose(snapshot({}), ONE, ModelNames(ALL)).chain == ALONE
    assert TRIPLE in limited(3).candidates
    assert TRIPLE not in limited(2).choose(two_pairs(0.1), ONE, ModelNames(ALL)).predicted_ms


def test_a_configured_chain_that_has_no_room_is_refused() -> None:
    assert limited(3, "static", chain=TRIPLE).config.chain == TRIPLE
    with pytest.raises(ConfigError, match="max_loaded_models") as caught:
        limited(2, "static", chain=TRIPLE)
    assert caught.value.field == "scheduler.chain"


def test_what_is_in_use_is_kept_while_nothing_is_faster_by_four_percent() -> None:
    current = choose(two_pairs(0.0))
    assert current.chain == PAIR
    assert choose(two_pairs(0.61)).chain == TWIN
    kept = choose(two_pairs(0.61), current=current)
    assert kept.route == current.route
    assert kept.reason.startswith("kept")
    assert kept.alternatives[0].chain == TWIN
    left = choose(two_pairs(0.7), current=current)
    assert left.chain == TWIN
    assert "faster by" in left.reason
    assert "small>big" in left.reason


def test_what_is_in_use_is_left_when_one_of_its_models_is_quarantined() -> None:
    current = choose(two_pairs(0.0))
    decision = choose(two_pairs(0.61), current=current, available=ALL - {"small"})
    assert decision.chain == TWIN
    assert "small>big is not available" in decision.reason


def test_the_smallest_drafter_has_weights_and_target_only_has_none() -> None:
    assert choose(snapshot({}), "smallest").chain == PAIR
    names, sizes = ("ngram", "middle", "big"), {"ngram": 0, "middle": 100, "big": 1000}
    config = SchedulerConfig(policy="smallest")

    def chain(*members: str) -> Chain:
        smallest = ModelChainScheduler(config, members, sizes, "big")
        return smallest.choose(snapshot({}), ONE, ModelNames(frozenset(names))).chain

    assert chain(*names) == ("middle", "big")
    assert chain("ngram", "big") == ALONE
    for policy in ("smallest", "target-only", "adaptive"):
        assert choose(snapshot({}), policy, available=frozenset()).chain == ALONE
    assert choose(snapshot({}), "target-only").chain == ALONE


@pytest.mark.parametrize("policy", ["adaptive", "static", "smallest"])
def test_an_override_of_depth_or_width_replaces_the_configured_one(policy: str) -> None:
    known = snapshot({"small": flat(1.0), "big": flat(100.0)}, {PAIR: 0.8})
    chain = PAIR if policy == "static" else None
    fixed, mine = scheduler(policy, depth=4, width=2, chain=chain), frozenset({"small"})

    def shape(asked: Override = SCHEDULED) -> tuple[int, int]:
        decision = fixed.choose(known, ONE, ModelNames(mine), None, asked)
        return decision.shape.depth, decision.shape.width

    assert shape() == (4, 2)
    assert shape((6, None)) == (6, 2)
    assert shape((None, 3)) == (4, 3)
    assert shape((16, 8)) == (16, 4)  # as wide as a tree of that depth may be


def test_strict_trees_have_width_1() -> None:
    config = SchedulerConfig(width=3)
    strict = ModelChainScheduler(config, NAMES, PARAMETERS, "big", only_paths=True)
    known = snapshot({"big": flat(100.0)})
    assert strict.choose(known, ONE, ModelNames(ALL), None, (None, 2)).shape.width == 1
    assert scheduler(width=3).choose(known, ONE, ModelNames(ALL)).shape.width == 3


def test_whole_trees_are_chosen_by_what_all_their_nodes_cost() -> None:
    known = snapshot({"small": flat(0.5), "big": rising(50.0)}, {PAIR: 0.5})
    mine, config = frozenset({"small"}), SchedulerConfig()
    free = scheduler().choose(known, Workload(requests=4), ModelNames(mine))
    whole = ModelChainScheduler(config, NAMES, PARAMETERS, "big", whole_trees=True)
    assert whole.limits(SCHEDULED).whole_trees
    decision = whole.choose(known, Workload(requests=4), ModelNames(mine))
    assert decision.shape.nodes == decision.shape.depth * decision.shape.width
    assert free.shape.nodes < free.shape.depth * free.shape.width
    assert decision.predicted_ms[PAIR] >= free.predicted_ms[PAIR]


def test_a_route_that_somebody_asked_for_is_predicted() -> None:
    known = snapshot({"small": flat(1.0), "big": rising(10.0)}, {PAIR: 0.5})
    assert scheduler().predict(known, ONE, ALONE, DraftShape(1)).ms_per_token == 10.0
    whole = scheduler().predict(known, ONE, PAIR, DraftShape(4))
    assert whole.shape.nodes == 4
    assert whole.cycle_ms == pytest.approx(18.0)
    some = scheduler().predict(known, ONE, PAIR, DraftShape(4, 1, 2))
    assert some.shape.nodes == 2
    assert some.cycle_ms == pytest.approx(16.0)
    deep = scheduler().predict(known, ONE, TRIPLE, DraftShape(16))
    assert (deep.chain, deep.shape.depth) == (TRIPLE, 16)
    assert deep.ms_per_token < 1e6


def test_a_drafter_without_weights_quotes_beside_any_chain_that_was_predicted() -> None:
    names, sizes = ("suffix", *NAMES), {"suffix": 0, **PARAMETERS}
    found = choose(two_pairs(0.61))
    assert found.predicted is not None

    def quoter(
        chain: Chain,
        decision: ChainDecision = found,
        asked: Override = SCHEDULED,
        without: frozenset[str] = frozenset(),
        **settings: Any,
    ) -> str | None:
        config = SchedulerConfig(policy="adaptive")
        routed = ModelChainScheduler(config, names, sizes, "big", **settings)
        return routed.quoter(chain, decision, asked, (ALL | {"suffix"}) - without)

    for chain in (ALONE, PAIR, TRIPLE):
        assert quoter(chain) == "suffix"
    assert quoter(("suffix", "big")) is None, "it is the chain's own drafter"
    assert quoter(PAIR, without=frozenset({"suffix"})) is None
    assert quoter(PAIR, asked=(3, None)) is None, "somebody has said how deep"
    assert quoter(PAIR, replace(found, predicted=None)) is None
    assert scheduler().quoter(PAIR, found, SCHEDULED, ALL) is None, "there is none"


def test_quotations_are_drafted_for_the_target_itself() -> None:
    names, sizes = ("suffix", *NAMES), {"suffix": 0, **PARAMETERS}
    routed = ModelChainScheduler(SchedulerConfig(), names, sizes, "big")
    quoting = [chain for chain in routed.candidates if chain[0] == "suffix"]
    assert quoting == [("suffix", "big")]
    assert set(routed.candidates) == {*scheduler().candidates, *quoting}
