"""What int8 weights bring in tokens per second: a configuration beside itself, in turns.

    python -m research.studies.int8_speed [--config FILE] [--batches 1 16] [--rounds 9] [--adaptive]

The target runs with plain weights, with int8 ones, and with plain ones once more, which tells what
the machine's own unrest makes of a ratio of 1. Each kind of weights has an engine in a process of
its own, and they take turns on the same prompts. Without `--adaptive` nothing is drafted. Shown are
medians of tokens per second, and the median, the least and the largest of the rounds' ratios. The
last line is one JSON document.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from modelpool import ModelPool
from modelpool.config import Weights
from research.studies.engines import Served, engine
from specrouter.bench.conditions import cpu_name
from specrouter.bench.progress import Progress
from specrouter.bench.prompts import BenchPrompt, deal, load_prompts, tokenize
from specrouter.bench.sample import Sample
from specrouter.bench.session import measure
from specrouter.cli.arguments import default_config
from specrouter.config import RouterConfig

_LONGEST = 96  # tokens of a prompt
_PLAIN, _INT8, _AGAIN = "plain", "int8", "plain again"


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    policy = "adaptive" if options.adaptive else "target-only"
    settings = {kept: _settings(options, kept) for kept in ("auto", "int8")}
    pool = ModelPool.from_config(settings["auto"]["pool"])
    prompts = tokenize(load_prompts(options.prompts), pool.tokenizer, _LONGEST)
    with engine(settings["auto"]) as plain, engine(settings["int8"]) as small:
        engines = {_PLAIN: plain, _INT8: small, _AGAIN: plain}
        contenders = [Served(name, one, policy) for name, one in engines.items()]
        rows = [_row(contenders, prompts, batch, options) for batch in options.batches]
    print(json.dumps({"policy": policy, "cpu": cpu_name(), "rounds": options.rounds, "rows": rows}))


def _settings(options: argparse.Namespace, weights: Weights) -> dict[str, Any]:
    """The configuration with such weights of its target, and room for the largest batch."""
    settings = RouterConfig.load(options.config).model_dump()
    settings["engine"].update(max_requests=max(options.batches))
    for model in settings["pool"]["models"]:
        if model["name"] == settings["pool"]["target"]:
            model.update(weights=weights, device="cpu")
    return settings


def _row(
    contenders: Sequence[Served],
    prompts: dict[str, list[BenchPrompt]],
    batch: int,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Of one batch size, shown and returned."""
    dealt = partial(
        deal,
        prompts,
        batch=batch,
        new_tokens=options.new_tokens,
        temperature=options.temperature,
        by_category=False,
    )
    with Progress() as progress:
        samples, _ = measure(contenders, dealt, options.rounds, f"batch {batch}", progress)
    speeds = {name: [_speed(found) for found in rounds] for name, rounds in samples.items()}
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    row: dict[str, Any] = {"batch": batch, "tokens_per_s": medians}
    for name in (_INT8, _AGAIN):
        ratios = [one / plain for one, plain in zip(speeds[name], speeds[_PLAIN], strict=True)]
        row[name] = [statistics.median(ratios), min(ratios), max(ratios)]
    shown = ", ".join(f"{name} {speed:.1f}" for name, speed in medians.items())
    of_int8, again = (", ".join(f"{ratio:.2f}" for ratio in row[name]) for name in (_INT8, _AGAIN))
    print(f"batch {batch}: {shown} tokens/s; int8 over plain {of_int8}; again {again}")
    return row


def _speed(found: Sequence[Sample]) -> float:
    return sum(one.tokens for one in found) / sum(one.seconds for one in found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, default=default_config("bench-cpu.yaml"))
    parser.add_argument("--prompts", type=Path, nargs="+", default=[], help="JSONL files")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--adaptive", action="store_true", help="let the router draft")
    return parser


if __name__ == "__main__":
    main()
