"""What admission by objectives gains over plain selection on stretches that nobody tuned with.

    python -m research.studies.objectives run --traces FOLDER --out FILE --policies slo
    python -m research.studies.objectives table FILE [FILE ...]

Stretches of AdaServe's artifact that lie between those of `research.replay`, each with a seed of
acceptance of its own, at four rates, three acceptances and on both of AdaServe's machines; with
objectives of TPOT alone, and with a TTFT beside. Which they are was committed before anything was
changed. A line of the file is one run; a program that was stopped goes on where it was.

Two counts of violations are told: by the objectives, and with whose first token took longer than
ten seconds counted as missed, which is what a person sees.
"""

import argparse
import hashlib
import json
import multiprocessing
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from research.bench import traces
from research.figures.cell import machine_of
from research.sim.adaserve_load import requests_of
from research.sim.service import SimulatedService
from specrouter.bench.replay import ReplayOutcome, replay
from specrouter.config import TreesConfig

MACHINES = ("adaserve-llama70b", "adaserve-qwen32b")
ACCEPTANCES, RATES = (0.65, 0.75, 0.9), (2.8, 3.6, 4.4, 4.8)
OBJECTIVES: Mapping[str, float | None] = {
    "tpot": None,
    "ttft-1s": 1000.0,
    "ttft-3s": 3000.0,
    "ttft-10s": 10_000.0,
}
SILENCE_MS = 10_000.0  # until the first token, after which a person has left


@dataclass(frozen=True)
class Stretch:
    """Some requests of a trace that follow one another. The seed draws acceptances."""

    trace: str
    first: int
    seed: int
    sha256: str  # of the trace's lines, the first 16 digits
    requests: int = 100

    def arrivals(self, folder: Path, baseline_ms: float) -> list[traces.Arrival]:
        """Raises `ValueError` where the trace is another one than was named."""
        path = folder / f"{self.trace}.csv"
        lines = path.read_bytes().splitlines()[1 + self.first : 1 + self.first + self.requests]
        if hashlib.sha256(b"\n".join(lines)).hexdigest()[:16] != self.sha256:
            raise ValueError(f"{path}: requests {self.first} and on are not those that were named")
        return traces.excerpt(traces.read_trace(path, baseline_ms), self.first, self.requests)


STRETCHES = (
    Stretch("adaserve_fig8_9_rps3.6_ol256", 1160, 100, "9658df3b50df7809"),
    Stretch("adaserve_fig8_9_rps4.4_ol256", 1060, 101, "58851b2b9f9d386a"),
    Stretch("adaserve_fig8_9_rps4.4_ol256", 1360, 102, "0eefc7075eae18e7"),
    Stretch("adaserve_fig8_9_rps4.4_ol256", 1480, 103, "0f8c6bb65ed46144"),
    Stretch("adaserve_fig10_rps4.0_prop0.3", 860, 104, "a02877d02b1d10b8"),
    Stretch("adaserve_fig10_rps4.0_prop0.3", 1160, 105, "31a55cfba8e90ed0"),
    Stretch("adaserve_fig10_rps4.0_prop0.8", 860, 106, "497d3020d586cd0e"),
    Stretch("adaserve_fig10_rps4.0_prop0.8", 1160, 107, "1cc02bddce6fa784"),
)


@dataclass(frozen=True, kw_only=True)
class Run:
    policy: str
    objectives: str
    machine: str
    acceptance: float
    rate: float
    stretch: int


def runs(policies: Sequence[str], objectives: Sequence[str]) -> list[Run]:
    return [
        Run(
            policy=policy,
            objectives=objective,
            machine=machine,
            acceptance=acceptance,
            rate=rate,
            stretch=stretch,
        )
        for stretch in range(len(STRETCHES))
        for rate in RATES
        for acceptance in ACCEPTANCES
        for machine in MACHINES
        for objective in objectives
        for policy in policies
    ]


