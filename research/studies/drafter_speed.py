"""What a drafter brings in tokens per second: a pool with it beside the same pool without it.

    python -m research.studies.drafter_speed --config FILE [--drafter suffix] [--workload agent]

Without `--workload`, `adaptive` generates on ordinary prompts with the drafter, without it, and
without it once more, which tells what the machine's own unrest makes of a ratio of 1. With
`--workload agent` recorded outputs are replayed, and `adaptive` with the drafter is compared with
the target alone. The two pools have engines in processes of their own, and they take turns on the
same prompts.

A long measurement can be cut: `--record FILE` keeps every round, `--first-round N` goes on with
another one, and what is shown is of all rounds that the file has; `--rounds 0` only shows it. Shown
are medians of the ratios within a round, with quartiles, by category. The last line is one JSON
document.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from modelpool import ModelPool
from research.bench.recorded import agent_workload, tokenize_trajectories
from research.bench.session import deal_by_category, mean_spread
from research.studies.engines import Served, engine
from specrouter.bench.conditions import cpu_name, request_limit
from specrouter.bench.figures import Spread, spread
from specrouter.bench.prompts import BenchPrompt, load_prompts, tokenize
from specrouter.cli.arguments import default_config
from specrouter.config import RouterConfig

_LONGEST = 200  # tokens of an ordinary prompt

_Prompts = Mapping[str, Sequence[BenchPrompt]]  # by category
# What is recorded of a round, by contender and category: tokens per second.
_Speeds = Mapping[str, Mapping[str, float]]


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    if options.temperature is None:
        options.temperature = 1.0 if options.workload is None else 0.0
    rounds = _recorded(options.record)
    for found in _measured(options) if options.rounds else ():
        rounds.append(found)
        if options.record is not None:
            with options.record.open("a", encoding="utf-8") as file:
                print(json.dumps(found), file=file)
    base, *others = rounds[0]
    over = {name: _over(rounds, name, base) for name in others}
    for name, by_category in over.items():
        for category, ratio in by_category.items():
            shown = "{median:.3f} ({low:.3f} to {high:.3f})".format(**ratio)
            print(f"{name} over {base}, {category}: {shown}")
    print(json.dumps({"cpu": cpu_name(), "rounds": len(rounds), "over": over}))


def _over(rounds: Sequence[_Speeds], name: str, base: str) -> dict[str, Spread]:
    """Ratios within a round by category, and of their means over the categories."""
    found = {
        category: spread([one[name][category] / one[base][category] for one in rounds])
        for category in rounds[0][base]
    }
    return found | {"all": mean_spread(list(found.values()))}


def _measured(options: argparse.Namespace) -> Iterator[_Speeds]:
    """Of round after round; one before the first one warms up."""
    config = RouterConfig.load(options.config)
    prompts, settings = _prompts(options, config), config.model_dump()
    policy, base = ("adaptive", "without") if options.workload is None else ("target-only", "alone")
    with engine(settings) as having, engine(_without(settings, options.drafter)) as lacking:
        contenders = [
            Served(base, lacking, policy),
            Served("with", having, "adaptive"),
            Served(f"{base} again", lacking, policy),
        ]
        for number in range(-1, options.rounds):
            found: dict[str, dict[str, float]] = {one.name: {} for one in contenders}
            round_number = options.first_round + number % options.rounds
            for work in deal_by_category(
                prompts,
                round_number,
                options.batch,
                new_tokens=options.new_tokens,
                temperature=options.temperature,
            ):
                for one in contenders:
                    sample = one.run(work)
                    found[one.name][str(work.category)] = sample.tokens / sample.seconds
            if number >= 0:
                yield found


def _prompts(options: argparse.Namespace, config: RouterConfig) -> _Prompts:
    pool = ModelPool.from_config(config.pool)  # reads no weights
    if options.workload is None:
        return tokenize(load_prompts(options.prompts), pool.tokenizer, _LONGEST)
    limit = request_limit(config, pool)
    return tokenize_trajectories(agent_workload(), pool.tokenizer, limit, options.new_tokens)


def _without(settings: Mapping[str, Any], drafter: str) -> dict[str, Any]:
    pool = settings["pool"]
    kept = [model for model in pool["models"] if model["name"] != drafter]
    if len(kept) == len(pool["models"]):
        raise SystemExit(f"the pool has no {drafter}")
    return {**settings, "pool": {**pool, "models": kept}}


def _recorded(file: Path | None) -> list[_Speeds]:
    """Earlier rounds."""
    if file is None or not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, default=default_config())
    parser.add_argument("--drafter", default="suffix", help="name of the pool's member")
    parser.add_argument("--workload", choices=["agent"], help="replay recorded outputs, greedily")
    parser.add_argument("--prompts", type=Path, nargs="+", default=[], help="JSONL files")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--first-round", type=int, default=0)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, help="default: 1; of recorded outputs 0")
    parser.add_argument("--record", type=Path, help="JSON lines of all rounds, to be gone on with")
    return parser


if __name__ == "__main__":
    main()
