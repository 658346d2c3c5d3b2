"""`python -m checks.replay.record NAME [--prompts FILE ...]`: records real runs anew.

Names are those of `RUNS`. Nothing else should run meanwhile; the times of the machine are in the
recording. Prompts are JSONL files, one for each kind of text; without any the built-in ones are
used. Record with the code whose decisions are to be the yardstick.
"""

import argparse
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from checks.replay.recording import FOLDER, Recording
from checks.replay.scenarios import Stage, chains, load, overrides, paper, shift, texts_of
from checks.replay.tape import Tape, recorded_engines
from specrouter.bench.conditions import cpu_name
from specrouter.cli.arguments import default_config
from specrouter.router import ChainRouter

_Files = Sequence[Path]


@dataclass(frozen=True)
class Run:
    config: str
    temperature: float
    play: Callable[[Stage, _Files], object]


RUNS: Mapping[str, Run] = {
    "tiny-chains": Run(
        "tiny.yaml", 1.0, lambda s, f: chains(s, (1, 4, 8, 16), (3, 3, 2, 2), 48, 48)
    ),
    "tiny-greedy": Run("tiny.yaml", 0.0, lambda s, f: chains(s, (1, 4), (3, 3), 48, 48)),
    "tiny-shift": Run("tiny.yaml", 1.0, lambda s, f: shift(s, 5, 64, 32)),
    "tiny-load": Run(
        "tiny.yaml",
        1.0,
        lambda s, f: load(s, f, ("goodput", "slo", "global-greedy"), 4.0, 80, 24),
    ),
    "tiny-overrides": Run("tiny-ngram.yaml", 1.0, lambda s, f: overrides(s, 3, 48)),
    "tiny-many-overrides": Run("tiny.yaml", 1.0, lambda s, f: overrides(s, 12, 40)),
    "tiny-paper": Run("tiny.yaml", 1.0, lambda s, f: paper(s, (1, 8), 32)),
    "cpu-chains": Run(
        "bench-cpu.yaml", 1.0, lambda s, f: chains(s, (1, 4, 8, 16), (3, 3, 2, 1), 40, 40)
    ),
    "cpu-greedy": Run("bench-cpu.yaml", 0.0, lambda s, f: chains(s, (1,), (1,), 40, 16)),
    "cpu-shift": Run("bench-cpu.yaml", 1.0, lambda s, f: shift(s, 3, 48, 16)),
    "cpu-load": Run(
        "bench-cpu.yaml", 1.0, lambda s, f: load(s, f, ("goodput", "slo"), 1.5, 60, 24)
    ),
    "cpu-overrides": Run("bench-cpu.yaml", 1.0, lambda s, f: overrides(s, 3, 48)),
    "cpu-greedy-overrides": Run("bench-cpu.yaml", 0.0, lambda s, f: overrides(s, 4, 40)),
}


def record(name: str, files: _Files, folder: Path) -> Path:
    run, tape = RUNS[name], Tape(Recording(name=name))
    with recorded_engines(tape), ChainRouter.from_config(default_config(run.config)) as router:
        run.play(
            Stage(tape=tape, router=router, texts=texts_of(files), temperature=run.temperature),
            files,
        )
    tape.recording.about.update(
        config=run.config,
        temperature=run.temperature,
        prompts=[file.stem for file in files] or "built in",
        cpu=cpu_name(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        python=platform.python_version(),
    )
    return tape.recording.save(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="+", choices=RUNS, metavar="NAME", help=", ".join(RUNS))
    parser.add_argument("--prompts", nargs="*", type=Path, default=[])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    for name in options.names:
        started = time.monotonic()
        path = record(name, options.prompts, options.folder)
        recording = Recording.load(path)
        print(
            f"{name}: {recording.decisions} decisions, {len(recording.rounds)} rounds of fixed "
            f"chains, {len(recording.facts)} facts, {path.stat().st_size / 1e3:.0f} kB, "
            f"{time.monotonic() - started:.0f} s",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
