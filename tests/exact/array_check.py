"""One set of requests under every row of the covering array, per dtype.

Contract: in float64 no token may differ from the oracle. In float32 a difference is allowed only
where the oracle itself hardly decides (margin below 1e-4), and at most once in 100,000 tokens.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from specrouter import ChainRouter, SamplingParams
from tests.exact.arguments import Options, load_token_prompts, open_oracle, open_router
from tests.exact.arrangement import Arrangement, Mode, modes_of, policies_of
from tests.exact.comparison import (
    Case,
    Comparison,
    Divergence,
    Route,
    all_divergences,
    assert_whole,
    compare,
)
from tests.exact.covering_array import BATCHES, covering_array
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
        rows = covering_array([*modes_of(router), *policies_of(router)])
        over_masks = [row for row in rows if row.attention == "sdpa"]
        over_paths = [row for row in rows if row.attention == "path"]
        few = cases[:: options.reference_share]
        served = len(over_masks) * len(cases) + len(over_paths) * len(few)
        progress = Progress(f"{check} {dtype}", served)
        comparisons = serve_all(router, cases, over_masks, progress)
        assert_whole(router)
    with open_router(options.config, dtype, max(BATCHES), "path") as router:
        comparisons += serve_all(router, few, over_paths, progress)
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
        "cached_tokens": sum(comparison.cached for comparison in comparisons),
        "tokens_over_paths": sum(
            one.tokens for one in comparisons if one.arrangement.attention == "path"
        ),
        "coverage": coverage(comparisons),
        "examples": [_describe(d, m) for d, m in zip(differences, margins, strict=True)][:_SHOWN],
        "oracle_seconds": round(oracle_s, 1),
    }


def serve_all(
    router: ChainRouter, cases: Sequence[Case], rows: Sequence[Arrangement], progress: Progress
) -> list[Comparison]:
    """The cases under every row."""
    comparisons = list[Comparison]()
    for row in rows:
        comparisons.append(compare(router, cases, row, progress))
        progress.note = f"{len(all_divergences(comparisons))} differ, last {row}"
    return comparisons


def coverage(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """What was served how: by policy, by what was set of its trees, and what policies decided."""
    by_mode: dict[str, Counter[str]] = {}
    by_trees: dict[str, Counter[str]] = {}
    decided = set[Route]()
    for each in comparisons:
        figures = {"tokens": each.tokens, "cycles": each.cycles, "speculated": each.speculated}
        for count in (
            by_mode.setdefault(_label(each.arrangement.mode), Counter()),
            *(
                by_trees.setdefault(f"{name} {value}", Counter())
                for name, value in each.arrangement.trees
            ),
        ):
            count.update({"arrangements": 1, **figures})
        decided |= each.decided
    return {
        "by_mode": {mode: dict(count) for mode, count in by_mode.items()},
        "by_trees": {trees: dict(count) for trees, count in sorted(by_trees.items())},
        "with_objectives": _objectives(comparisons),
        "routes_decided": len(decided),
    }


def _objectives(comparisons: Sequence[Comparison]) -> dict[str, int]:
    """Requests with an objective: in how many arrangements, and what became of them."""
    arrangements = sum(each.arrangement.urgent for each in comparisons)
    attained = sum(each.attained[0] for each in comparisons)
    missed = sum(each.attained[1] for each in comparisons)
    return {"arrangements": arrangements, "attained": attained, "missed": missed}


def _label(mode: Mode) -> str:
    """Chains that are asked for by name count by their length."""
    return f"chains of {len(mode)}" if isinstance(mode, tuple) else str(mode)


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
