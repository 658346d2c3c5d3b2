"""Groups of a cycle, and what is remembered of decisions and of how they came out."""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specrouter.config import SchedulerConfig, TreesConfig
from specrouter.cycle import Candidates, ChainGroup, ShadowEvaluation, TreeSelector
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.request.params import Chain, Speculation
from specrouter.request.spec import SpeculationOverride
from specrouter.routing.decision_record import DecisionRecord
from specrouter.routing.planner import Plan, Planner
from specrouter.routing.scheduler import ModelChainScheduler
from specrouter.slo.admission import Admission
from specrouter.slo.cycle_shape import LONGEST_WAIT
from specrouter.slo.node_selection import NodeSelection, rates_of
from specrouter.slo.tree_planner import TreePlanner, selection_of
from specrouter.view import SCHEDULED, EngineView, InUse, Standing
from tests.specrouter.own_selections import FORMED
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
from tests.specrouter.views import Entry, engine_view, request_view, table

Ints = NDArray[np.int64]
ALONE: Chain = ("big",)
TWIN = ("twin", "big")
NOBODY: Ints = np.zeros(0, dtype=np.int64)
TIMES = {"small": flat(1.0), "twin": flat(1.0), "middle": flat(90.0), "big": rising(50.0)}
GOOD = snapshot(TIMES, {PAIR: 0.6, TWIN: 0.3})
TURNED = snapshot(TIMES, {PAIR: 0.3, TWIN: 0.6})
CHUNK = 256  # tokens that a drafter reads at most in a cycle
LATE = 1000  # a cycle in which decisions are not so frequent any more


@dataclass
class Rows:
    """What is known of the rows."""

    new_tokens: int = 0  # of each row, that a drafter may be evaluated on
    slots: int = 128
    unloaded: set[str] = field(default_factory=set)
    behind: dict[int, int] = field(default_factory=dict)  # of some rows, that no drafter has read


@dataclass(frozen=True)
class Prefill:
    """Prompt tokens that a cycle reads, and requests whose prompts are not read yet."""

    tokens: int = 0
    requests: int = 0


_IDS = itertools.count(1)


@dataclass(eq=False, kw_only=True)
class Request:
    """A request that decodes; its first token came at `came_s`."""

    override: SpeculationOverride = None
    tpot_ms: float | None = None
    decoded: int = 0
    came_s: float = 0.0
    temperature: float = 1.0
    remaining: int = 64
    drafts: int = 0
    acceptance: float = 0.0
    id: int = field(default_factory=lambda: next(_IDS))

    def view(self, row: int, now_s: float, rows: Rows) -> Entry:
        behind = rows.behind.get(row, rows.new_tokens)
        return request_view(
            self.id,
            remaining=self.remaining,
            row=row,
            decoded=self.decoded,
            decode_ms=(now_s - self.came_s) * 1000,
            tpot_ms=self.tpot_ms,
            sampled=self.temperature > 0,
            override=self.override,
            unread_by=dict.fromkeys(("small", "twin", "middle"), behind),
            repeatable=rows.new_tokens,
            slots=rows.slots,
            drafts=self.drafts,
            acceptance=self.acceptance,
        )


