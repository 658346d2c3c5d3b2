"""How long the plan of a cycle takes, for some numbers of requests and budgets of tokens.

python -m checks.measures.planning
"""

import statistics
import time

from specrouter.slo.admission import Admission
from tests.specrouter.routing.test_planner import CHEAP, Planned, Request

CYCLES = 200
CASES = ((16, None), (64, None), (64, 1024))  # requests, and tokens that a cycle may verify


def plan_ms(requests: int, budget_tokens: int | None, tpot_ms: float | None) -> list[float]:
    planned = Planned(
        *(Request(tpot_ms=tpot_ms) for _ in range(requests)),
        known=CHEAP,
        trees={} if budget_tokens is None else {"selection": "slo", "budget_tokens": budget_tokens},
    )
    planned.settle()
    times = []
    for _ in range(CYCLES):
        planned.at += 1
        view = planned.view()
        began = time.perf_counter()
        plan = planned.planner.plan(view, Admission())
        times.append((time.perf_counter() - began) * 1000)
        planned.standing = plan.standing
    return times


def main() -> None:
    for requests, budget_tokens in CASES:
        for tpot_ms in (None, 40.0):
            times = plan_ms(requests, budget_tokens, tpot_ms)
            shown = f"{requests} requests, budget {budget_tokens}, TPOT objective {tpot_ms} ms"
            least, median = min(times), statistics.median(times)
            print(f"{shown}: median {median:.2f} ms, least {least:.2f} ms")


if __name__ == "__main__":
    main()
