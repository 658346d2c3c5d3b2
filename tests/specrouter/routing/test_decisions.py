"""When a decision is made anew, and what a switch leaves behind."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrouter.config import SchedulerConfig
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.request.params import Chain
from specrouter.routing.catch_up import CycleCatchUp
from specrouter.routing.chain_policy import ModelNames
from specrouter.routing.decisions import (
    INTERVAL,
    CycleDecisions,
    put_away,
    workload_of,
)
from specrouter.routing.scheduler import ModelChainScheduler
from specrouter.view import SCHEDULED, Standing
from tests.specrouter.predictions import ALL, NAMES, PAIR, PARAMETERS
from tests.specrouter.routing.test_planner import GOOD, LATE, TURNED, TWIN
from tests.specrouter.views import Entry, engine_view, request_view, table


def request(row: int, sampled: bool = True, slots: int = 128, remaining: int = 64) -> Entry:
    others = {"sampled": sampled, "slots": slots, "unread_by": {"small": 1}}
    return request_view(row, remaining=remaining, row=row, **others)


class Decided:
    """One cycle after another, each of which sees what the one before left."""

    def __init__(self, policy: str = "adaptive") -> None:
        config = SchedulerConfig.model_validate({"policy": policy})
        self.scheduler = ModelChainScheduler(config, NAMES, PARAMETERS, "big")
        self.standing = Standing()
        self.records = 0

    def at(
        self, cycle: int, known: PerformanceSnapshot, requests: int = 4, reading: int = 0
    ) -> Chain:
        running = [request(row) for row in range(requests)]
        view = engine_view(cycle=cycle, running=running, performance=known, standing=self.standing)
        catch_up = CycleCatchUp(256, known, requests + reading)
        decisions = CycleDecisions(
            scheduler=self.scheduler,
            view=view,
            catch_up=catch_up,
            decoding=requests,
            reading=reading,
        )
        chosen = decisions.decide(SCHEDULED, view.running, ModelNames(ALL))
        self.standing = replace(self.standing, in_use=decisions.in_use)
        self.records += len(decisions.records)
        self.chosen = chosen
        return chosen.chain

    def settled(self) -> "Decided":
        self.at(0, GOOD)
        self.at(LATE, GOOD)
        return self


@given(cycles=st.integers(1, 3 * INTERVAL))
def test_a_settled_decision_is_made_anew_after_its_interval(cycles: int) -> None:
    chain = Decided().settled().at(LATE + cycles, TURNED)
    assert chain == (TWIN if cycles >= INTERVAL else PAIR)


@given(before=st.integers(1, 32), after=st.integers(1, 32))
def test_and_at_once_when_the_load_is_another(before: int, after: int) -> None:
    decided = Decided()
    decided.at(0, GOOD, before)
    decided.at(LATE, GOOD, before)
    chain = decided.at(LATE + 1, TURNED, after)
    is_other = max(before, after) > 1.25 * min(before, after)
    assert chain == (TWIN if is_other else PAIR)


def test_a_shadow_evaluation_makes_it_due() -> None:
    decided = Decided().settled()
    decided.standing = replace(decided.standing, evaluated_at=LATE)
    assert decided.at(LATE + 1, TURNED) == TWIN


def test_only_a_switch_leaves_a_record() -> None:
    decided = Decided().settled()
    assert decided.records == 1  # the first one
    decided.at(LATE + INTERVAL, GOOD)
    assert decided.records == 1
    decided.at(LATE + 2 * INTERVAL, TURNED)
    assert decided.records == 2


def test_what_was_put_away_is_due_and_knows_its_chain() -> None:
    decided = Decided().settled()
    decided.standing = put_away(decided.standing)
    assert decided.standing.in_use[SCHEDULED].decision.chain == PAIR
    assert not decided.standing.in_use[SCHEDULED].decision.grids
    away = decided.standing
    assert decided.at(LATE + 1, TURNED) == TWIN
    decided.standing = away
    assert decided.at(LATE + 1, GOOD) == PAIR
    assert decided.chosen.reason.startswith("kept"), "not the first decision"
    assert decided.chosen.grids


def test_a_workload_is_the_mean_of_its_requests() -> None:
    found = workload_of(table([request(0, True, 128, 10), request(1, False, 384, 30)]))
    assert (found.requests, found.slots, found.remaining) == (2, 256, 20)
    assert found.sampled  # half of them
    assert workload_of(table([])).requests == 0


@pytest.mark.parametrize("with_lags", [True, False])
def test_lags_are_what_a_drafter_lacks_beyond_the_last_token(with_lags: bool) -> None:
    behind = replace(request(0), unread_by={"small": 9, "middle": 0})
    expected = {"small": 8 + 0, "middle": 0} if with_lags else {}
    assert workload_of(table([behind, request(1)]), with_lags).lags == expected