class Planned:
    """A planner, the requests in its rows, and the cycle that it is in.

    Args:
        selection: instead of the configured one.
        settings: of the section `scheduler`.
    """

    def __init__(
        self,
        *requests: Request,
        known: PerformanceSnapshot = GOOD,
        trees: Mapping[str, Any] | None = None,
        selection: NodeSelection | None = None,
        most_models: int = len(NAMES),
        **settings: Any,
    ) -> None:
        self.known = known
        config = SchedulerConfig.model_validate(settings)
        how = TreesConfig.model_validate(trees or {})
        shapes = TreePlanner(how, selection or selection_of(how, config))
        self.scheduler = ModelChainScheduler(
            config,
            NAMES,
            PARAMETERS,
            "big",
            whole_trees=shapes.selection.takes_whole_trees,
            fit_together=lambda names: len(names) <= most_models,
        )
        self.planner = Planner(self.scheduler, shapes, CHUNK)
        self.requests = dict(enumerate(requests))
        self.at = 0
        self.now_s = 0.0
        self.prefill = Prefill()
        self.available = ALL
        self.measured: dict[str, Any] = {}  # `drafts` and `resting` of the view
        self.rows = Rows()
        self.standing = Standing()
        self.records: list[DecisionRecord] = []
        self.last: Plan = Plan(groups=[], prefill_rows=NOBODY, prefill_counts=NOBODY)

    def view(self) -> EngineView:
        decoding = [one.view(row, self.now_s, self.rows) for row, one in self.requests.items()]
        reading = [
            request_view(-number, kv_tokens=999, unread=999, row=100 + number, slots=128)
            for number in range(1, self._reading + 1)
        ]
        return engine_view(
            cycle=self.at,
            now_s=self.now_s,
            running=(*decoding, *reading),
            available=self.available,
            loaded=ALL - self.rows.unloaded,
            performance=self.known,
            standing=self.standing,
            **self.measured,
        )

    @property
    def _reading(self) -> int:
        return max(self.prefill.requests, int(self.prefill.tokens > 0))

    def plan(self, cycle: int | None = None) -> Plan:
        self.at = self.at + 1 if cycle is None else cycle
        chunks = {-1: self.prefill.tokens} if self.prefill.tokens else {}
        self.last = self.planner.plan(self.view(), Admission(admitted=(), chunks=chunks))
        self.standing = self.last.standing
        self.records += self.last.records
        return self.last

    def groups(self, cycle: int | None = None) -> list[ChainGroup]:
        return list(self.plan(cycle).groups)

    @property
    def selector(self) -> TreeSelector | None:
        return self.last.selector

    @property
    def main(self) -> InUse:
        return self.standing.in_use[SCHEDULED]

    def selected(self, worth: NDArray[np.float64], rows: Ints, aside: int = 0) -> list[int]:
        """Nodes that each of the rows gets, of paths of these worths [B, W]."""
        assert self.selector is not None
        depths = np.broadcast_to(np.arange(1, worth.shape[1] + 1), worth.shape)
        counts: list[int] = (
            self.selector(rows, Candidates(worth, depths), aside).sum(axis=1).tolist()
        )
        return counts

    def settle(self) -> None:
        """Past the cycles in which decisions are frequent."""
        self.groups(0)
        self.groups(LATE)

    def chains(self) -> dict[int, Chain]:
        return {row: group.chain for group in self.groups() for row in group.rows.tolist()}


# Decisions


def test_decisions_are_less_and_less_frequent() -> None:
    plan = Planned(Request())
    made = []
    plan.groups(0)
    for cycle in range(1, 200):
        before = plan.main
        plan.groups(cycle)
        if plan.main is not before:
            made.append(cycle)
    gaps = [after - first for first, after in itertools.pairwise(made)]
    assert gaps == sorted(gaps)
    assert (gaps[0], gaps[-1]) == (3, 16)
    assert sum(cycle < 48 for cycle in made) <= 11


@pytest.mark.parametrize("beside", ["off", Speculation(chain=("twin", "big"), depth=1)])
def test_requests_that_go_another_way_count_in_a_decision(beside: SpeculationOverride) -> None:
    times = {"small": flat(4.0), "twin": flat(4.0), "big": rising(50.0, 0.1)}
    plan = Planned(Request(), known=snapshot(times, {PAIR: 0.7, TWIN: 0.1}))
    plan.settle()
    [alone] = plan.groups()
    assert alone.chain == PAIR
    plan.requests |= {row: Request(override=beside) for row in range(1, 32)}
    shared = plan.main
    assert plan.chains()[0] == ALONE
    assert plan.main is not shared  # decided at once
    plan.requests = {0: plan.requests[0]}
    [again] = plan.groups()
    assert of(again) == of(alone)


def test_cycles_that_measure_drafting_run_without_and_change_no_decision() -> None:
    named = Request(override=Speculation(chain=TWIN, depth=2))
    plan = Planned(Request(), Request(), named)
    plan.settle()
    before = (plan.main, len(plan.records))
    plan.measured = {"drafts": False}
    groups = plan.groups()
    assert {group.chain: group.rows.tolist() for group in groups} == {ALONE: [0, 1], TWIN: [2]}
    assert all(group.quotes is None for group in groups)
    plan.measured = {}
    assert plan.chains() == {0: PAIR, 1: PAIR, 2: TWIN}
    assert (plan.main, len(plan.records)) == before