def measure(asked: tuple[Run, Path]) -> dict[str, Any]:
    run, folder = asked
    machine = machine_of(run.machine)
    baseline_ms = machine.times[machine.target].at(1)
    stretch = STRETCHES[run.stretch]
    found = stretch.arrivals(folder, baseline_ms)
    found = traces.stretched(found, traces.rate_per_s(found) / run.rate)
    ttft_ms = OBJECTIVES[run.objectives]
    requests = requests_of(found, baseline_ms, stretch.seed, ttft_ms)
    service = SimulatedService(machine=machine, acceptance=run.acceptance, trees=TreesConfig())
    service.use(run.policy)
    return asdict(run) | told(replay(requests, service, service))


def told(outcomes: Sequence[ReplayOutcome]) -> dict[str, Any]:
    missed = [one.is_attained is False for one in outcomes]
    first_ms = [np.inf if one.answer.ttft_ms is None else one.answer.ttft_ms for one in outcomes]
    left = [a or b > SILENCE_MS for a, b in zip(missed, first_ms, strict=True)]
    return {
        "requests": len(outcomes),
        "violations": sum(missed),
        "with_silence": sum(left),
        "first_ms": [round(each) for each in first_ms],
    }


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """By objectives and policy: violations, and first tokens of all runs together."""
    groups: defaultdict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        groups[line["objectives"], line["policy"]].append(line)
    rows = ["| objectives | policy | requests | violations | with silence | p50 ms | p99 ms |"]
    rows.append("|---|---|---|---|---|---|---|")
    for (objectives, policy), those in sorted(groups.items()):
        requests, missed, left = (
            sum(one[key] for one in those) for key in ("requests", "violations", "with_silence")
        )
        p50, p99 = np.percentile([ms for one in those for ms in one["first_ms"]], (50, 99))
        row = (objectives, policy, requests, missed, left, f"{p50:.0f}", f"{p99:.0f}")
        rows.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join([*rows, "", *first_tokens(lines)])


def first_tokens(lines: Sequence[Mapping[str, Any]], policy: str = "slo") -> Iterator[str]:
    """Of TPOT alone at each point where plain selection's 99th percentile is below 3 s: the worst
    median and the worst 99th percentile."""
    by_point: defaultdict[tuple[Any, ...], dict[str, list[float]]] = defaultdict(dict)
    for line in lines:
        if line["objectives"] == "tpot":
            point = by_point[line["machine"], line["acceptance"], line["rate"]]
            point.setdefault(line["policy"], []).extend(line["first_ms"])
    found = [
        (*np.percentile(those[policy], (50, 99)).tolist(), at)
        for at, those in by_point.items()
        if policy in those and np.percentile(those.get("global-greedy", [np.inf] * 2), 99) < 3000.0
    ]
    for place, name in enumerate(("p50", "p99") if found else ()):
        worst = max(found, key=lambda one: float(one[place]))
        yield f"worst {name} of {len(found)} points: {worst[place]:.0f} ms at {worst[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--policies", nargs="+", default=["slo", "global-greedy"])
    parser.add_argument("--objectives", nargs="+", default=list(OBJECTIVES), choices=OBJECTIVES)
    parser.add_argument("--stretches", type=int, nargs="+", help="places in STRETCHES; all")
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    if asked.what == "run":
        if asked.traces is None or asked.out is None:
            parser.error("run needs --traces and --out")
        _run(asked)
        asked.files = [asked.out]
    print(table([json.loads(line) for file in asked.files for line in file.open()]))


def _run(asked: argparse.Namespace) -> None:
    done = set()
    if asked.out.exists():
        for line in map(json.loads, asked.out.open()):
            done.add(Run(**{name: line[name] for name in Run.__dataclass_fields__}))
    wanted = [run for run in runs(asked.policies, asked.objectives) if run not in done]
    if asked.stretches is not None:
        wanted = [run for run in wanted if run.stretch in asked.stretches]
    jobs = [(run, asked.traces) for run in wanted]
    with (
        multiprocessing.get_context("spawn").Pool(asked.jobs) as pool,
        asked.out.open("a") as file,
    ):
        for found in tqdm(pool.imap_unordered(measure, jobs), total=len(jobs), file=sys.stderr):
            print(json.dumps(found), file=file, flush=True)


if __name__ == "__main__":
    main()
