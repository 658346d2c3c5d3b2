"""Is attainment live what the simulator says, and what does admission by objectives gain?

    python -m research.studies.fidelity --out FILE --loads 0.7 1.0 1.5

Each call is a round. It measures what a request takes alone, and finds by simulation, on the times
that the router knows, the capacity of first come, first served: its largest rate with 90% attained.
That is done twice, and some requests are served at the first capacity in between: what passes of
many requests take is known only when there were some, and a machine that works is slower than one
that has just woken. At each load, times that capacity, the policies take turns live. Each is then
simulated on the same requests with the same objectives, and on the times as this run has left them,
since the machine's speed drifts. A round is a line of FILE; the table is of all lines.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import compress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from research.bench.load_bench import LoadBench
from research.bench.load_requests import Point, load_labelled, read_arrivals, sweep
from research.bench.options import LoadOptions
from research.bench.policy_service import PolicyService
from research.figures.cell import ATTAINED, capacity
from research.sim.machine import Machine
from research.sim.service import SimulatedService
from research.sim.text import LEAST, MOST
from research.simulate import simulated_machine
from specrouter.bench.conditions import request_limit
from specrouter.bench.replay import LoadRequest, Pending, ReplayOutcome, figures
from specrouter.config import RouterConfig
from specrouter.profile.acceptance import blended_alpha
from specrouter.progress import Progress
from specrouter.router import ChainRouter

FIRST_COME = "goodput"  # the policy that admits in the order of arrival

FAR = 1.1  # times an objective
_WARMING, _OTHER_SEEDS = 100, 1  # requests, and their round
# Of Student's distribution, two-sided, by degrees of freedom.
_T95 = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 9: 2.262, 11: 2.201}
_PRIOR_ALPHA = 0.6  # of a drafter's best token, before it was tried


class LoggedService(PolicyService):
    """Keeps what admission decided about each request, which the router forgets after 256."""

    def __init__(self, router: ChainRouter) -> None:
        super().__init__(router)
        self._of = router
        self.sent: list[int] = []  # numbers of requests, as they were sent
        self._promised: set[int] = set()  # admitted as attainable

    def send(self, request: LoadRequest) -> Pending:
        pending = super().send(request)
        self.sent.append(pending.handle.request_id)  # type: ignore[attr-defined]
        self.look()
        return pending

    def look(self) -> None:
        self._promised |= {
            one.request
            for one in self._of.instruments.admissions()
            if one.request is not None and one.outcome == "admitted"
        }

    def promised(self, count: int) -> list[bool]:
        """Were the last `count` requests that were sent admitted as attainable?"""
        self.look()
        return [number in self._promised for number in self.sent[len(self.sent) - count :]]


@dataclass(frozen=True)
class Kept:
    """Of requests admitted as attainable: how many missed by how much.

    `ended`: requests of all that got all of their tokens.
    """

    admitted: int
    missed: int
    far: int
    ended: int


def kept(promised: Sequence[bool], outcomes: Sequence[ReplayOutcome]) -> Kept:
    """`promised`: as `LoggedService.promised` has it."""
    theirs = list(compress(outcomes, promised))
    return Kept(
        len(theirs),
        sum(one.is_attained is False for one in theirs),
        sum(overrun(one) > FAR for one in theirs),
        sum(one.answer.error is None for one in outcomes),
    )


def overrun(outcome: ReplayOutcome) -> float:
    """The worst of what was taken over what was asked."""
    asked, answer = outcome.request, outcome.answer
    pairs = ((answer.ttft_ms, asked.ttft_ms), (answer.tpot_ms, asked.objective_ms))
    return max((took / bound for took, bound in pairs if took and bound), default=0.0)


class Round:
    """A router under test, and its simulation."""

    def __init__(
        self,
        router: ChainRouter,
        options: LoadOptions,
        progress: Progress,
        service: Callable[[ChainRouter], LoggedService] = LoggedService,
    ) -> None:
        self._router, self._options, self._progress = router, options, progress
        self._texts = load_labelled(options.prompts)
        self._service = service(router)
        self._live = LoadBench(self._service, self._tokenize, self._texts, options, progress)

    def run(self, loads: Sequence[float]) -> Iterator[dict[str, Any]]:
        """A line for each load and policy."""
        served, alpha = self.prepare(), self._alpha()
        for load in loads:
            point = self._at(load * served)
            found = {name: self._both(name, point) for name in self._options.policies}
            after = self._live.measure_baseline(point)
            assert self._live.alone is not None
            drift = after / self._live.alone.tpot_ms
            yield {
                "load": load,
                "requests_per_s": load * served,
                "capacity_per_s": served,
                "baseline_ms": self._live.alone.tpot_ms,
                "baseline_after": drift,
                "alpha": alpha,
                "policies": found,
            }

    def prepare(self) -> float:
        """Warms up, and returns what first come, first served serves, in requests/s."""
        self._warm_up()
        self._live.measure_alone(self._at(1.0))
        served = self._capacity()
        self._progress.note(f"acceptance {self._alpha():.2f}; fcfs serves {served:.2f} requests/s")
        return served

    def _warm_up(self) -> None:
        self._live.settle(self._at(1.0))
        self._live.measure_alone(self._at(1.0))
        warm = self._at(self._capacity())
        warm = replace(warm, arrivals=warm.arrivals[:_WARMING])
        self._live.run_policy(FIRST_COME, warm, _OTHER_SEEDS)

    def simulated(self, loads: Sequence[float], seeds: int) -> Iterator[dict[str, Any]]:
        """The same in simulated time alone, once for each seed of arrivals, texts and acceptance:
        what each policy attains, on the times as they are after warming up."""
        self._warm_up()
        machine, alpha = simulated_machine(self._router), self._alpha()
        served = self._capacity()
        for load in loads:
            for seed in range(seeds):
                self._options = replace(self._options, seed=seed)
                point = self._at(load * served)
                attained = {
                    name: figures(self._simulated(name, point, machine, alpha))["attainment"]
                    for name in self._options.policies
                }
                yield {"load": load, "seed": seed, "capacity_per_s": served, "attained": attained}

    def _both(self, name: str, point: Point) -> dict[str, Any]:
        live = self._live.run_policy(name, point, 0)
        promises = asdict(kept(self._service.promised(len(live)), live))
        simulated = self._simulated(name, point, simulated_machine(self._router), self._alpha())
        rows = {"live": figures(live), "simulated": figures(simulated)}
        return {each: _short(row) for each, row in rows.items()} | {"promised": promises}

    def _simulated(
        self, name: str, point: Point, machine: Machine, alpha: float
    ) -> list[ReplayOutcome]:
        service = SimulatedService(
            machine=machine, acceptance=alpha, trees=self._router.config.trees
        )
        bench = LoadBench(
            service, self._tokenize, self._texts, self._options, self._progress, service
        )
        bench.alone = self._live.alone
        return bench.run_policy(name, point, 0)

    def _capacity(self) -> float:
        machine, alpha = simulated_machine(self._router), self._alpha()

        def attained(rate: float) -> float:
            outcomes = self._simulated(FIRST_COME, self._at(rate), machine, alpha)
            return float(figures(outcomes)["attainment"])

        return capacity(attained, 2.0, ATTAINED)

    def _at(self, rate: float) -> Point:
        """The same requests at any rate."""
        options = replace(self._options, poisson=1.0, scale=(1.0 / rate,))
        limit = request_limit(self._router.config, self._router.pool)
        return sweep(read_arrivals(options), options, limit)[0]

    def _alpha(self) -> float:
        """How often the best token of the drafter that is simulated was accepted so far."""
        known = self._router.instruments.performance()
        drafter, target = simulated_machine(self._router).names
        seen = known.trees.get(((drafter,), target, self._options.temperature > 0))
        return min(max(blended_alpha(seen, _PRIOR_ALPHA), LEAST), MOST)

    def _tokenize(self, text: str) -> Sequence[int]:
        ids: Sequence[int] = self._router.pool.tokenizer(text)["input_ids"]
        return ids


def _short(row: Mapping[str, Any]) -> dict[str, Any]:
    wanted = ("attainment", "goodput_tokens_per_s", "tokens_per_s", "errors", "acceptance_length")
    by_category = {kind: one["attainment"] for kind, one in row["by_category"].items()}
    latency = {name: row[name]["p50"] for name in ("ttft_ms", "tpot_ms")}
    return {name: row[name] for name in wanted} | {"by_category": by_category, "p50": latency}


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Medians over rounds, with the rounds behind them."""
    found: dict[tuple[float, str], list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        for name, row in line["policies"].items():
            found[line["load"], name].append(row)
    rows = [f"{'load':>5} {'policy':>9} {'live':>6} {'sim.':>6}  rounds: live/simulated"]
    for (load, name), several in sorted(found.items()):
        pairs = [
            tuple(100 * one[each]["attainment"] for each in ("live", "simulated"))
            for one in several
        ]
        live, simulated = (median(one) for one in zip(*pairs, strict=True))
        each = " ".join(f"{a:.0f}/{b:.0f}" for a, b in pairs)
        rows.append(f"{load:5.2f} {name:>9} {live:5.1f}% {simulated:5.1f}%  {each}")
        keys = several[0]["promised"]
        sums = {key: sum(one["promised"][key] for one in several) for key in keys}
        shown = "promised {admitted}, missed {missed}, by over 10% {far}".format_map(sums)
        rows.append(f"{'':15} {shown}")
    return "\n".join(rows)


def differences(lines: Sequence[Mapping[str, Any]]) -> str:
    """By load: what the last policy attains beyond the first one, in points, with the 95% interval
    over the seeds (Student's t), and as a factor."""
    rows = ["load  attained  difference  95% interval     factor"]
    for load in sorted({line["load"] for line in lines}):
        those = [tuple(line["attained"].values()) for line in lines if line["load"] == load]
        before, after = np.array(those).T[[0, -1]]
        gained = 100.0 * (after - before)
        half = _T95.get(len(gained) - 1, 2.0) * gained.std(ddof=1) / len(gained) ** 0.5
        rows.append(
            f"{load:4.2f} {before.mean():5.1%} {after.mean():5.1%} {gained.mean():+6.1f} "
            f"[{gained.mean() - half:+6.1f}, {gained.mean() + half:+6.1f}] "
            f"{after.mean() / before.mean():5.2f}"
        )
    return "\n".join(rows)


def load_parser(description: str | None) -> argparse.ArgumentParser:
    """For `load_options`, `--out` and `--loads`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", type=Path, default=Path("configs/bench-cpu.yaml"))
    parser.add_argument("--out", type=Path, required=True, help="a line is added for each load")
    parser.add_argument("--loads", type=float, nargs="*", default=[0.7, 1.0, 1.5])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", nargs="+", default=[FIRST_COME, "slo"])
    return parser


def load_options(asked: argparse.Namespace) -> LoadOptions:
    return LoadOptions(
        config=asked.config, poisson=1.0, requests=asked.requests, seed=asked.seed,
        ttft_slowdown=5.0, policy=tuple(asked.policy),
    )  # fmt: skip


def main() -> None:
    parser = load_parser(__doc__)
    parser.add_argument("--simulated-seeds", type=int, help="no live runs; so many seeds")
    asked = parser.parse_args()
    config = RouterConfig.load(asked.config)
    with ChainRouter.from_config(config) as router, Progress() as progress:
        under_test, seeds = Round(router, load_options(asked), progress), asked.simulated_seeds
        lines = under_test.simulated(asked.loads, seeds) if seeds else under_test.run(asked.loads)
        for line in lines:
            with asked.out.open("a") as file:
                print(json.dumps(line), file=file)
    written = [json.loads(line) for line in asked.out.read_text().splitlines()]
    print(differences(written) if asked.simulated_seeds else table(written))


if __name__ == "__main__":
    main()