def test_where_drafting_was_measured_to_be_slower_nobody_drafts_and_a_record_says_why() -> None:
    plan = Planned(Request())
    plan.settle()
    plan.measured = {"resting": "rests: measured 0.9x"}
    for _ in range(40):
        assert plan.chains() == {0: ALONE}
    assert plan.records[-1].decision.reason == "rests: measured 0.9x"
    told = len(plan.records)
    plan.measured = {}
    assert plan.chains() == {0: PAIR}
    assert len(plan.records) == told + 1


def test_a_switch_leaves_a_record_with_reason_and_alternatives() -> None:
    plan = Planned(Request())
    plan.settle()
    plan.groups()
    plan.known = TURNED
    plan.groups(LATE + 100)
    first, second = plan.records
    assert (first.decision.chain, first.decision.reason) == (PAIR, "first decision")
    assert second.decision.chain == TWIN
    assert "faster by" in second.decision.reason
    assert (second.cycle, second.requests) == (LATE + 100, 1)
    shown = json.loads(json.dumps(second.to_json()))
    assert shown["chain"] == ["twin", "big"]
    assert shown["cycle"] == LATE + 100
    assert shown["reason"] == second.decision.reason
    assert shown["predicted"]["chain"] == ["twin", "big"]
    assert ["small", "big"] in [option["chain"] for option in shown["alternatives"]]
    parts = {"chain", "depth", "width", "nodes"}
    costs = {"cycle_ms", "tokens_per_cycle", "ms_per_token"}
    for option in [shown["predicted"], *shown["alternatives"]]:
        assert set(option) == parts | costs
    found = {"cycle", "unix_s", "requests", "asked", "available", "reason"}
    assert set(shown) == parts | found | {"predicted", "alternatives"}
    assert not second.decision.grids, "predictions that nobody asks for"
    assert shown["asked"] == {"depth": None, "width": None}
    assert shown["available"] == sorted(ALL)


def test_a_policy_that_predicts_nothing_leaves_records_too() -> None:
    plan = Planned(Request(), policy="static", chain=TRIPLE)
    [group] = plan.groups()
    assert (group.chain, group.shape.depth, group.shape.width, group.whole) == (TRIPLE, 4, 1, True)
    [record] = plan.records
    assert record.to_json()["predicted"] is None
    assert record.to_json()["reason"] == "configured"


def test_a_model_that_is_gone_makes_a_decision_due() -> None:
    plan = Planned(Request())
    plan.settle()
    plan.available = ALL - {"small"}
    assert plan.groups()[0].chain == TWIN


# What requests ask for


def test_requests_are_grouped_by_what_they_ask_for() -> None:
    named = Speculation(chain=TRIPLE, depth=2, width=3)
    plan = Planned(
        Request(),
        Request(override="off"),
        Request(override=named),
        Request(),
        Request(override=named),
    )
    groups = {tuple(group.rows.tolist()): group for group in plan.groups()}
    assert set(groups) == {(0, 3), (1,), (2, 4)}
    free = groups[0, 3]
    assert (free.chain, free.whole, free.branching) == (PAIR, False, None)
    assert groups[1,].chain == ALONE
    assert plan.selector is not None, "one group with a choice is enough"
    asked = groups[2, 4]
    assert (asked.chain, asked.shape.depth, asked.shape.width) == (TRIPLE, 2, 3)
    assert asked.whole


def test_a_named_chain_goes_without_the_models_that_rest() -> None:
    plan = Planned(Request(override=Speculation(chain=TRIPLE)))
    plan.available = ALL - {"middle"}
    [group] = plan.groups()
    assert (group.chain, group.shape.depth, group.shape.width) == (PAIR, 4, 1)


def test_a_request_may_ask_for_a_depth_and_leave_the_chain_to_the_scheduler() -> None:
    plan = Planned(
        Request(override=Speculation(depth=3, width=1)),
        Request(override=Speculation(depth=7)),
        Request(),
    )
    depths = {int(group.rows[0]): group for group in plan.groups()}
    assert (depths[0].chain, depths[0].shape.depth, depths[0].shape.width) == (PAIR, 3, 1)
    assert depths[1].chain == PAIR
    assert depths[1].shape.depth == 7  # between the shapes that are predicted
    assert len(plan.records) == 3


