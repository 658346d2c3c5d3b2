"""What speculation could gain at most on this machine, before any of it is tuned.

    python -m research.studies.ceiling [--config FILE] [--prompts FILE ...] [--batches 1 4 8]

A token more in the target's pass costs what it costs, and a draft is accepted as often as it is. So
there is a bound on what any router could reach with these models: tokens that a request gains in a
pass, times the pass without drafts over the pass with them. It is shown for drafts that take no
time, and for drafters' forwards by themselves; logits, trees and decisions are free in both. The
nodes that are verified are the most probable ones of all requests together, for each of several
budgets. The last line is one JSON document.
"""

import argparse
import json
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from modelpool.config import validate_config
from research.studies.bare_forward import BareForwards
from specrouter import ChainRouter, SamplingParams
from specrouter.bench.prompts import load_prompts, tokenize
from specrouter.cli.arguments import default_config
from specrouter.config import RouterConfig
from specrouter.profile.profiler import EngineStatistics
from specrouter.request.params import Chain

_LONGEST = 96  # tokens of a prompt
_POLL_S = 0.002


@dataclass(frozen=True)
class Way:
    """Drafts of all requests, and how many of their nodes the target verifies together."""

    depth: int
    nodes: int


@dataclass(frozen=True)
class Gain:
    """Of a batch in one round; ratios to decoding without drafts.

    Attributes:
        tokens: of a request in one pass of the target.
        free: what can be gained if drafting takes no time.
        drafted: what can be gained if it takes its forwards alone.
    """

    way: Way
    tokens: float
    free: float
    drafted: float


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    config = RouterConfig.load(options.config)
    engine = config.engine.model_copy(update={"max_requests": max(options.batches)})
    data = config.model_dump() | {"engine": engine.model_dump()}
    data["scheduler"] = {"policy": "target-only"}
    rows = []
    with ChainRouter(validate_config(RouterConfig, data)) as router:
        chain = tuple(options.chain or _smallest(router))
        prompts = _prompts(router, options)
        print(f"{'>'.join(chain)}, trees of width {options.width}: at most", flush=True)
        for batch in options.batches:
            rounds = [
                _round(router, chain, prompts, batch, number, options)
                for number in range(options.rounds)
            ]
            rows.append(_row(batch, rounds))
            print(_line(rows[-1]), flush=True)
    print(json.dumps({"chain": list(chain), "batches": rows}))


def _smallest(router: ChainRouter) -> Chain:
    pool = router.pool
    drafters = [n for n in pool.names if n != pool.target and n in pool.models]
    if not drafters:
        raise SystemExit("the pool has no drafter with weights")
    return drafters[0], pool.target


def _prompts(router: ChainRouter, options: argparse.Namespace) -> list[list[int]]:
    """Of all categories in turn."""
    found = tokenize(load_prompts(options.prompts), router.pool.tokenizer, _LONGEST)
    longest = max(map(len, found.values()))
    turns = [texts[i % len(texts)] for i in range(longest) for texts in found.values()]
    return [list(prompt.token_ids) for prompt in turns]


def _round(
    router: ChainRouter,
    chain: Chain,
    prompts: Sequence[list[int]],
    batch: int,
    number: int,
    options: argparse.Namespace,
) -> list[Gain]:
    """Requests that go on and on, through all ways in turn."""
    ways = [
        Way(depth, nodes)
        for depth in options.depths
        for nodes in sorted({max(1, round(share * batch)) for share in options.shares})
        if nodes <= depth * options.width * batch
    ]
    times = {}
    for way in ways:
        chosen = [prompts[(number * batch + i) % len(prompts)] for i in range(batch)]
        with _decoding(router, chosen, number, options):
            times[way] = _spent(router, chain, way, batch, options)
    context = _LONGEST + options.cycles
    bare = BareForwards(router)
    alone_ms = bare.ms(chain[-1], batch, batch, context)
    gains = []
    for way, time_ in times.items():
        tokens = time_.committed_tokens / time_.target_passes
        pass_ms = bare.ms(chain[-1], batch + way.nodes, batch, context)
        drafts_ms = sum(
            forwards / time_.cycles * bare.ms(name, pack, batch, context)
            for name in chain[:-1]
            for forwards in (time_.forwards[name],)
            for pack in (time_.pack_tokens[name] / forwards,)
        )
        free, drafted = (tokens * alone_ms / ms for ms in (pass_ms, pass_ms + drafts_ms))
        gains.append(Gain(way, tokens, free, drafted))
    return gains


