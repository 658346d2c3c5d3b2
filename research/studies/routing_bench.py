"""Bench: one router under one policy after another, on prompts of several kinds of text."""

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from research.bench.tuning import Shape, grid, tune
from specrouter import ChainRouter, RequestOutput, SamplingParams
from specrouter.bench.prompts import load_prompts, tokenize
from specrouter.request.params import Chain
from specrouter.routing.scheduler import candidate_chains

_LONGEST_PROMPT = 200  # tokens


@dataclass(frozen=True)
class Texts:
    """Prompts as token ids, by category, and where the next comes from."""

    by_category: dict[str, list[list[int]]]

    def take(self, category: str, first: int, count: int) -> list[list[int]]:
        found = self.by_category[category]
        return [found[(first + i) % len(found)] for i in range(count)]

    def mixed(self, first: int, count: int) -> list[list[int]]:
        names = list(self.by_category)
        return [
            self.take(names[i % len(names)], first + i // len(names), 1)[0] for i in range(count)
        ]


@dataclass(frozen=True)
class Run:
    tokens_per_s: float
    tpot_ms: float
    texts: list[list[int]]
    chains: Counter[str]  # cycles of each


def progress(text: str) -> None:
    print(f"\r{text:78}", end="", file=sys.stderr, flush=True)


class Bench:
    """One router, whose policy changes from run to run."""

    def __init__(self, router: ChainRouter, options: argparse.Namespace) -> None:
        self.router, self.options = router, options
        texts = load_prompts([Path(name) for name in options.prompts])
        found = tokenize(texts, router.pool.tokenizer, _LONGEST_PROMPT)
        self.texts = Texts(
            {name: [list(p.token_ids) for p in each] for name, each in found.items()}
        )

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        seed: int,
        policy: str = "adaptive",
        learn: bool | None = None,
        new_tokens: int | None = None,
        **settings: Any,
    ) -> Run:
        """`learn`: by default only adaptive runs teach the scheduler."""
        router = self.router
        router.set_policy(policy, **settings)
        router.instruments.set_learning(policy == "adaptive" if learn is None else learn)
        params = [
            SamplingParams(
                max_new_tokens=new_tokens or self.options.new_tokens,
                temperature=self.options.temperature,
                seed=seed + i,
                ignore_eos=True,
            )
            for i in range(len(prompts))
        ]
        started = time.perf_counter()
        outputs: list[RequestOutput] = router.generate(list(prompts), params)
        seconds = time.perf_counter() - started
        tokens = sum(output.metrics.output_tokens for output in outputs)
        tpot_ms = statistics.mean(output.metrics.tpot_ms or 0.0 for output in outputs)
        chains: Counter[str] = Counter()
        for output in outputs:
            chains.update({">".join(c): count for c, count in output.metrics.chains.items()})
        return Run(tokens / seconds, tpot_ms, [output.token_ids for output in outputs], chains)

    @property
    def chains(self) -> list[Chain]:
        pool = self.router.pool
        sizes = {name: pool.parameter_count(name) for name in pool.names}
        found = candidate_chains(pool.names, sizes, pool.target)
        return [chain for chain in found if len(chain) > 1]

    def sweep(self, chains: Sequence[Chain], category: str | None, batch: int) -> dict[Chain, Any]:
        """Each chain's best depth and width, by successive halving."""
        shapes = grid(self.options.depths, self.options.widths)

        def measure(chain: Chain, shape: Shape, rung: int) -> tuple[int, float]:
            progress(f"sweep, rung {rung}: {'>'.join(chain)} {shape}")
            texts = self.texts
            prompts = texts.take(category, 0, batch) if category else texts.mixed(0, batch)
            new = 16 * 2**rung
            static = {"chain": chain, "depth": shape.depth, "width": shape.width}
            run = self.run(prompts, 7, "static", learn=False, new_tokens=new, **static)
            return batch * new, batch * new / run.tokens_per_s

        return dict(tune(list(chains), shapes, measure))


def open_bench(options: argparse.Namespace, config: Any = None) -> Bench:
    return Bench(ChainRouter.from_config(config or options.config), options)