# Shadow evaluations

ALIKE = snapshot(TIMES, {PAIR: 0.6, TWIN: 0.55})
QUIET = replace(ALIKE, idle_cycles={"twin": 20}, learning_ms=1e6)


def evaluated(plan: Planned) -> list[int]:
    """Of eight cycles those in which somebody is evaluated."""
    found = []
    for _ in range(8):
        plan.groups()
        if plan.last.shadow_evaluation is not None:
            found.append(plan.at)
    return found


def listening(*requests: Request, **settings: Any) -> Planned:
    plan = Planned(*requests, known=QUIET, **settings)
    plan.rows = Rows(new_tokens=30)
    return plan


@pytest.mark.parametrize(("greedy", "evaluated_row"), [(1, 1), (2, 0)])
def test_who_is_evaluated_is_so_in_the_mode_that_is_decided_for(
    greedy: int, evaluated_row: int
) -> None:
    plan = listening(*(Request(temperature=float(row >= greedy)) for row in range(3)))
    plan.rows.behind = {0: 35, 1: 36, 2: 37}
    plan.groups(4)
    assert plan.last.shadow_evaluation == ShadowEvaluation("twin", evaluated_row, 30)


def test_nobody_is_evaluated_who_rests_or_drafts_for_another_request() -> None:
    plan = listening(Request())
    plan.groups(LATE)
    assert plan.last.shadow_evaluation is not None
    plan.available = ALL - {"twin"}  # since the last decision
    plan.groups(LATE + 4)
    assert plan.last.shadow_evaluation is None
    assert not evaluated(listening(Request(), Request(override=Speculation(chain=TWIN))))


# Predictions whose outcomes a cycle tells


def predicted_ms(plan: Planned) -> dict[Chain, float | None]:
    """Of the whole cycle, by the chains of its groups; 0: only their tokens are predicted."""
    return {
        group.chain: None if group.predicted is None else group.predicted.plain_ms
        for group in plan.groups()
    }


def test_the_only_group_has_the_prediction_that_was_decided_by() -> None:
    plan = Planned(Request(), Request())
    [group] = plan.groups()
    assert group.predicted == plan.records[0].decision.predicted
    assert group.predicted is not None
    assert group.predicted.plain_ms > 0.0


def test_groups_that_share_a_cycle_tell_of_their_tokens_only() -> None:
    plan = Planned(
        Request(), Request(override=Speculation(chain=TWIN, depth=2)), Request(override="off")
    )
    assert predicted_ms(plan) == {PAIR: 0.0, TWIN: 0.0, ALONE: 0.0}


# What has room in memory at once


def drafters(plan: Planned) -> dict[int, Chain]:
    """Of the cycle's requests; loads their models, for which there is room."""
    chains = plan.chains()
    loaded = {name for chain in chains.values() for name in chain}
    assert loaded in ({"big"}, {"small", "big"}, {"twin", "big"})
    plan.rows.unloaded = set(NAMES) - loaded
    return chains


def test_no_request_has_a_drafter_loaded_that_evicts_the_drafter_of_more_requests() -> None:
    plan = Planned(
        *(Request() for _ in range(3)), Request(override=Speculation(TWIN)), most_models=2
    )
    for _ in range(40):
        assert drafters(plan) == {0: PAIR, 1: PAIR, 2: PAIR, 3: ALONE}
    assert {record.decision.chain for record in plan.records} == {PAIR}
    del plan.requests[0], plan.requests[1], plan.requests[2]
    assert drafters(plan) == {3: TWIN}


def test_requests_of_the_scheduler_draft_with_what_there_is_room_for() -> None:
    plan = Planned(Request(), most_models=2)
    assert drafters(plan) == {0: PAIR}
    named = {row: Request(override=Speculation(TWIN, depth=row)) for row in range(1, 4)}
    plan.requests |= named
    assert drafters(plan) == {0: TWIN, **dict.fromkeys(named, TWIN)}
    reason = plan.records[-1].decision.reason
    assert reason == "small>big has no room beside what others draft with"
    policies: list[dict[str, Any]] = [{"policy": "static", "chain": PAIR}, {"policy": "smallest"}]
    for policy in policies:
        fixed = Planned(Request(), most_models=2, **policy)
        fixed.requests |= named
        assert drafters(fixed) == {0: ALONE, **dict.fromkeys(named, TWIN)}


