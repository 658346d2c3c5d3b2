"""Can the router be trusted to choose? `python -m research.studies.routing CHECK [options]`.

- `stationary`: one kind of text, from a cold start; after 300 generated tokens `adaptive` runs
  alternately with `tuned`, whose pair, depth and width a sweep has found for that text.
- `shift`: a stream that goes from code to mathematics to prose; `adaptive` against every chain.
- `predict`: predicted against measured time per token, for every chain after 500 tokens.
- `random`: `adaptive` against target-only with drafters whose weights are random.

Prompts are JSONL files, one for each kind of text. Nothing else should run meanwhile. The last line
is one JSON document.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from research.studies.routing_bench import Bench, open_bench, progress
from specrouter.bench.prompts import load_prompts
from specrouter.cli.arguments import default_config
from specrouter.config.yaml_file import read_mapping
from specrouter.view import ChainDecision

_COLD_TOKENS = 300


def stationary(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for category in options.categories or list(load_prompts([Path(p) for p in options.prompts])):
        for batch in options.batch:
            bench = open_bench(options)
            with bench.router:
                pairs = [chain for chain in bench.chains if len(chain) == 2]
                swept = bench.sweep(pairs, category, batch)
            best = max(swept.values(), key=lambda tuned: tuned.tokens_per_s)
            fixed = {"chain": best.chain, "depth": best.shape.depth, "width": best.shape.width}
            bench = open_bench(options)
            with bench.router:
                bench.router.instruments.set_learning(True)
                cold = 0
                while cold < _COLD_TOKENS:
                    progress(f"{category}, batch {batch}: cold start, {cold} tokens")
                    new = -(-(_COLD_TOKENS - cold) // batch)
                    new = min(new, options.new_tokens)
                    bench.run(bench.texts.take(category, 40 + cold, batch), cold, new_tokens=new)
                    cold += new * batch
                ratios = []
                for number in range(options.rounds):
                    prompts = bench.texts.take(category, number * batch, batch)
                    ours = bench.run(prompts, 100 * number)
                    base = bench.run(prompts, 100 * number, "static", **fixed)
                    assert ours.texts == base.texts or options.inexact
                    ratios.append(ours.tokens_per_s / base.tokens_per_s)
                bench.router.set_policy("adaptive")
                last = bench.router.instruments.decisions()[-1].to_json()
            found[f"{category}, batch {batch}"] = {
                "over_ssd_tuned": statistics.median(ratios),
                "ssd_tuned": {**fixed, "chain": ">".join(best.chain)},
                "adaptive": {key: last[key] for key in ("chain", "depth", "width", "nodes")},
            }
    return found


def shift(options: argparse.Namespace) -> dict[str, Any]:
    bench = open_bench(options)
    with bench.router:
        swept = bench.sweep(bench.chains, None, 1)
        fixed = {
            ">".join(chain): {"chain": chain, "depth": t.shape.depth, "width": t.shape.width}
            for chain, t in swept.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in (*fixed, "adaptive", "off")}
        used: dict[str, Counter[str]] = {}
        switches: dict[str, list[str]] = {}
        seen = 0
        for category in bench.texts.by_category:
            for number in range(options.requests):
                prompts = bench.texts.take(category, number, 1)
                for name in seconds:
                    progress(f"{category} {number}: {name}")
                    policy = {"adaptive": "adaptive", "off": "target-only"}.get(name, "static")
                    run = bench.run(prompts, number, policy, **fixed.get(name, {}))
                    seconds[name].append(options.new_tokens / run.tokens_per_s)
                    if name == "adaptive":
                        used.setdefault(category, Counter()).update(run.chains)
            bench.router.set_policy("adaptive")  # each policy has decisions of its own
            recent = bench.router.instruments.decisions()[seen:]
            seen += len(recent)
            switches[category] = [_shown(record.decision) for record in recent]
    totals = {name: sum(parts) for name, parts in seconds.items()}
    best = min(fixed, key=lambda name: totals[name])
    return {
        "adaptive_over_best_static": totals[best] / totals["adaptive"],
        "best_static": best,
        "adaptive_over_off": totals["off"] / totals["adaptive"],
        "over_off": {name: totals["off"] / total for name, total in totals.items()},
        "cycles": {category: dict(counts) for category, counts in used.items()},
        "switches_to": switches,
    }


def _shown(decision: ChainDecision) -> str:
    shape = decision.shape
    drafted = f"{shape.depth} x {shape.width}, {shape.nodes or 'all'} nodes"
    return f"{'>'.join(decision.chain)} {drafted}: {decision.reason}"


def predict(options: argparse.Namespace) -> dict[str, Any]:
    """All runs teach here: a chain's own runs are what its prediction is made of."""
    bench = open_bench(options)
    found = {}
    with bench.router:
        for batch in options.batch:
            errors = {}
            for chain in [(bench.router.pool.target,), *bench.chains]:
                static: dict[str, Any] = {"chain": chain, "depth": 3, "width": 2}
                learned, number = 0, 0
                while learned < 500:
                    progress(f"predict, batch {batch}: {'>'.join(chain)}")
                    prompts = bench.texts.mixed(number, batch)
                    bench.run(prompts, number, "static", learn=True, **static)
                    learned, number = learned + batch * options.new_tokens, number + 1
                foreseen = bench.router.instruments.predict(chain, 3, 2, requests=batch)
                measured = statistics.median(
                    bench.run(
                        bench.texts.mixed(20 + i, batch), 50 + i, "static", False, **static
                    ).tpot_ms
                    for i in range(options.rounds)
                )
                errors[">".join(chain)] = {
                    "predicted_ms": foreseen,
                    "measured_ms": measured,
                    "error": foreseen / measured - 1.0,
                }
            off = [abs(error["error"]) for error in errors.values()]
            found[f"batch {batch}"] = {"median_error": statistics.median(off), "chains": errors}
    return found


