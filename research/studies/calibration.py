"""How true the probabilities are that trees are selected by, and what re-scoring brings.

    python -m research.studies.calibration [--config FILE] [--prompts FILE ...]

For each category of prompts, from a cold start: the expected calibration error and the Brier score
of a drafter's nodes, against the Brier score of knowing only how many are accepted (the base rate),
over the last 2,000 nodes whose parent was accepted. Then the same nodes re-scored by an
intermediate, and at equal budgets what both chains gain: accepted tokens per verified node, and
tokens per second. The last line is one JSON document.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modelpool import ModelPool
from research.studies.routing_bench import Bench, Texts, open_bench
from specrouter.bench.prompts import load_prompts
from specrouter.cli.arguments import default_config
from specrouter.config import RouterConfig
from specrouter.request.params import Chain

_FADED = 2000.0  # nodes, that the figures are taken over


def main() -> None:
    options = _parser().parse_args()
    chains = _chains(ModelPool(RouterConfig.load(options.config).pool))
    found = [row for chain in chains for row in _calibrations(chain, options)]
    budgets = _budgets(chains, options)
    print(json.dumps({"calibration": found, "budgets": budgets}))


def _chains(pool: ModelPool) -> list[Chain]:
    """The smallest drafter with the target, and with the largest intermediate between them."""
    *drafters, target = pool.models
    if not drafters:
        raise SystemExit("the pool has no drafter with weights")
    smallest, *between = drafters
    return [(smallest, target), *([(smallest, between[-1], target)] if between else [])]


def _calibrations(chain: Chain, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for category in load_prompts(options.prompts):
        bench = open_bench(options)
        with bench.router as router:
            judged, before, turn = 0.0, 0.0, 0
            while judged < options.nodes or turn < options.turns:
                texts = bench.texts.take(category, turn * options.batch, options.batch)
                _generate(bench, texts, turn, chain)
                turn += 1
                trees = router.instruments.performance().trees
                figures = trees[chain[:-1], chain[-1], options.temperature > 0].calibration
                judged += _added(before, figures.nodes)
                before = figures.nodes
        gain = 1.0 - figures.brier / figures.base_brier
        rows.append(
            {
                "chain": list(chain),
                "category": category,
                "nodes": round(figures.nodes),
                "expected_error": round(figures.expected_error, 4),
                "brier": round(figures.brier, 4),
                "base_brier": round(figures.base_brier, 4),
                "below_base": round(gain, 4),
            }
        )
        print(
            f"{'>'.join(chain):40s} {category:12s} ECE {figures.expected_error:.3f}  "
            f"Brier {figures.brier:.3f}, {gain:.0%} below the base rate's",
            flush=True,
        )
    return rows


def _added(before: float, after: float) -> float:
    """Nodes that a turn added at least, from those that had not faded before it and after it.

    A node that is added takes `nodes / _FADED` of those that are there, more and more of them.
    """
    return (after - before) / max(1.0 - before / _FADED, 1e-12)


def _budgets(chains: Sequence[Chain], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Both chains at equal budgets, in turn."""
    rows = []
    bench = open_bench(options)
    few = Texts({"": [ids for each in bench.texts.by_category.values() for ids in each[:8]]})
    with bench.router as router:
        for nodes in options.budgets:
            for chain in chains:
                selected: dict[str, Any] = {"trees": {"selection": "global-greedy"}, "nodes": nodes}
                _generate(bench, few.take("", 0, options.batch), 0, chain, **selected)  # warm
                before, started = router.instruments.statistics(), time.perf_counter()
                for turn in range(options.turns):
                    texts = few.take("", turn * options.batch, options.batch)
                    _generate(bench, texts, turn, chain, **selected)
                after, seconds = router.instruments.statistics(), time.perf_counter() - started
                passes = after.target_passes - before.target_passes
                tokens = after.committed_tokens - before.committed_tokens
                gained = (tokens - passes) / (passes * nodes)
                rows.append(
                    {
                        "chain": list(chain),
                        "nodes": nodes,
                        "accepted_per_verified": round(gained, 4),
                        "tokens_per_s": round(tokens / seconds, 2),
                    }
                )
                print(
                    f"{'>'.join(chain):40s} {nodes} nodes a request: {gained:.3f} accepted per "
                    f"verified, {tokens / seconds:.1f} tokens/s",
                    flush=True,
                )
    return rows


def _generate(
    bench: Bench, texts: list[list[int]], turn: int, chain: Chain, **settings: Any
) -> None:
    shape = {"depth": bench.options.depth, "width": bench.options.width}
    bench.run(texts, 1000 * turn, "static", learn=True, chain=chain, **shape, **settings)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--config", type=Path, default=default_config())
    parser.add_argument("--prompts", type=Path, nargs="*", default=[])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--width", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--nodes", type=int, default=4000, help="judged at least, per category")
    parser.add_argument("--turns", type=int, default=4, help="batches at least")
    parser.add_argument("--budgets", type=int, nargs="*", default=[2, 4, 6])
    return parser


if __name__ == "__main__":
    main()