@given(
    asked=st.lists(
        st.sampled_from(
            [
                None,
                "off",
                Speculation(TWIN),
                Speculation(PAIR, depth=2),
                Speculation(TRIPLE),
                Speculation(("middle", "big")),
                Speculation(depth=3),
            ]
        ),
        min_size=1,
        max_size=8,
    ),
    most_models=st.integers(2, 4),
)
@settings(deadline=None, max_examples=40)
def test_all_models_of_a_cycle_have_room_at_once(
    asked: list[SpeculationOverride], most_models: int
) -> None:
    fits = [one for one in asked if len(getattr(one, "chain", None) or ()) <= most_models]
    plan = Planned(*(Request(override=one) for one in fits), known=QUIET, most_models=most_models)
    for _ in range(6):
        chains = plan.chains()
        assert chains.keys() == plan.requests.keys()
        assert len({name for chain in chains.values() for name in chain} | {"big"}) <= most_models


# Trees of a cycle

MINE = frozenset({"small"})
CHEAP = snapshot({"small": flat(0.5), "big": rising(50.0)}, {PAIR: 0.8})
# Sixteen requests decode faster alone; a node is accepted too rarely to be worth its millisecond.
DEAR = snapshot({"small": flat(0.1), "big": rising(10.0)}, {PAIR: 0.5})
URGENT_MS, LAX_MS = 24.0, 1e4  # per token, where a cycle of sixteen takes 25 ms


def pairs(*requests: Request, known: PerformanceSnapshot = CHEAP, **settings: Any) -> Planned:
    plan = Planned(*requests, known=known, **settings)
    plan.available = MINE
    return plan


def crowd(
    tpot_ms: float | None, known: PerformanceSnapshot | None = None, **settings: Any
) -> Planned:
    urgent = [Request(tpot_ms=tpot_ms) for _ in range(4)]
    others = [Request(tpot_ms=tpot_ms and LAX_MS) for _ in range(12)]
    return pairs(*urgent, *others, known=known or DEAR, **settings)


def of(group: ChainGroup) -> tuple[Chain, int, int, bool]:
    return group.chain, group.shape.depth, group.shape.width, group.whole


def drafted(group: ChainGroup) -> int:
    return group.shape.depth * group.shape.width


def paths(requests: int) -> NDArray[np.float64]:
    """[B, 32] drafts that are nearly certain: whoever may, takes them."""
    return np.tile(0.99 ** np.arange(1.0, 33.0), (requests, 1))


def test_a_cycle_without_decoding_requests_has_no_groups() -> None:
    plan = pairs()
    assert plan.groups() == []
    assert plan.selector is None


def test_without_an_objective_or_once_declined_nothing_is_needed() -> None:
    requests = [
        Request(),
        Request(tpot_ms=10.0, decoded=1),
        Request(tpot_ms=50.0, decoded=4, came_s=1.0),
    ]
    views = [request.view(row, 1.2, Rows()) for row, request in enumerate(requests)]
    declined = replace(views[1], declined=True)
    rates = rates_of(table([*views, declined]))
    assert (rates[0], rates[3]) == (0.0, 0.0)
    assert rates[1] == np.inf  # more time is gone than all its next tokens are given
    assert 1 / 50.0 <= rates[2] < 2 / 50.0  # on schedule


def test_urgent_requests_make_a_target_that_decodes_alone_use_the_best_chain() -> None:
    [alone] = crowd(None).groups()
    [lax] = crowd(LAX_MS).groups()
    plan = crowd(URGENT_MS)
    [helped] = plan.groups()
    assert alone.chain == lax.chain == ALONE
    assert helped.chain == PAIR
    assert set(helped.rows.tolist()) >= {0, 1, 2, 3}
    assert plan.records[0].decision.chain == ALONE  # what pays for all is as it was
    assert not helped.whole
    counts = plan.selected(np.tile([0.5, 0.25, 0.125], (len(helped.rows), 1)), helped.rows)
    assert sum(counts[:4]) / 4 > sum(counts[4:]) / len(counts[4:])


