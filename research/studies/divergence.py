"""Why does a live run attain another share of its objectives than the simulation of it?

    python -m research.studies.divergence --out FILE --loads 0.7 1.0 1.5

Rounds as in `research.studies.fidelity`, but every live cycle is taped: views, admissions, plans,
forwards with their times, and tokens. Then

- admission is asked again for the taped views, and must decide as it did;
- the simulation is repeated with what the run had in the place of what the simulator assumes, one
  thing after the other: the times of arrival, each request's acceptance, the times of passes by
  their size, the machine's speed in each second, and the engine's own work between passes. What
  each step changes is its share of the difference; what is left is neither.

A line of FILE for each load and policy; the table is of all lines.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import mean
from typing import Any

from research.bench.options import LoadOptions
from research.sim.machine import Machine
from research.sim.service import SimulatedService
from research.sim.tape import (
    ACCEPTANCE,
    ARRIVALS,
    PARTS,
    Conditions,
    ReplayingExecutor,
    TapedCycle,
    fitted_acceptance,
    recording,
)
from research.simulate import simulated_machine
from research.studies.fidelity import LoggedService, Round, load_options, load_parser
from specrouter.bench.replay import LoadRequest, Pending, ReplayOutcome, figures, replay
from specrouter.config import RouterConfig, TreesConfig
from specrouter.progress import Progress
from specrouter.router import ChainRouter
from specrouter.slo.admission import Admit

DRAWS = 3  # simulations, of which the mean is taken
_SEEDS = 1_000_000  # from one draw to the next
_MOST_ASKED = 400  # taped views


class TapedService(LoggedService):
    """Tapes what runs after `use`."""

    def __init__(self, router: ChainRouter) -> None:
        super().__init__(router)
        self._stack = ExitStack()
        self.cycles: list[TapedCycle] = []
        self.sent_s: list[float] = []

    def use(self, policy: str) -> None:
        self._stack.close()
        super().use(policy)
        engine = self._of.instruments.engine
        step, forwards = engine.steps, engine._executor._runtime.clock
        tape = recording(step, (forwards, "_report"), time.perf_counter)
        self.cycles, self.sent_s = self._stack.enter_context(tape), []
        self.admits: Admit = step.planning.policies.admits

    def send(self, request: LoadRequest) -> Pending:
        self.sent_s.append(time.perf_counter())
        return super().send(request)

    def close(self) -> None:
        self._stack.close()


class TapedRound(Round):
    def __init__(self, router: ChainRouter, options: LoadOptions, progress: Progress) -> None:
        super().__init__(router, options, progress, TapedService)

    def shares(self, loads: Sequence[float]) -> Iterator[dict[str, Any]]:
        """A line for each load and policy."""
        served = self.prepare()
        for load in loads:
            for name in self._options.policies:
                yield {"load": load, "policy": name, **self._taped(name, load * served)}

    def _taped(self, name: str, rate: float) -> dict[str, Any]:
        service = self._service
        assert isinstance(service, TapedService)
        live = self._live.run_policy(name, self._at(rate), 0)
        machine, alpha = simulated_machine(self._router), self._alpha()
        began_s = service.sent_s[-len(live)] - live[0].sent_s
        cycles = [one for one in service.cycles if one.began_s >= began_s and one.ended_s]
        conditions = Conditions.of(cycles, machine, began_s)
        again = _Again(name, live, machine, self._router.config.trees, conditions)
        found: dict[str, Any] = {"live": figures(live)["attainment"], "steps": {}}
        lived = fitted_acceptance(conditions.commit_tokens, again.commit_tokens)
        for count in range(len(PARTS) + 1):
            parts, label = PARTS[:count], PARTS[count - 1] if count else "simulated"
            acceptance = lived if ACCEPTANCE in parts else alpha
            found["steps"][label] = again.attained(acceptance, parts)
        return found | {
            "same_decisions": _same_decisions(service.admits, cycles),
            "passes": {f"{model} {2**size}": by for (model, size), by in conditions.passes.items()},
            "speed": [float(conditions.speed.min()), float(conditions.speed.max())],
            "acceptance": [alpha, lived],
            "work_ms": {f"{key}": ms for key, ms in conditions.work_ms.items()},
        }


@dataclass(frozen=True)
class _Again:
    """A live run's requests, in simulated time."""

    policy: str
    live: Sequence[ReplayOutcome]
    machine: Machine
    trees: TreesConfig
    conditions: Conditions

    def attained(self, acceptance: float, parts: Sequence[str]) -> dict[str, float]:
        """The share that attained, and that of which it is true, as live, whether it attained."""
        attained, agree = [], []
        for draw in range(DRAWS):
            outcomes = self._replayed(self._service(acceptance, parts), parts, draw)
            attained.append(float(figures(outcomes)["attainment"]))
            pairs = zip(outcomes, self.live, strict=True)
            agree.append(mean(a.is_attained == b.is_attained for a, b in pairs))
        return {"attained": mean(attained), "agree": mean(agree)}

    def commit_tokens(self, acceptance: float) -> float:
        """With the arrivals and the requests' differences of the run."""
        parts = (ARRIVALS, ACCEPTANCE)
        service = self._service(acceptance, parts)
        reports = service._profiler, "record_forward"
        with recording(service._step, reports, service._clock) as cycles:
            self._replayed(service, parts, 0)
        return Conditions.of(cycles, self.machine, 0.0).commit_tokens

    def _service(self, acceptance: float, parts: Sequence[str]) -> SimulatedService:
        executor = partial(
            ReplayingExecutor, conditions=self.conditions, parts=parts, seed_period=_SEEDS
        )
        service = SimulatedService(
            machine=self.machine, acceptance=acceptance, trees=self.trees, executor=executor
        )
        service.use(self.policy)
        return service

    def _replayed(
        self, service: SimulatedService, parts: Sequence[str], draw: int
    ) -> list[ReplayOutcome]:
        requests = [
            replace(
                one.request,
                at_s=one.sent_s if ARRIVALS in parts else one.request.at_s,
                seed=one.request.seed + draw * _SEEDS,
            )
            for one in self.live
        ]
        return replay(requests, service, service)