@contextmanager
def _decoding(
    router: ChainRouter, prompts: Sequence[list[int]], seed: int, options: argparse.Namespace
) -> Iterator[None]:
    """Requests whose prompts have been read, and that do not end."""
    endless = router.limits.max_tokens - _LONGEST
    handles = [
        router.submit(
            prompt,
            SamplingParams(
                max_new_tokens=endless,
                temperature=options.temperature,
                seed=seed + i,
                ignore_eos=True,
            ),
        )
        for i, prompt in enumerate(prompts)
    ]
    try:
        for handle in handles:
            next(iter(handle))
        yield
        if any(handle.is_done for handle in handles):
            raise SystemExit(
                "requests ended too soon: fewer --cycles fit this pool's max_model_len"
            )
    finally:
        router.set_policy("target-only")
        for handle in handles:
            handle.cancel()
        for handle in handles:
            handle.result()


def _spent(
    router: ChainRouter, chain: Chain, way: Way, batch: int, options: argparse.Namespace
) -> EngineStatistics:
    trees = {"selection": "global-greedy", "budget_tokens": batch + way.nodes}
    router.set_policy("static", trees, chain=chain, depth=way.depth, width=options.width)
    begin = router.instruments.statistics().cycles + options.warm_up  # drafters read the texts
    before = _statistics(router, begin)
    after = _statistics(router, before.cycles + options.cycles)
    return EngineStatistics(
        cycles=after.cycles - before.cycles,
        committed_tokens=after.committed_tokens - before.committed_tokens,
        target_passes=after.target_passes - before.target_passes,
        forwards=Counter(after.forwards) - Counter(before.forwards),
        pack_tokens=Counter(after.pack_tokens) - Counter(before.pack_tokens),
    )


def _statistics(router: ChainRouter, cycles: int) -> Any:
    """Once there have been so many cycles."""
    while (found := router.instruments.statistics()).cycles < cycles:
        if not router.is_healthy:
            raise SystemExit(f"the engine has stopped: {router.failure}")
        time.sleep(_POLL_S)
    return found


def _row(batch: int, rounds: Sequence[Sequence[Gain]]) -> dict[str, Any]:
    """Medians over the rounds, of the ways that gain most."""
    by_way: dict[Way, list[Gain]] = defaultdict(list)
    for gains in rounds:
        for gain in gains:
            by_way[gain.way].append(gain)
    ways = []
    for way, gains in by_way.items():
        tokens, free, drafted = (
            statistics.median(getattr(gain, name) for gain in gains)
            for name in ("tokens", "free", "drafted")
        )
        ways.append(Gain(way, tokens, free, drafted))
    of_free, of_drafted = max(ways, key=lambda g: g.free), max(ways, key=lambda g: g.drafted)
    return {
        "batch": batch,
        "free": round(max(1.0, of_free.free), 3),
        "free_way": asdict(of_free.way),
        "drafted": round(max(1.0, of_drafted.drafted), 3),
        "drafted_way": asdict(of_drafted.way),
        "ways": [{k: v if k == "way" else round(v, 3) for k, v in asdict(g).items()} for g in ways],
    }


def _line(row: dict[str, Any]) -> str:
    def way(name: str) -> str:
        found = row[f"{name}_way"]
        return f"depth {found['depth']}, {found['nodes']} nodes"

    return (
        f"batch {row['batch']:>3}: {row['free']:.2f} x if drafts are free ({way('free')}), "
        f"{row['drafted']:.2f} x with drafters' forwards ({way('drafted')})"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--config", type=Path, default=default_config())
    parser.add_argument("--prompts", type=Path, nargs="*", default=[])
    parser.add_argument("--chain", nargs="*", help="left out, the smallest drafter and the target")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--width", type=int, default=3)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5, 1, 2, 3, 4, 6])
    parser.add_argument("--cycles", type=int, default=32, help="for each depth and budget")
    parser.add_argument("--warm-up", type=int, default=3, help="cycles before they count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=1.0)
    return parser


if __name__ == "__main__":
    main()
