"""Tokens per second of the choice alone, by kind of request, at a large vocabulary on a CPU.

    python -m research.studies.choice_speed [--vocab 152064] [--rows 1 16] [--rounds 9]

No model runs: the logits are made up, Zipf's law with exponent 1.5 in a random order, of which
`top_p` 0.9 leaves some 60 ids. Each pass chooses the next token of each row, so that its noise is
new. Shown are medians over rounds that take turns. The last line is one JSON document.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from processors.contexts import Contexts
from processors.sampler import Sampler
from processors.sampling_row import SamplingSettings
from specrouter.bench.conditions import cpu_name

_KINDS = {
    "greedy": SamplingSettings(),
    "top_k 50": SamplingSettings(temperature=1.0, top_k=50),
    "top_p 0.9": SamplingSettings(temperature=1.0, top_p=0.9),
    "temperature 0.3": SamplingSettings(temperature=0.3),
    "temperature 1": SamplingSettings(temperature=1.0),
}
_WINDOW = 4  # positions
_PASSES = 8  # of a round


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocab", type=int, default=152_064)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(argv)
    table = {rows: measure(options.vocab, rows, options.rounds) for rows in options.rows}
    print("| rows | " + " | ".join(_KINDS) + " |")
    for rows, found in table.items():
        print(f"| {rows} | " + " | ".join(f"{found[kind]:,.0f}" for kind in _KINDS) + " |")
    conditions = {"cpu": cpu_name(), "threads": torch.get_num_threads(), "vocab": options.vocab}
    print(json.dumps({**conditions, "tokens_per_s": table}))


def measure(vocab: int, rows: int, rounds: int) -> dict[str, float]:
    """Tokens per second of each kind of request, `rows` of a kind at a time."""
    draws = np.random.default_rng(0)
    ranks = np.stack([draws.permutation(vocab) + 1 for _ in range(rows)])
    logits = torch.from_numpy(-1.5 * np.log(ranks)).bfloat16()  # [rows, vocab]
    samplers = {kind: _opened(vocab, rows, settings) for kind, settings in _KINDS.items()}
    found: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    for number in range(rounds + 1):  # the first takes the memory
        for kind, sampler in samplers.items():
            seconds = _seconds(sampler, logits, number * _PASSES)
            if number:
                found[kind].append(rows * _PASSES / seconds)
    return {kind: statistics.median(speeds) for kind, speeds in found.items()}


def _opened(vocab: int, rows: int, settings: SamplingSettings) -> Sampler:
    sampler = Sampler(vocab, _WINDOW)
    for row in range(rows):
        sampler.open(row, settings)
    return sampler


def _seconds(sampler: Sampler, logits: Tensor, first: int) -> float:
    rows = np.arange(len(logits))
    started = time.perf_counter()
    for position in range(first, first + _PASSES):
        places = Contexts(
            rows=rows, positions=np.full_like(rows, position), depths=np.zeros_like(rows)
        )
        sampler.choose(logits, places)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
