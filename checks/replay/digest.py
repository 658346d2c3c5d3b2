"""`python -m checks.replay digest`: policies in simulated time, compared with a committed digest.

A point is a machine, an acceptance of the drafter's best token, and a stretch of a trace
(`checks.replay.stretches`); arrivals are common to all policies. `digest.json` has what each policy
attained at each point with seed 0: equal after a move, to the last digit.

- `python -m checks.replay digest` computes it anew and compares; exit code 1 where one differs.
  `--part third` (the default) has every stretch on every machine at one acceptance, `--part all` at
  all three, and `--part few` takes less than a minute.
- `--write` adds what the file does not have yet, point by point: it may be stopped and goes on.

The machines are in `machines.json`: measured curves of a CPU, and the two tables that AdaServe's
artifact published.
"""

import argparse
import json
import multiprocessing
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from checks.replay.simulation import POLICIES, MachineFile, Result, load_machines, simulate
from checks.replay.stretches import Arrival, load_stretches

FILE = Path(__file__).parent / "digest.json"
ACCEPTANCES = (0.65, 0.75, 0.85)
_FEW = (9, 17)  # stretches


@dataclass(frozen=True)
class Point:
    machine: str
    acceptance: float
    stretch: int

    def __str__(self) -> str:
        return f"{self.machine}/{self.acceptance}/{self.stretch}"


@dataclass(frozen=True)
class Job:
    point: Point
    policy: str


@cache
def _machines() -> Mapping[str, MachineFile]:
    return load_machines()


@cache
def _stretches() -> list[list[Arrival]]:
    return load_stretches()


def points(part: str = "all") -> list[Point]:
    """Those of a part: see the module."""
    found = []
    for index, machine in enumerate(_machines()):
        for stretch in range(len(_stretches())):
            # Stretches for choosing and for judging both have every acceptance.
            own = ACCEPTANCES[(stretch // 2 + index) % len(ACCEPTANCES)]
            for acceptance in ACCEPTANCES if part == "all" else (own,):
                if part != "few" or stretch in _FEW:
                    found.append(Point(machine, acceptance, stretch))
    return found


def run_job(job: Job) -> tuple[Job, Result]:
    machine, stretch = _machines()[job.point.machine], _stretches()[job.point.stretch]
    return job, simulate(machine, job.point.acceptance, stretch, job.policy, 0)


def run_all(jobs: Sequence[Job], processes: int) -> Iterator[tuple[Job, Result]]:
    """Results as they come, in the order of the jobs."""
    bar = partial(tqdm, total=len(jobs), desc="digest", file=sys.stderr)
    if processes == 1:
        yield from bar(map(run_job, jobs))
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from bar(pool.imap(run_job, jobs))


def digest_of(results: Mapping[Job, Result]) -> dict[str, dict[str, Any]]:
    """By point and policy, in the order of the points."""
    found: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for job in sorted(results, key=lambda job: (str(job.point), job.policy)):
        found[str(job.point)][job.policy] = results[job].to_json()
    return dict(found)


def differences(
    found: Mapping[str, Mapping[str, Any]], stored: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Of what was computed against the file, a line each."""
    return [
        f"{point} {policy}: {stored.get(point, {}).get(policy)} became {result}"
        for point, by_policy in found.items()
        for policy, result in by_policy.items()
        if stored.get(point, {}).get(policy) != result
    ]


def summary(digest: Mapping[str, Mapping[str, Any]]) -> str:
    """Violations of each policy on each machine and acceptance, summed over stretches."""
    totals: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    for point, by_policy in digest.items():
        for policy, result in by_policy.items():
            totals[point.rpartition("/")[0]][policy] += result["violations"]
    names = list(dict.fromkeys(name for row in totals.values() for name in row))
    lines = [f"{'violations':16}" + "".join(f"{name:>14}" for name in names)]
    for place, row in totals.items():
        lines.append(f"{place:16}" + "".join(f"{row[name]:14}" for name in names))
    return "\n".join(lines)


def compare_digest(options: argparse.Namespace) -> int:
    stored = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    chosen = [point for point in points(options.part) if _is_wanted(point, options)]
    if options.write:
        write_digest([point for point in chosen if str(point) not in stored], stored, options.jobs)
        print(summary(stored))
        return 0
    jobs = [Job(point, policy) for point in chosen for policy in POLICIES]
    found = digest_of(dict(run_all(jobs, options.jobs)))
    print(summary(found))
    wrong = differences(found, stored)
    for line in wrong:
        print(line)
    print(json.dumps({"ok": not wrong, "compared": len(jobs), "differ": len(wrong)}))
    return 1 if wrong else 0


def write_digest(chosen: Sequence[Point], stored: dict[str, Any], processes: int) -> None:
    """Adds points to `stored` and to the file, each when all its policies have run."""
    results: dict[Job, Result] = {}
    jobs = [Job(point, policy) for point in chosen for policy in POLICIES]
    for job, result in run_all(jobs, processes):
        results[job] = result
        if job.policy == POLICIES[-1]:
            stored |= digest_of(results)
            FILE.write_text(_written(stored), encoding="utf-8")
            results.clear()


def _written(digest: Mapping[str, Any]) -> str:
    """A line for each point."""
    lines = [f"{json.dumps(point)}: {json.dumps(digest[point])}" for point in sorted(digest)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _is_wanted(point: Point, options: argparse.Namespace) -> bool:
    return not options.machine or point.machine in options.machine


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m checks.replay digest", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--part", choices=("few", "third", "all"), default="third")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--machine", nargs="*", choices=list(_machines()))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    return compare_digest(parser.parse_args(arguments))