def test_urgent_requests_are_not_helped_by_a_drafter_that_fails_or_must_be_loaded() -> None:
    plan = crowd(URGENT_MS)
    plan.settle()
    assert PAIR in plan.chains().values()
    plan.available = frozenset()
    assert set(plan.chains().values()) == {ALONE}  # long before another decision is due
    plan.available = MINE
    assert PAIR in plan.chains().values()
    plan.rows.unloaded = {"small"}
    assert set(plan.chains().values()) == {ALONE}


@pytest.mark.parametrize(
    "asked", [Speculation(depth=3), Speculation(width=1), Speculation(depth=5, width=2)]
)
def test_who_asks_for_a_depth_or_width_gets_no_tree_of_the_fixed_form(asked: Speculation) -> None:
    fixed: dict[str, Any] = {"policy": "static", "chain": PAIR, "depth": 2, "width": 2}
    plan = pairs(Request(), Request(override=asked), selection=FORMED, **fixed)
    groups = {int(group.rows[0]): group for group in plan.groups()}
    assert groups[0].branching == (2, 1)
    assert groups[1].branching is None
    assert groups[1].chain == PAIR
    assert asked.depth in (None, groups[1].shape.depth)
    assert asked.width in (None, groups[1].shape.width)


# Who sits out

# Drafts are no help; four requests take 16 ms, and sixteen 40, which would make the four late.
CROWDED = snapshot({"small": flat(50.0), "big": rising(10.0, 2.0)}, {PAIR: 0.05})
FEW_MS, LOST_MS = 25.0, 1e-3  # objectives, of the four, and of those that cannot be saved


def queue(**settings: Any) -> Planned:
    few = [Request(tpot_ms=FEW_MS) for _ in range(4)]
    return pairs(*few, *(Request(tpot_ms=LOST_MS) for _ in range(12)), known=CROWDED, **settings)


def taking_part(plan: Planned) -> list[int]:
    return sorted(row for group in plan.groups() for row in group.rows.tolist())


FEW, EVERYONE = list(range(4)), list(range(16))


def test_who_sat_out_the_longest_wait_takes_part_once_and_waits_anew() -> None:
    plan = queue()
    for _ in range(3):
        assert [taking_part(plan) for _ in range(LONGEST_WAIT)] == [FEW] * LONGEST_WAIT
        assert taking_part(plan) == EVERYONE


# Who picks the nodes


@pytest.mark.parametrize(
    ("speculation", "settings"),
    [
        ("off", {}),
        (Speculation(chain=PAIR), {}),
        (None, {"policy": "static", "chain": PAIR}),
        (None, {"trees": {"selection": "whole"}}),
        ("off", {"trees": {"selection": "global-greedy"}}),
    ],
)
def test_whole_trees_need_no_selector(
    speculation: SpeculationOverride, settings: dict[str, Any]
) -> None:
    plan = pairs(Request(override=speculation), **settings)
    assert all(group.whole for group in plan.groups())
    assert plan.selector is None


def test_a_budget_of_tokens_counts_roots_and_prompts() -> None:
    trees = {"budget_tokens": 23, "selection": "global-greedy"}
    # However much more would fill the pass, a budget that is configured stays as it is.
    stairs = snapshot({**CHEAP.times, "big": replace(rising(50.0), sizes=(1, 8, 64))}, {PAIR: 0.8})
    fixed: dict[str, Any] = {"known": stairs, "trees": trees, "policy": "static", "chain": PAIR}
    plan = pairs(*(Request() for _ in range(3)), **fixed)
    plan.groups()
    assert plan.selected(paths(3), np.arange(3)) == pytest.approx([20 / 3] * 3, abs=1)
    idle = pairs(Request(), Request(override="off"), Request(override="off"), **fixed)
    assert idle.plan().budget_nodes == 23 - 3, "the roots of all, whether they draft or not"
    plan.prefill = Prefill(tokens=8)
    plan.groups()
    assert sum(plan.selected(paths(3), np.arange(3))) == 23 - 3 - 8
    assert sum(plan.selected(paths(3), np.arange(3), aside=4)) == 23 - 3 - 8 - 4
    assert sum(plan.selected(paths(3), np.arange(3), aside=40)) == 0
    plan.prefill = Prefill(tokens=100)
    plan.groups()
    assert sum(plan.selected(paths(3), np.arange(3))) == 0


