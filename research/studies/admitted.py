"""Of requests that were admitted as attainable, how many miss their objectives?

    python -m research.studies.admitted --traces FOLDER

OPT-6.7B, ChatBot at three rates, by the named policies. A request counts as admitted as attainable
if, when it first got its row, it had not been declined and its objectives could still be attained.
"""

import argparse
from dataclasses import dataclass, field
from pathlib import Path

from research.figures.cell import machine_of
from research.sim.machine import Machine
from research.sim.scenarios import SCENARIOS, scenario_requests
from research.sim.service import SimulatedService
from specrouter.bench.replay import LoadRequest, replay
from specrouter.bench.traces import read_trace
from specrouter.config import TreesConfig
from specrouter.routing.planner import Plan
from specrouter.slo.admission import Admission
from specrouter.slo.serve.requests import sorted_requests
from specrouter.view import EngineView

MACHINE, SCENARIO, ACCEPTANCE = "slos-serve-opt-6.7b", "ChatBot", 0.7
RATES, POLICIES = (6.0, 9.0, 12.0), ("slos-serve", "slo")
TRACE = "azure_2023_conv.csv"


@dataclass
class Promises:
    """Watches a service. `kept_to`: ids of requests that were admitted as attainable."""

    machine: Machine
    seen: set[int] = field(default_factory=set)
    kept_to: set[int] = field(default_factory=set)

    def watch(
        self, before: EngineView, admission: Admission, view: EngineView, plan: Plan | None
    ) -> None:
        came = set(admission.admitted) - self.seen
        if not came:
            return
        # What a request alone attains at best plays no part for those that wait.
        asked = sorted_requests(before, self.machine.batch_times, fastest_ms=0.0)
        attainable = {each.id for each in asked.new} - set(admission.declined)
        self.seen |= came
        self.kept_to |= came & attainable


@dataclass(frozen=True, kw_only=True)
class Found:
    """Counts of requests. `late_first`: missed TTFT; `slow`: a TPOT; `far`: one by over 10%."""

    requests: int
    attained: int
    admitted: int
    missed: int
    late_first: int
    slow: int
    far: int


def ask(machine: Machine, policy: str, requests: list[LoadRequest]) -> Found:
    promises = Promises(machine)
    service = SimulatedService(
        machine=machine, acceptance=ACCEPTANCE, trees=TreesConfig(), watch=promises.watch
    )
    service.use(policy)
    outcomes = replay(requests, service, service)
    # A new service numbers what it is sent from 0 on.
    missed = [outcomes[each] for each in sorted(promises.kept_to) if not outcomes[each].is_attained]
    shares = []
    for one in missed:
        first, worst = one.answer.ttft_ms, one.answer.worst_run_ms
        assert first is not None
        assert one.request.ttft_ms
        assert one.request.objective_ms
        slow = 0.0 if worst is None else worst / one.request.objective_ms
        shares.append((first / one.request.ttft_ms, slow))
    return Found(
        requests=len(outcomes),
        attained=sum(one.is_attained is True for one in outcomes),
        admitted=len(promises.kept_to),
        missed=len(missed),
        late_first=sum(first > 1.0 for first, _ in shares),
        slow=sum(slow > 1.0 for _, slow in shares),
        far=sum(max(each) > 1.1 for each in shares),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, help="folder; left out, arrivals are drawn")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    machine = machine_of(MACHINE)
    arrivals = () if asked.traces is None else read_trace(asked.traces / TRACE, 30.0)
    for rate in RATES:
        for policy in POLICIES:
            requests = scenario_requests(
                SCENARIOS[SCENARIO], machine.batch_times, rate, asked.requests, asked.seed, arrivals
            )
            found = ask(machine, policy, requests)
            share = found.missed / max(1, found.admitted)
            print(f"{rate:4.0f}/s {policy:10} missed {share:6.2%} of admitted; {found}", flush=True)


if __name__ == "__main__":
    main()
