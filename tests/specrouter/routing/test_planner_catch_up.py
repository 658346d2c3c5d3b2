"""Groups of a cycle in which drafters lag behind some requests."""

from typing import Any

import pytest

from specrouter.request.params import Chain, Speculation
from specrouter.slo import cycle_shape
from tests.specrouter.predictions import PAIR, flat, rising, snapshot
from tests.specrouter.routing.test_planner import (
    ALONE,
    CHUNK,
    TIMES,
    TWIN,
    Planned,
    Request,
)

LONG = 30_000  # tokens that no drafter has read
ALIKE = snapshot(TIMES, {PAIR: 0.6, TWIN: 0.58})


def lagging(*requests: Request, behind: dict[int, int], **settings: Any) -> Planned:
    """All drafters lack so many tokens of some rows."""
    plan = Planned(*requests, **settings)
    plan.rows.behind = behind
    plan.available = frozenset({"small"})
    return plan


def ending(remaining: int, speculation: Speculation | None = None) -> Request:
    request = Request(speculation)
    request.remaining = remaining
    return request


@pytest.mark.parametrize(("remaining", "chain"), [(5, ALONE), (100, ALONE), (5000, PAIR)])
def test_a_request_is_caught_up_where_that_can_be_earned_back(remaining: int, chain: Chain) -> None:
    plan = lagging(Request(), ending(remaining), Request(), behind={1: LONG})
    assert plan.chains() == {0: PAIR, 1: chain, 2: PAIR}


def test_a_request_whose_drafter_lags_by_little_is_caught_up_in_passing() -> None:
    assert lagging(ending(5), behind={0: 8}).chains() == {0: PAIR}


def test_who_asks_for_a_chain_is_caught_up_whatever_it_costs() -> None:
    plan = lagging(ending(5, Speculation(PAIR)), ending(5), behind={0: LONG, 1: LONG})
    assert plan.chains() == {0: PAIR, 1: ALONE}
    static = lagging(ending(5), behind={0: LONG}, policy="static", chain=PAIR)
    assert static.chains() == {0: PAIR}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Of every choice of a cycle: others beside, and what is read in any case and for drafts."""
    seen: list[tuple[Any, ...]] = []
    real: Any = cycle_shape.choose_cycle

    def choose_cycle(*arguments: Any) -> Any:
        beside = arguments[-1]
        seen.append((beside.others, beside.reading_ms, beside.catch_up_ms))
        return real(*arguments)

    monkeypatch.setattr("specrouter.slo.tree_planner.choose_cycle", choose_cycle)
    return seen


def test_a_cycle_is_chosen_with_the_time_of_what_is_read_beside_it(
    told: list[tuple[Any, ...]],
) -> None:
    known = snapshot(TIMES | {"small": flat(7.0)}, {PAIR: 0.6})
    plan = lagging(Request(tpot_ms=40.0), ending(5000), behind={1: LONG}, known=known)
    plan.groups()
    named = Request(Speculation(PAIR))
    mixed = lagging(Request(tpot_ms=40.0), named, behind={1: 2 * CHUNK}, known=known)
    mixed.groups()
    assert told == [(1, 7.0, 0.0), (1, 7.0, 0.0)]


def test_where_nobody_is_to_draft_what_would_be_read_counts_against_drafts(
    told: list[tuple[Any, ...]],
) -> None:
    known = snapshot({"small": flat(7.0), "big": rising(20.0)}, {PAIR: 0.2})
    plan = lagging(Request(tpot_ms=15.0), Request(), behind={0: 100, 1: LONG}, known=known)
    assert plan.chains() == dict.fromkeys(range(2), ALONE)
    others, reading_ms, catch_up_ms = told[-1]
    assert others == 1, "whose text cannot be read in this cycle"
    assert (reading_ms, catch_up_ms) == (0.0, 7.0)


def test_rows_that_were_not_drafted_for_say_nothing_of_a_chains_tokens() -> None:
    plan = lagging(Request(), ending(5000), behind={1: LONG})
    groups = plan.groups()
    plan.learn(groups, {0: 3, 1: 1}, behind_rows={1}, caught_up=True)
    [(chain, requests, predicted_ms, _, expected, extra, _)] = plan.profiler.outcomes
    assert (chain, requests, predicted_ms, extra) == (PAIR, 2, 0.0, 2.0)
    plan.learn(groups, {0: 3, 1: 1})
    assert plan.profiler.outcomes[1][4] == pytest.approx(2 * expected)
    assert plan.profiler.stages == [None, "drafting"]


def test_what_a_helper_would_have_to_read_keeps_nobody_from_learning_the_targets_time() -> None:
    known = snapshot({"small": flat(7.0), "big": rising(20.0)}, {PAIR: 0.1})
    plan = lagging(
        *(Request() for _ in range(4)), behind=dict.fromkeys(range(4), LONG), known=known
    )
    groups = plan.groups()
    assert [group.chain for group in groups] == [ALONE]
    plan.learn(groups, dict.fromkeys(range(4), 1))
    [(chain, _, predicted_ms, *_)] = plan.profiler.outcomes
    assert chain == ALONE
    assert predicted_ms > 0.0
