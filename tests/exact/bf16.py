"""bfloat16: how often a served token differs from target-only decoding of the request alone.

The reference of a request is its own output with speculation off and nobody beside it. Then every
chain serves the same requests, at batch 1 with wide trees and at 16 with narrow ones. After a
difference the request goes on from its reference, so the figure is first divergences per teacher-
forced token.
"""

import itertools
import sys
import time
from collections.abc import Sequence
from typing import Any

from specrouter import ChainRouter, SamplingParams
from tests.exact.arguments import Options, load_token_prompts, make_parser, open_router, parse
from tests.exact.arrangement import Arrangement, modes_of
from tests.exact.comparison import (
    Case,
    Comparison,
    all_divergences,
    assert_whole,
    compare,
    resume,
)
from tests.exact.report import Progress, finish

DTYPE = "bfloat16"
ALONE = Arrangement("off", batch=1)
BATCHES = (1, 16)
DEPTH = 4
WIDTHS = {1: 4, 16: 1}  # by batch: wide trees are for few requests
ALLOWED_RATE = 1 / 2000
LEAST_TOKENS = 20_000


def main(arguments: list[str] | None = None) -> int:
    options = parse(make_parser(__doc__), arguments)
    started = time.monotonic()
    with open_router(options.config, DTYPE, max(BATCHES)) as router:
        cases = _make_cases(router, options)
        comparisons = _serve_all(router, cases)
        assert_whole(router)
    tokens = sum(comparison.tokens for _, comparison in comparisons)
    divergences = all_divergences(comparison for _, comparison in comparisons)
    figures: dict[str, Any] = {
        "tokens": tokens,
        "divergences": len(divergences),
        "rate": len(divergences) / tokens,
        "allowed_rate": ALLOWED_RATE,
        "by_batch": {batch: _totals(comparisons, batch) for batch in BATCHES},
        "by_arrangement": {str(row): _figures(result) for row, result in comparisons},
    }
    passed = tokens >= LEAST_TOKENS and figures["rate"] <= ALLOWED_RATE
    return finish("bf16", passed, started, figures)


def _make_cases(router: ChainRouter, options: Options) -> list[Case]:
    """Greedy and sampled requests in turn, each with its output alone."""
    cases = list[Case]()
    prompts = load_token_prompts(router, options)
    progress = Progress("bf16 alone", len(prompts))
    for index, prompt in enumerate(prompts):
        params = SamplingParams(
            max_new_tokens=options.new_tokens,
            temperature=float(index % 2),
            seed=index,
            ignore_eos=True,
        )
        alone = resume(router, Case(prompt, params, ()), (), ALONE)
        cases.append(Case(prompt, params, tuple(alone.token_ids)))
        progress()
    return cases


def _serve_all(router: ChainRouter, cases: Sequence[Case]) -> list[tuple[Arrangement, Comparison]]:
    rows = [
        Arrangement(mode, batch)
        if isinstance(mode, str)
        else Arrangement(mode, batch, DEPTH, WIDTHS[batch])
        for mode, batch in itertools.product(modes_of(router), BATCHES)
    ]
    progress = Progress("bf16", len(rows) * len(cases))
    results = list[tuple[Arrangement, Comparison]]()
    for row in rows:
        results.append((row, compare(router, cases, row, progress)))
        progress.note = f"{len(all_divergences(c for _, c in results))} differ, last {row}"
    return results


def _totals(comparisons: Sequence[tuple[Arrangement, Comparison]], batch: int) -> dict[str, int]:
    counts = [_figures(comparison) for row, comparison in comparisons if row.batch == batch]
    return {key: sum(count[key] for count in counts) for key in ("tokens", "divergences")}


def _figures(comparison: Comparison) -> dict[str, int]:
    return {"tokens": comparison.tokens, "divergences": len(comparison.divergences)}


if __name__ == "__main__":
    sys.exit(main())
