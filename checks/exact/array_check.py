"""One set of requests under every row of the covering array, per dtype.

    python -m checks.exact.array_check greedy|seeded [OPTIONS]

`greedy`: the references of plain requests come from `generate`; as many have penalties, biases,
bans and least lengths, and theirs are decoded step by step. `seeded`: every request has other
sampling parameters than its neighbours. A quarter of all have structures (`test_support.params`).

Contract: in float64 no token may differ from the oracle. In float32 a difference is allowed only
where the oracle itself hardly decides (margin below 1e-4), and at most once in 100,000 tokens. What
a quantised target says is compared with what it says alone, and no token may differ: in bfloat16
neither, which such a target alone is checked in.
"""

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from checks.exact.arguments import Options, load_token_prompts, open_oracle, open_router, parse
from checks.exact.arrangement import Arrangement, modes_of, policies_of
from checks.exact.comparison import Case, Comparison, Divergence, all_divergences, compare, own_case
from checks.exact.covering_array import BATCHES, covering_array
from checks.exact.oracle import Oracle
from checks.exact.report import Progress, finish
from modelpool.config import Weights
from specrouter import ChainRouter, SamplingParams
from test_support.params import greedy_params, seeded_params
from test_support.routers import assert_whole

DTYPES = ("float64", "float32")
HONEST_MARGIN = 1e-4
TOKENS_PER_DIFFERENCE = 100_000
_SHOWN = 5  # examples of differences in the report

ParamsOf = Callable[[int], SamplingParams]  # of the request's index


def main(arguments: list[str] | None = None) -> int:
    check, *others = sys.argv[1:] if arguments is None else arguments
    if check not in ("greedy", "seeded"):
        raise SystemExit(f"{check} is none of greedy, seeded")
    options = parse(__doc__, others, DTYPES)
    params = greedy_params if check == "greedy" else seeded_params

    def params_of(index: int) -> SamplingParams:
        return params(index, options.new_tokens)

    if "bfloat16" in options.dtypes and "auto" in options.weights:
        raise SystemExit("--dtypes bfloat16 goes with --weights int8 or int4: other sums round")
    started = time.monotonic()
    figures = {dtype: _run_dtype(check, options, params_of, dtype) for dtype in options.dtypes}
    passed = all(figure["passed"] for figure in figures.values())
    return finish(check, passed, started, {"dtypes": figures})


def make_cases(
    oracle: Oracle, prompts: Sequence[tuple[int, ...]], params_of: ParamsOf
) -> list[Case]:
    """Each prompt with its parameters and its reference."""
    cases = list[Case]()
    for index, prompt in enumerate(prompts):
        params = params_of(index)
        cases.append(Case(prompt, params, oracle.tokens(prompt, params)))
    return cases


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


@dataclass(frozen=True)
class _Part:
    """What was served with one kind of weights. `margins`: of its differences."""

    cases: Sequence[Case]
    comparisons: Sequence[Comparison]
    margins: Sequence[float]
    oracle_s: float


def _run_dtype(check: str, options: Options, params_of: ParamsOf, dtype: str) -> dict[str, Any]:
    parts = [_run_part(check, options, params_of, dtype, kept) for kept in options.weights]
    comparisons = [comparison for part in parts for comparison in part.comparisons]
    differences = all_divergences(comparisons)
    margins = [margin for part in parts for margin in part.margins]
    tokens = sum(comparison.tokens for comparison in comparisons)
    return {
        "passed": is_honest(dtype, tokens, margins),
        "arrangements": len(comparisons),
        "requests": len(parts[0].cases),
        "tokens": tokens,
        "tokens_quantised": sum(c.tokens for c in comparisons if c.arrangement.weights != "auto"),
        "differences": len(differences),
        "largest_margin": max(margins, default=0.0),
        "ended_by_eos": sum(_ended_early(case) for part in parts for case in part.cases),
        "cycles": sum(comparison.cycles for comparison in comparisons),
        "speculated_cycles": sum(comparison.speculated for comparison in comparisons),
        "cached_tokens": sum(comparison.cached for comparison in comparisons),
        "objectives_attained": sum(each.attained[0] for each in comparisons),
        "objectives_missed": sum(each.attained[1] for each in comparisons),
        "examples": [_describe(d, m) for d, m in zip(differences, margins, strict=True)][:_SHOWN],
        "oracle_seconds": round(sum(part.oracle_s for part in parts), 1),
    }


def _run_part(
    check: str, options: Options, params_of: ParamsOf, dtype: str, weights: Weights
) -> _Part:
    """The rows of the covering array with such weights; quantised, the references are its own."""
    with open_router(options.config, dtype, max(BATCHES), weights) as router:
        began = time.monotonic()
        prompts = load_token_prompts(router, options)
        oracle = open_oracle(router, dtype) if weights == "auto" else None
        if oracle is None:
            cases = [own_case(router, prompt, params_of(i)) for i, prompt in enumerate(prompts)]
        else:
            cases = make_cases(oracle, prompts, params_of)
        oracle_s = time.monotonic() - began
        every = covering_array([*modes_of(router), *policies_of(router)], weights=options.weights)
        rows = [row for row in every if row.weights == weights]
        turns = turns_of(len(cases), rows, options.lone_share)
        progress = Progress(f"{check} {dtype} {weights}", sum(map(len, turns)))
        comparisons = serve_all(router, cases, rows, progress, turns)
        assert_whole(router)
    margins = [
        float("inf") if oracle is None else difference_margin(oracle, difference)
        for difference in all_divergences(comparisons)
    ]
    return _Part(cases, comparisons, margins, oracle_s)


def turns_of(count: int, rows: Sequence[Arrangement], lone_share: int = 1) -> list[range]:
    """The cases that each row serves. Where requests are alone it is one of so many, the next ones
    in the next such row: a token costs several times what it costs in a batch."""
    lone = itertools.count()
    return [
        range(count)
        if row.batch > 1
        else range(next(lone) % min(lone_share, count), count, lone_share)
        for row in rows
    ]


def serve_all(
    router: ChainRouter,
    cases: Sequence[Case],
    rows: Sequence[Arrangement],
    progress: Progress,
    turns: Iterable[Sequence[int] | None] = itertools.repeat(None),
) -> list[Comparison]:
    """The cases under every row, or of each row's turn those alone."""
    comparisons = list[Comparison]()
    for row, which in zip(rows, turns, strict=False):
        comparisons.append(compare(router, cases, row, progress, which))
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


if __name__ == "__main__":
    sys.exit(main())
