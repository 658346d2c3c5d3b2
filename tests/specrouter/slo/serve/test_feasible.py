"""What is named as feasible is admitted, and what is a little tighter is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from research.policies.autoregressive import Autoregressive
from research.policies.slos_serve import slos_serve
from research.policies.strict_pacing import Strict, StrictDecision
from specrouter.request.objective import Stage
from specrouter.request.output import Feasible
from specrouter.slo.admission import Admit, fcfs
from specrouter.slo.serve.amortized import Amortized
from specrouter.slo.serve.feasible import earliest_feasible
from specrouter.slo.serve.pacing import Pacing
from specrouter.slo.serve.policy import MOST_ERROR, by_objectives
from tests.specrouter.slo.test_admission import request, view
from tests.specrouter.slo_machines import OPT_7B
from tests.specrouter.views import Entry, table

PLAIN = Autoregressive(OPT_7B, idle_ms=100.0)
DRAFTING = Strict(OPT_7B, 100.0, 0.7)
strictly = partial(by_objectives, make=StrictDecision)
BUSY = [request(10 + each, row=each, left=0, tpot_ms=50.0) for each in range(4)]


@pytest.mark.parametrize("make", [strictly, slos_serve])
@pytest.mark.parametrize("pacing", [PLAIN, DRAFTING])
@pytest.mark.parametrize("running", [[], BUSY])
def test_the_earliest_objective_is_admitted_and_an_earlier_one_is_not(
    make: Callable[..., Admit], pacing: Pacing, running: list[Entry]
) -> None:
    policy = make(lambda view: pacing, 256)
    asked = request(1, left=1500, tpot_ms=50.0, ttft_ms=60.0)
    seen = view([asked], running)
    assert 1 in policy(seen).declined
    found = earliest_feasible(policy, seen, table([asked]))
    assert found.tpot_ms == 50.0
    assert found.ttft_ms is not None

    def admits(ttft_ms: float) -> bool:
        return policy(view([replace(asked, ttft_ms=ttft_ms)], running)).admitted == (1,)

    assert admits(found.ttft_ms)
    assert (
        not admits(found.ttft_ms / 1.06)
        or 1 in policy(view([replace(asked, ttft_ms=found.ttft_ms / 1.06)], running)).declined
    )


def test_what_first_come_would_try_is_not_named_unless_it_is_promised() -> None:
    pacing = Amortized(OPT_7B, 100.0, chunk=256)
    policy = by_objectives(lambda _: pacing, 256, most_error=MOST_ERROR)
    reading = [
        request(10 + n, row=n, left=1500, awaits_first=True, ttft_ms=60_000.0) for n in range(4)
    ]
    asked = request(1, left=1500, ttft_ms=60.0, rejects=True)
    found = earliest_feasible(policy, view([asked], reading), table([asked]))
    assert found.ttft_ms is not None
    kept = policy(view([replace(asked, ttft_ms=found.ttft_ms)], reading))
    assert kept.promised == {1}
    assert found.ttft_ms > 1.5 * OPT_7B.ms(1501), "it was read alone, beside others"


def test_where_the_tpot_is_beyond_the_machine_the_least_one_is_named() -> None:
    policy = strictly(lambda view: PLAIN, 256)
    asked = request(1, left=100, ttft_ms=500.0, stages=(Stage(1.0, until_tokens=5), Stage(90.0)))
    found = earliest_feasible(policy, view([asked], []), table([asked]))
    assert found.tpot_ms == pytest.approx(OPT_7B.ms(1), rel=0.06)
    assert found.ttft_ms is not None


def test_where_nothing_is_feasible_nothing_is_named() -> None:
    policy = strictly(lambda view: PLAIN, 256)
    asked = request(1, left=100, tpot_ms=50.0, ttft_ms=500.0)
    full = replace(view([asked], BUSY), free_rows=0)
    assert earliest_feasible(policy, full, table([asked])) == Feasible()
    assert earliest_feasible(
        lambda seen: replace(fcfs(8)(seen), admitted=()), full, table([asked])
    ) == (Feasible())