def _same_decisions(admits: Admit, cycles: Sequence[TapedCycle]) -> dict[str, int]:
    taped = [one for one in cycles if one.view is not None]
    asked = taped[:: max(1, len(taped) // _MOST_ASKED)]
    same = sum(admits(one.view) == one.admission for one in asked if one.view is not None)
    return {"asked": len(asked), "same": same}


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Means over rounds, in points."""
    names = list(lines[0]["steps"])
    rows = [" | ".join(("load", "policy", "live", *names, "agree", "same decisions"))]
    for load, policy in sorted({(one["load"], one["policy"]) for one in lines}):
        those = [one for one in lines if (one["load"], one["policy"]) == (load, policy)]
        steps = [100 * mean(one["steps"][name]["attained"] for one in those) for name in names]
        changes = [steps[0], *(after - before for before, after in pairwise(steps))]
        asked, same = (
            sum(one["same_decisions"][key] for one in those) for key in ("asked", "same")
        )
        shown = [f"{changes[0]:.1f}", *(f"{change:+.1f}" for change in changes[1:])]
        live = 100 * mean(one["live"] for one in those)
        agree = 100 * mean(one["steps"][names[-1]]["agree"] for one in those)
        rows.append(
            f"{load} | {policy} | {live:.1f} | {' | '.join(shown)} "
            f"(left {live - steps[-1]:+.1f}) | {agree:.0f}% | {same} of {asked}"
        )
    return "\n".join(rows)


def main() -> None:
    asked = load_parser(__doc__.partition("\n")[0]).parse_args()
    with (
        ChainRouter.from_config(RouterConfig.load(asked.config)) as router,
        Progress() as progress,
        asked.out.open("a") as file,
    ):
        for line in TapedRound(router, load_options(asked), progress).shares(asked.loads):
            print(json.dumps(line), file=file, flush=True)
    print(table([json.loads(line) for line in asked.out.read_text().splitlines()]))


if __name__ == "__main__":
    main()
