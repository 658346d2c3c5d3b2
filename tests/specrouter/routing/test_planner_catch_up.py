"""Groups of a cycle in which drafters lag behind some requests."""

from typing import Any

import pytest

from specrouter.request.params import Chain, Speculation
from specrouter.slo import cycle_shape
from tests.specrouter.predictions import PAIR, flat, rising, snapshot
from tests.specrouter.routing.test_planner import ALONE, CHUNK, TIMES, Planned, Request

LONG = 30_000  # tokens that no drafter has read


def lagging(*requests: Request, behind: dict[int, int], **settings: Any) -> Planned:
    """All drafters lack so many tokens of some rows."""
    plan = Planned(*requests, **settings)
    plan.rows.behind = behind
    plan.available = frozenset({"small"})
    return plan


def ending(remaining: int, speculation: Speculation | None = None) -> Request:
    request = Request(override=speculation)
    request.remaining = remaining
    return request


@pytest.mark.parametrize(("remaining", "chain"), [(5, ALONE), (100, ALONE), (5000, PAIR)])
def test_a_request_is_caught_up_where_that_can_be_earned_back(remaining: int, chain: Chain) -> None:
    plan = lagging(Request(), ending(remaining), Request(), behind={1: LONG})
    assert plan.chains() == {0: PAIR, 1: chain, 2: PAIR}


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
    for beside, lag in ((ending(5000), LONG), (Request(override=Speculation(PAIR)), 2 * CHUNK)):
        lagging(Request(tpot_ms=40.0), beside, behind={1: lag}, known=known).groups()
    assert told == [(1, 7.0, 0.0), (1, 7.0, 0.0)]


def test_where_nobody_is_to_draft_what_would_be_read_counts_against_drafts(
    told: list[tuple[Any, ...]],
) -> None:
    known = snapshot({"small": flat(7.0), "big": rising(20.0)}, {PAIR: 0.2})
    plan = lagging(Request(tpot_ms=15.0), Request(), behind={0: 100, 1: LONG}, known=known)
    assert plan.chains() == dict.fromkeys(range(2), ALONE)
    assert told[-1] == (1, 0.0, 7.0), "the other's text cannot be read in this cycle"


def test_what_a_helper_would_have_to_read_keeps_nobody_from_learning_the_targets_time() -> None:
    known = snapshot({"small": flat(7.0), "big": rising(20.0)}, {PAIR: 0.1})
    [group] = lagging(*[Request()] * 4, behind=dict.fromkeys(range(4), LONG), known=known).groups()
    assert group.chain == ALONE
    assert group.predicted is not None
    assert group.predicted.plain_ms > 0.0
