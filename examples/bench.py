"""Speed of chains on an inflated target: `python -m examples.bench` (or `make bench`).

The bundled target is widened and deepened to at least 200M parameters without changing its
function, so that acceptance rates are real and the cost ratio is that of a real family. Every round
runs, one after the other: `transformers` `generate`, own target-only, each two-model chain, the
three-model chain, and the adaptive router; figures are medians over rounds of ratios within a
round. Nothing else should run meanwhile. The last line is one JSON document.
"""

import argparse
import functools
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from modelpool import ModelPool
from modelpool.inflate import inflate_to
from specrouter import ChainRouter, SamplingParams, Speculation
from specrouter.cli import default_config
from specrouter.config import RouterConfig

PROMPTS = (
    "def fibonacci(n):\n",
    "Question: Tom has 5 apples and buys 3 more. How many apples does he have?\nAnswer:",
    "This PEP proposes a new syntax for",
    "import os\n\nclass Cache:\n    def __init__(self",
)


@dataclass(frozen=True)
class Run:
    tokens_per_s: float
    acceptance_length: float


Contender = Callable[[int], Run]


def inflated_config(
    process: ProcessPoolExecutor, folder: Path, parameters: int, depth: int
) -> dict[str, Any]:
    """The bundled pool with its target inflated; drafters in float32, which suits them on a CPU."""
    bundled = RouterConfig.load(default_config())
    source = ModelPool.from_config(bundled.pool).path(bundled.pool.target)
    process.submit(inflate_to, source, folder / "target", parameters).result()
    models: list[Mapping[str, str]] = [
        {"name": model.name, "source": model.source, "dtype": "float32"}
        for model in bundled.pool.models
        if model.name != bundled.pool.target
    ]
    target = {"name": "target", "source": str(folder / "target"), "dtype": "bfloat16"}
    return {
        "pool": {"target": "target", "models": [*models, target]},
        "scheduler": {"depth": depth},
    }


def own(router: ChainRouter, speculation: Any, batch: int, new: int, t: float) -> Contender:
    def run(round_number: int) -> Run:
        prompts = [PROMPTS[(round_number + i) % len(PROMPTS)] for i in range(batch)]
        params = [
            SamplingParams(new, temperature=t, seed=100 * round_number + i, ignore_eos=True)
            for i in range(batch)
        ]
        started = time.perf_counter()
        outputs = router.generate(prompts, params, speculation)
        elapsed = time.perf_counter() - started
        lengths = [output.metrics.acceptance_length for output in outputs]
        return Run(batch * new / elapsed, statistics.mean(lengths))

    return run


@functools.cache
def _loaded(path: Path) -> tuple[Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16), tokenizer


def _transformers_run(path: Path, round_number: int, batch: int, new: int, t: float) -> Run:
    model, tokenizer = _loaded(path)
    prompts = [PROMPTS[(round_number + i) % len(PROMPTS)] for i in range(batch)]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    sampling = {"do_sample": True, "temperature": t, "top_k": 0} if t else {"do_sample": False}
    torch.manual_seed(round_number)
    started = time.perf_counter()
    # Never an end-of-text id before the full length, so that all do the same work.
    model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=new,
        min_new_tokens=new,
        **sampling,
    )
    return Run(batch * new / (time.perf_counter() - started), 1.0)


def reference(
    process: ProcessPoolExecutor, path: Path, batch: int, new: int, t: float
) -> Contender:
    """`transformers` `generate` on the same checkpoint, in a process of its own: two pools of
    OpenMP threads in one process slow each other down. So nothing here uses torch but the engine.
    """
    return lambda number: process.submit(_transformers_run, path, number, batch, new, t).result()


def contenders(
    router: ChainRouter, process: ProcessPoolExecutor, args: argparse.Namespace
) -> dict[str, Contender]:
    shared = (args.batch, args.new_tokens, args.temperature)
    target = router.pool.target
    found = {
        "transformers": reference(process, router.pool.path(target), *shared),
        "off": own(router, "off", *shared),
    }
    for name in router.pool.names[:-1]:
        for depth in args.depths:
            override = Speculation((name, target), depth)
            found[f"{name} > target, depth {depth}"] = own(router, override, *shared)
    three = Speculation(("tiny-1m", "tiny-3m", target), args.depths[0])
    found[f"tiny-1m > tiny-3m > target, depth {args.depths[0]}"] = own(router, three, *shared)
    found["adaptive"] = own(router, None, *shared)
    return {
        name: run
        for name, run in found.items()
        if args.only is None or name in {*args.only, "transformers", "off"}
    }


def measure(rounds: int, found: Mapping[str, Contender]) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {name: [] for name in found}
    for number in range(-1, rounds):  # the first round warms up
        for name, contender in found.items():
            run = contender(max(number, 0))
            if number >= 0:
                runs[name].append(run)
            print(f"\rround {number + 1}/{rounds}  {name:40}", end="", file=sys.stderr)
    print(file=sys.stderr)
    return runs


def figures(runs: Mapping[str, list[Run]]) -> dict[str, dict[str, float]]:
    """Per contender: medians of tokens/s, of the ratios to target-only and to transformers."""

    def ratio(name: str, base: str) -> float:
        pairs = zip(runs[name], runs[base], strict=True)
        return statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in pairs)

    return {
        name: {
            "tokens_per_s": statistics.median(run.tokens_per_s for run in found),
            "over_off": ratio(name, "off"),
            "over_transformers": ratio(name, "transformers"),
            "acceptance_length": statistics.mean(run.acceptance_length for run in found),
        }
        for name, found in runs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--depths", type=int, nargs="+", default=[4])
    parser.add_argument("--only", nargs="*", help='contenders beside "transformers" and "off"')
    parser.add_argument("--parameters", type=int, default=200_000_000)
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(1, mp_context=spawn) as process,
    ):
        config = inflated_config(process, Path(folder), args.parameters, args.depths[0])
        with ChainRouter.from_config(config) as router:
            result = figures(measure(args.rounds, contenders(router, process, args)))
            parameters = router.pool.parameter_count(router.pool.target)
    print(f"{'':42}tokens/s  over off  over transformers  acceptance length")
    for name, row in result.items():
        print(
            f"{name:42}{row['tokens_per_s']:8.1f}{row['over_off']:10.2f}"
            f"{row['over_transformers']:19.2f}{row['acceptance_length']:19.2f}"
        )
    conditions = {**vars(args), "target_parameters": parameters, "torch": torch.__version__}
    print(json.dumps({"conditions": conditions, "results": result}))


if __name__ == "__main__":
    main()
