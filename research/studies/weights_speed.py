"""What quantised weights bring in tokens per second: a configuration beside itself, in turns.

    python -m research.studies.weights_speed [--weights auto int8 int4] [--config FILE] [--adaptive]

The target runs with each of `--weights`, and with the first once more, which tells what the
machine's own unrest makes of a ratio of 1. Each kind of weights has an engine in a process of
its own, and they take turns on the same prompts. Without `--adaptive` nothing is drafted. Shown are
medians of tokens per second, and the median, the least and the largest of the rounds' ratios. The
last line is one JSON document.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, get_args

from modelpool import ModelPool
from modelpool.config import Weights
from research.studies.engines import Served, engine, target_settings
from specrouter.bench.conditions import cpu_name
from specrouter.bench.contenders import measure
from specrouter.bench.figures import Sample
from specrouter.bench.prompts import BenchPrompt, deal, load_prompts, tokenize
from specrouter.cli.arguments import default_config
from specrouter.progress import Progress

_LONGEST = 96  # tokens of a prompt


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    policy = "adaptive" if options.adaptive else "target-only"
    rows = max(options.batches)
    settings = {kept: target_settings(options.config, kept, rows) for kept in options.weights}
    pool = ModelPool.from_config(settings[options.weights[0]]["pool"])
    prompts = tokenize(load_prompts(options.prompts), pool.tokenizer, _LONGEST)
    with ExitStack() as stack:
        engines = {kept: stack.enter_context(engine(one)) for kept, one in settings.items()}
        engines[f"{options.weights[0]} again"] = engines[options.weights[0]]
        contenders = [Served(name, one, policy) for name, one in engines.items()]
        rows = [_row(contenders, prompts, batch, options) for batch in options.batches]
    print(json.dumps({"policy": policy, "cpu": cpu_name(), "rounds": options.rounds, "rows": rows}))


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
    )
    with Progress() as progress:
        samples = measure(contenders, dealt, options.rounds, f"batch {batch}", progress)
    speeds = {name: [_speed(found) for found in rounds] for name, rounds in samples.items()}
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    row: dict[str, Any] = {"batch": batch, "tokens_per_s": medians}
    first, *others = speeds
    for name in others:
        ratios = [one / other for one, other in zip(speeds[name], speeds[first], strict=True)]
        row[name] = [statistics.median(ratios), min(ratios), max(ratios)]
    shown = ", ".join(f"{name} {speed:.1f}" for name, speed in medians.items())
    over = "; ".join(f"{name} {_shown(row[name])}" for name in others)
    print(f"batch {batch}: {shown} tokens/s; over {first}: {over}")
    return row


def _shown(ratios: Sequence[float]) -> str:
    return ", ".join(f"{ratio:.2f}" for ratio in ratios)


def _speed(found: Sequence[Sample]) -> float:
    return sum(one.tokens for one in found) / sum(one.seconds for one in found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, default=default_config("bench-cpu.yaml"))
    weights = {"nargs": "+", "choices": get_args(Weights), "default": ["auto", "int8", "int4"]}
    parser.add_argument("--weights", **weights)  # type: ignore[arg-type]
    parser.add_argument("--prompts", type=Path, nargs="+", default=[], help="JSONL files")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--adaptive", action="store_true", help="let the router draft")
    return parser


if __name__ == "__main__":
    main()