_WEIGHTS = shutil.ignore_patterns("*.safetensors*", "*.bin*", "*.pth")


def random_drafters(options: argparse.Namespace) -> dict[str, Any]:
    config = read_mapping(options.config)
    with tempfile.TemporaryDirectory() as folder:
        bench = open_bench(options)
        with bench.router:
            pool = bench.router.pool
            drafters = [name for name in pool.names if name != pool.target]
            paths = {name: pool.path(name) for name in drafters if name in pool.models}
        for model in config["pool"]["models"]:
            if model["name"] in paths:
                out = Path(folder) / model["name"]
                shutil.copytree(paths[model["name"]], out, ignore=_WEIGHTS)
                torch.manual_seed(0)
                shape = AutoConfig.from_pretrained(out)
                model_of: Any = AutoModelForCausalLM
                model_of.from_config(shape).save_pretrained(out)
                model["source"] = str(out)
                model.pop("inflate_to", None)
        bench = open_bench(options, config)
        with bench.router:
            return over_off(bench, options)


def over_off(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for batch in options.batch:
        ratios = []
        for number in range(-1, options.rounds):
            prompts = bench.texts.mixed(3 * max(number, 0), batch)
            progress(f"batch {batch}: round {number}")
            base = bench.run(prompts, 100 * number + 100, "target-only")
            ours = bench.run(prompts, 100 * number + 100)
            if number >= 0:
                ratios.append(ours.tokens_per_s / base.tokens_per_s)
        found[f"batch {batch}"] = {"adaptive_over_off": statistics.median(ratios)}
    return found


_CHECKS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "stationary": stationary,
    "shift": shift,
    "predict": predict,
    "random": random_drafters,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("check", choices=_CHECKS)
    parser.add_argument("--config", default=str(default_config("bench-cpu.yaml")))
    parser.add_argument("--prompts", nargs="*", default=[], help="JSONL files, one per kind")
    parser.add_argument("--categories", nargs="*", help="of `stationary`; all by default")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=8, help="of each kind in `shift`")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--inexact", action="store_true", help="texts may differ (bfloat16 at other pack sizes)"
    )
    options = parser.parse_args()
    result = _CHECKS[options.check](options)
    print(file=sys.stderr)
    print(json.dumps({"check": options.check, "conditions": vars(options), "result": result}))


if __name__ == "__main__":
    main()
