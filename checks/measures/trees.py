"""The speed of this work tree against another one's, both in turn, and the other against itself.

    python -m checks.measures.trees OTHER_TREE [--rounds 9] [--batches 1 4 8 16] [--json FILE]
    python -m checks.measures.trees . --config A.yaml --this-config B.yaml

Three processes stay loaded: the other work tree twice (what differs between these is noise) and
this one. Every round serves the same prompts and seeds in each of them, in an order that rotates,
so that a busy machine meets all alike. Told per batch size: the median of the ratios of tokens per
second, its 90% bootstrap interval, the same for the other tree against itself, the share of the
control plane, and whether all outputs were equal. Nothing else should run meanwhile.

The processes start one after the other, each with a folder of its own for the times of models:
curves that are measured while another process loads make a tree slow by chance. With
`--this-config` this tree has a configuration of its own: one that the other one cannot read, or
one that is to be compared with it.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from tempfile import TemporaryDirectory
from typing import Any, Self

import numpy as np
from tqdm import tqdm

from modelpool.checkpoint.cache_dir import cache_dir
from specrouter.bench.prompts import load_prompts

_ROOT = Path(__file__).resolve().parents[2]
_WORKER = Path(__file__).with_name("tree_worker.py")
_WARM_UP_ROUNDS = 2
_RESAMPLES = 10_000
_INTERVAL = (5.0, 95.0)  # percent


class Tree:
    """A process that serves from a work tree, ready when this returns."""

    def __init__(self, folder: Path, config: str) -> None:
        self._cache = TemporaryDirectory()
        inflated = cache_dir() / "inflated"
        inflated.mkdir(parents=True, exist_ok=True)
        (Path(self._cache.name) / "inflated").symlink_to(inflated)
        self._process = subprocess.Popen(
            [sys.executable, str(_WORKER), config],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "SPECROUTER_CACHE": self._cache.name},
        )
        self.run({"prompts": ["Once"], "seeds": [0], "new_tokens": 1, "temperature": 0.0})

    def run(self, work: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps(work), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the work tree's process ended with {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._cache.cleanup()


def work_of(
    texts: Mapping[str, Sequence[str]], number: int, batch: int, new_tokens: int, temperature: float
) -> dict[str, Any]:
    """The requests of a round: categories in turn, other prompts in every round."""
    mixed = [text for several in zip(*texts.values(), strict=False) for text in several]
    chosen = [mixed[(number * batch + place) % len(mixed)] for place in range(batch)]
    seeds = [10_000 * number + place for place in range(batch)]
    return {"prompts": chosen, "seeds": seeds, "new_tokens": new_tokens, "temperature": temperature}


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """The 90% bootstrap interval of the median."""
    draws = np.random.default_rng(0).choice(ratios, (_RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), _INTERVAL)
    return float(low), float(high)


def measure(arguments: argparse.Namespace) -> dict[int, list[dict[str, dict[str, Any]]]]:
    """What each process said, by batch size and round."""
    texts = load_prompts(arguments.prompts)
    found: dict[int, list[dict[str, dict[str, Any]]]] = {b: [] for b in arguments.batches}
    with (
        Tree(arguments.other, arguments.config) as other,
        Tree(arguments.other, arguments.config) as again,
        Tree(_ROOT, arguments.this_config or arguments.config) as this,
    ):
        trees = {"other": other, "again": again, "this": this}
        rounds = _WARM_UP_ROUNDS + arguments.rounds
        for number in tqdm(range(rounds), desc="rounds"):
            for batch in arguments.batches:
                work = work_of(texts, number, batch, arguments.new_tokens, arguments.temperature)
                turn = number % len(trees)
                names = [*trees][turn:] + [*trees][:turn]
                said = {name: trees[name].run(work) for name in names}
                if number >= _WARM_UP_ROUNDS:
                    found[batch].append(said)
    return found


def speed(said: Mapping[str, Any]) -> float:
    return float(said["tokens"] / said["seconds"])


def summary(batch: int, rounds: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    told: dict[str, Any] = {"batch": batch, "rounds": len(rounds)}
    for name in ("this", "again"):
        ratios = [speed(each[name]) / speed(each["other"]) for each in rounds]
        told[name] = {"median": median(ratios), "interval": interval(ratios)}
    for name in ("this", "other"):
        cycles_ms = sum(each[name]["cycle_ms"] for each in rounds)
        told[f"control_share_{name}"] = sum(e[name]["control_ms"] for e in rounds) / cycles_ms
        told[f"tokens_per_s_{name}"] = median(speed(each[name]) for each in rounds)
    told["differing"] = sum(each["this"]["digest"] != each["other"]["digest"] for each in rounds)
    return told


def report(rows: Sequence[Mapping[str, Any]]) -> None:
    print("| batch | this/other | 90% interval | other/itself | interval | control | outputs |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        this, again = row["this"], row["again"]
        low, high = this["interval"]
        least, most = again["interval"]
        shares = f"{row['control_share_this']:.1%} ({row['control_share_other']:.1%})"
        outputs = f"{row['differing']} of {row['rounds']} differ" if row["differing"] else "equal"
        print(
            f"| {row['batch']} | {this['median']:.3f} | {low:.3f}-{high:.3f} "
            f"| {again['median']:.3f} | {least:.3f}-{most:.3f} | {shares} | {outputs} |"
        )
    print(f"geometric mean {geometric_mean(row['this']['median'] for row in rows):.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="the work tree to compare with")
    parser.add_argument("--config", default="configs/bench-cpu.yaml")
    parser.add_argument("--this-config", help="of this tree; by default the same")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--prompts", type=Path, nargs="*", default=[], help="files of JSON lines")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments)
    rows = [summary(batch, rounds) for batch, rounds in found.items()]
    report(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows, "rounds": found}, indent=1))
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
