"""One set of requests under every row of the covering array, per dtype.

Contract: in float64 no token may differ from the oracle. In float32 a difference is allowed only
where the oracle itself hardly decides (margin below 1e-4), and at most once in 100,000 tokens.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from specrouter import ChainRouter, SamplingParams
from tests.exact.arguments import Options, load_token_prompts, open_oracle, open_router
from tests.exact.arrangement import BATCHES, covering_array, modes_of
from tests.exact.comparison import (
    Case,
    Comparison,
    Divergence,
    all_divergences,
    assert_whole,
    compare,
)
from tests.exact.oracle import Oracle
from tests.exact.report import Progress, finish

DTYPES = ("float64", "float32")
HONEST_MARGIN = 1e-4
TOKENS_PER_DIFFERENCE = 100_000
_SHOWN = 5  # examples of differences in the report

ParamsOf = Callable[[int], SamplingParams]  # of the request's index


def run_array_check(check: str, options: Options, params_of: ParamsOf) -> int:
    """Runs, prints the figures, returns the exit code."""
    started = time.monotonic()
    figures = {dtype: _run_dtype(check, options, params_of, dtype) for dtype in options.dtypes}
    passed = all(figure["passed"] for figure in figures.values())
    return finish(check, passed, started, {"dtypes": figures})


def make_cases(
    oracle: Oracle, prompts: Sequence[tuple[int, ...]], params_of: ParamsOf
) -> list[Case]:
    """Each prompt with its parameters and its reference."""
    settings = [params_of(index) for index in range(len(prompts))]
    return [
        Case(prompt, params, oracle.tokens(prompt, params))
        for prompt, params in zip(prompts, settings, strict=True)
    ]


def difference_margin(oracle: Oracle, difference: Divergence) -> float:
    """How nearly the oracle would have chosen what was given; infinite for a wrong length."""
    if difference.expected is None or difference.got is None:
        return float("inf")
    case = difference.case
    choice = oracle.choice_after(case.prompt, difference.prefix, case.params)
    return choice.margin(difference.got)


def is_honest(dtype: str, tokens: int, margins: Sequence[float]) -> bool:
    """Whether these differences are what `dtype` excuses."""
    if dtype == "float64":
        return not margins
    allowed = tokens // TOKENS_PER_DIFFERENCE
    return len(margins) <= allowed and all(margin < HONEST_MARGIN for margin in margins)


def _run_dtype(check: str, options: Options, params_of: ParamsOf, dtype: str) -> dict[str, Any]:
    with open_router(options.config, dtype, max(BATCHES)) as router:
        oracle = open_oracle(router, dtype)
        began = time.monotonic()
        cases = make_cases(oracle, load_token_prompts(router, options), params_of)
        oracle_s = time.monotonic() - began
        comparisons = _serve_all(check, router, cases, dtype)
        assert_whole(router)
    differences = all_divergences(comparisons)
    margins = [difference_margin(oracle, difference) for difference in differences]
    tokens = sum(comparison.tokens for comparison in comparisons)
    return {
        "passed": is_honest(dtype, tokens, margins),
        "arrangements": len(comparisons),
        "requests": len(cases),
        "tokens": tokens,
        "differences": len(differences),
        "largest_margin": max(margins, default=0.0),
        "ended_by_eos": sum(_ended_early(case) for case in cases),
        "cycles": sum(comparison.cycles for comparison in comparisons),
        "speculated_cycles": sum(comparison.speculated for comparison in comparisons),
        "examples": [_describe(d, m) for d, m in zip(differences, margins, strict=True)][:_SHOWN],
        "oracle_seconds": round(oracle_s, 1),
    }


def _serve_all(
    check: str, router: ChainRouter, cases: Sequence[Case], dtype: str
) -> list[Comparison]:
    rows = covering_array(modes_of(router))
    progress = Progress(f"{check} {dtype}", len(rows) * len(cases))
    comparisons = list[Comparison]()
    for row in rows:
        comparisons.append(compare(router, cases, row, progress))
        progress.note = f"{len(all_divergences(comparisons))} differ, last {row}"
    return comparisons


def _ended_early(case: Case) -> bool:
    return len(case.reference) < case.params.max_new_tokens


def _describe(difference: Divergence, margin: float) -> dict[str, object]:
    return {
        "arrangement": str(difference.arrangement),
        "prompt_tokens": len(difference.case.prompt),
        "position": difference.position,
        "expected": difference.expected,
        "got": difference.got,
        "margin": margin,
        "params": str(difference.case.params),
    }