def test_configured_nodes_are_the_budget_in_the_mean() -> None:
    fixed: dict[str, Any] = {"policy": "static", "chain": PAIR, "depth": 6}
    for others in ({}, fixed):
        plan = pairs(*(Request() for _ in range(4)), nodes=3, **others)
        [group] = plan.groups()
        assert not group.whole
        worth = paths(4) * np.array([[1.0], [0.5], [0.5], [0.01]])
        counts = plan.selected(worth, np.arange(4))
        assert sum(counts) == 4 * 3
        assert counts[0] > 3 > counts[3]  # the best of all, not of each


def test_all_groups_with_a_choice_share_the_budget() -> None:
    asked = Speculation(depth=3)
    trees = {"selection": "global-greedy", "budget_tokens": 14}
    plan = pairs(
        Request(), Request(override=asked), Request(), Request(override=asked), trees=trees
    )
    assert len(plan.groups()) == 2
    worth = paths(4) * np.array([[1.0], [0.1], [1.0], [0.1]])
    assert plan.selected(worth, np.array([0, 1, 2, 3])) == [5, 0, 5, 0]


def test_the_last_chunk_of_a_prompt_brings_the_first_token() -> None:
    plan = Planned(Request())
    plan.prefill = Prefill(tokens=1000, requests=1)  # one more than are left
    found = plan.plan()
    assert not len(found.prefill_rows)
    last = found.groups[-1]
    assert (last.chain, last.rows.tolist()) == (ALONE, [101])


@pytest.mark.parametrize(("requests", "nodes"), [(1, 3), (3, 3), (5, 2), (8, 3)])
def test_a_budget_ends_where_a_pass_is_full(requests: int, nodes: int) -> None:
    """3 nodes for each of 3 requests and their roots are 12 tokens, which cost as much as 16."""
    sizes = (1, 2, 4, 8, 16, 24, 32, 48, 64)
    stairs = snapshot(TIMES | {"big": replace(rising(50.0), sizes=sizes)}, {PAIR: 0.6, TWIN: 0.3})
    fixed: dict[str, Any] = {"policy": "static", "chain": PAIR, "nodes": nodes}
    budgets = []
    for known in (GOOD, stairs):
        plan = Planned(*(Request() for _ in range(requests)), known=known, **fixed)
        budget = plan.plan().budget_nodes
        assert budget is not None
        budgets.append(budget)
    assert budgets[0] == requests * nodes
    assert requests + budgets[1] == min(size for size in sizes if size >= requests * (1 + nodes))


EAGER = "tests.specrouter.own_policies:EAGER"


def test_a_policy_may_set_each_requests_depth_and_is_told_what_it_remembers() -> None:
    plan = Planned(Request(), Request(), policy=EAGER)
    [first] = plan.groups()
    assert (first.chain, first.rows.tolist(), first.shape.depth) == (PAIR, [0, 1], 1)
    assert sorted(plan.standing.memories.values()) == [1, 1]
    plan.requests[1] = Request()
    groups = {group.shape.depth: group.rows.tolist() for group in plan.groups()}
    assert groups == {2: [0], 1: [1]}
    assert sorted(plan.standing.memories.values()) == [1, 2], "of those that run"


def test_admission_and_configuration_may_allow_fewer_levels_than_a_policy_asks_for() -> None:
    request = Request()
    plan = Planned(request, policy=EAGER, depth=3)
    assert [plan.groups()[0].shape.depth for _ in range(8)] == [1, 2, 3, 3, 3, 3, 3, 3]
    plan = Planned(request, policy=EAGER)
    assert [plan.groups()[0].shape.depth for _ in range(8)] == [1, 2, 3, 4, 5, 6, 6, 6]
    [group] = plan.planner.plan(
        plan.view(), Admission(admitted=(), chunks={}, depths={request.id: 2})
    ).groups
    assert group.shape.depth == 2
