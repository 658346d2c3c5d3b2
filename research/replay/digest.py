"""`python -m research.replay digest`: policies and clusters in simulated time, and what is stored.

`digest.json` has the figures of each run to the last digit: equal after a move of code. Most are
small cells of `research.figures`; the others run policies over two stretches of a trace on each of
the machines of `machines.json`. `--write` computes the file anew. Exit code 1 where a figure
differs.
"""

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from research.figures.cell import Cell, run_cell
from research.figures.cluster_cell import ClusterKind
from research.replay.simulation import POLICIES, Result, load_machines, simulate
from research.replay.stretches import load_stretches

FILE = Path(__file__).parent / "digest.json"
_LLAMA, _OPT = "adaserve-llama70b", "slos-serve-opt-6.7b"
_OF_PAPERS = (
    "slo",
    "slos-serve",
    "specustream",
    "specustream-fixed",
    "adaserve",
    "adaserve-slo-phase",
    "equal-greedy",
    "specinfer",
    "vllm-spec-4",
    "sarathi",
)
_ROUTING: tuple[str, ...] = ("slo", "flowguard", "join-shortest", "p2c", "round-robin")
_REQUESTS = 120
_ACCEPTANCES = (0.65, 0.75, 0.85)


def cells() -> dict[str, Cell]:
    """By name."""
    found: dict[str, Cell] = {}
    for policy in _OF_PAPERS:
        found[f"adaserve {policy}"] = Cell(
            machine=_LLAMA, workload="adaserve", policy=policy, rate=6.0, requests=_REQUESTS
        )
        found[f"Mixed {policy}"] = Cell(
            machine=_OPT, workload="Mixed", policy=policy, rate=6.0, requests=_REQUESTS
        )
    for scenario in ("Coder", "ToolLLM", "Reasoning"):
        requests = 20 if scenario == "Reasoning" else 60
        for policy in ("slo", "slos-serve"):
            found[f"{scenario} {policy}"] = Cell(
                machine=_OPT, workload=scenario, policy=policy, rate=2.0, requests=requests
            )
    for routing in _ROUTING:
        for policy in ("slo", "goodput"):
            name = f"replicas {routing} {policy}"
            found[name] = Cell(
                machine=_LLAMA,
                workload="adaserve",
                policy=policy,
                rate=6.0,
                requests=160,
                replicas=3,
                routing=routing,
                measure="routing",
            )
    failing = ClusterKind(name="failing", slow=2.0, mean_up_s=20.0)
    pair = ClusterKind(name="pair", kv_ms_per_token=0.01)
    others: tuple[tuple[ClusterKind, str, str], ...] = (
        (failing, "slo", "slo"),
        (pair, "slo", "slo"),
        (pair, "specustream", "flowguard-printed"),
    )
    for kind, policy, routing in others:
        found[f"{kind.name} {routing} {policy}"] = Cell(
            machine=_LLAMA, workload="adaserve", policy=policy, rate=4.0, requests=160,
            replicas=2, routing=routing, cluster=kind, measure="routing",
        )  # fmt: skip
    found["overload"] = Cell(
        machine=_LLAMA, workload="adaserve", policy="slo", rate=4.0, requests=160,
        replicas=2, routing="slo", cluster=ClusterKind(max_waiting=16), measure="overload",
    )  # fmt: skip
    return found


@cache
def runs() -> Mapping[str, Callable[[], Any]]:
    """By name, what computes the figures of each."""
    found: dict[str, Callable[[], Any]] = {
        name: partial(run_cell, cell) for name, cell in cells().items()
    }
    stretches = load_stretches()
    for index, (name, machine) in enumerate(load_machines().items()):
        found[f"paper {name}"] = partial(simulate, machine, 0.75, stretches[0], "paper", 0)
        for which, stretch in enumerate(stretches):
            acceptance = _ACCEPTANCES[(index + which + 1) % len(_ACCEPTANCES)]
            for policy in POLICIES:
                run = partial(simulate, machine, acceptance, stretch, policy, 0)
                found[f"{name} stretch {which} {policy}"] = run
    return found


def figures_of(name: str) -> tuple[str, Any]:
    """As JSON has them."""
    found = runs()[name]()
    figures = json.loads(json.dumps(found.to_json() if isinstance(found, Result) else found))
    figures.pop("load", None)  # a curve to look at
    return name, figures


def compute(chosen: Sequence[str], processes: int) -> dict[str, Any]:
    bar = tqdm(total=len(chosen), desc="digest", file=sys.stderr)
    found: dict[str, Any] = {}
    with multiprocessing.get_context("spawn").Pool(processes) as pool, bar:
        for name, figures in pool.imap_unordered(figures_of, chosen):
            found[name] = figures
            bar.update()
    return found


def stored() -> Mapping[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m research.replay digest")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    options = parser.parse_args(arguments)
    found = compute(list(runs()), options.jobs)
    if options.write:
        lines = [f"{json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found)]
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        return 0
    before = stored()
    wrong = sorted(name for name in {*found, *before} if found.get(name) != before.get(name))
    for name in wrong:
        print(f"{name}: {before.get(name)} became {found.get(name)}")
    print(json.dumps({"ok": not wrong, "compared": len(found), "differ": len(wrong)}))
    return 1 if wrong else 0
