"""bfloat16, float32: how often a served token differs from decoding the request alone.

In these dtypes sums may be rounded otherwise beside other rows, and a text parts where two tokens
are nearly as good. The reference of a request is its own output with speculation off and nobody
beside it. Then the same requests are served beside others and through chains, at batch 1 and 16,
with trees of width 1 and 3. After a difference the request goes on from its reference, so the
figure is first divergences per teacher-forced token. With a target in int8 none is allowed: its
sums do not round.
"""

import itertools
import sys
import time
from collections.abc import Sequence
from typing import Any

from checks.exact.arguments import Options, load_token_prompts, open_router, parse
from checks.exact.arrangement import Arrangement, Mode
from checks.exact.array_check import serve_all, turns_of
from checks.exact.comparison import Case, Comparison, own_case
from checks.exact.report import Progress, finish
from modelpool.config import Weights
from specrouter import ChainRouter, SamplingParams
from test_support.routers import assert_whole

BATCHES = (1, 16)
DEPTH = 4
WIDTHS = (1, 3)
ALLOWED_RATES = {  # by dtype and width
    "bfloat16": {1: 1 / 2000, 3: 1 / 500},
    "float32": {1: 1 / 20_000, 3: 1 / 20_000},
}


def main(arguments: list[str] | None = None) -> int:
    options = parse(__doc__, arguments, tuple(ALLOWED_RATES))
    started = time.monotonic()
    kinds = list(itertools.product(options.dtypes, options.weights))
    figures = {_label(*kind): _check(options, *kind) for kind in kinds}
    passed = all(
        figures[_label(*kind)]["by_width"][width]["rate"] <= _allowed(*kind, width)
        for kind in kinds
        for width in WIDTHS
    )
    return finish("rounding", passed, started, {**figures, "allowed_rates": ALLOWED_RATES})


def _label(dtype: str, weights: Weights) -> str:
    return dtype if weights == "auto" else f"{dtype}, weights {weights}"


def _allowed(dtype: str, weights: Weights, width: int) -> float:
    return ALLOWED_RATES[dtype][width] if weights == "auto" else 0.0


def _check(options: Options, dtype: str, weights: Weights) -> dict[str, Any]:
    with open_router(options.config, dtype, max(BATCHES), weights) as router:
        cases = _make_cases(router, options)
        comparisons = _serve_all(router, cases, options.lone_share)
        assert_whole(router)
    return {
        "by_width": {width: _totals(comparisons, width) for width in WIDTHS},
        "by_arrangement": {str(one.arrangement): _figures(one) for one in comparisons},
    }


def _make_cases(router: ChainRouter, options: Options) -> list[Case]:
    """Greedy and sampled requests in turn, each with its output alone."""
    cases = list[Case]()
    prompts = load_token_prompts(router, options)
    progress = Progress("rounding, alone", len(prompts))
    for index, prompt in enumerate(prompts):
        params = SamplingParams(
            max_new_tokens=options.new_tokens,
            temperature=float(index % 2),
            seed=index,
            ignore_eos=True,
        )
        cases.append(own_case(router, prompt, params))
        progress()
    return cases


def _serve_all(router: ChainRouter, cases: Sequence[Case], lone_share: int) -> list[Comparison]:
    """Off beside others, then the weakest, the strongest and the longest chain of models."""
    pool = router.pool
    drafters = [n for n in pool.names if n != pool.target and n in pool.models]
    weakest, strongest = drafters[0], drafters[-1]
    modes: list[Mode] = [(weakest, pool.target), (strongest, pool.target)]
    modes += [(weakest, strongest, pool.target)] if weakest != strongest else []
    rows = [Arrangement(mode="off", batch=max(BATCHES))] + [
        Arrangement(mode=mode, batch=batch, depth=DEPTH, width=width)
        for mode in modes
        for width in WIDTHS
        for batch in BATCHES
    ]
    turns = turns_of(len(cases), rows, lone_share)
    return serve_all(router, cases, rows, Progress("rounding", sum(map(len, turns))), turns)


def _totals(comparisons: Sequence[Comparison], width: int) -> dict[str, float]:
    counts = [_figures(one) for one in comparisons if (one.arrangement.width or 1) == width]
    total = {key: sum(count[key] for count in counts) for key in ("tokens", "divergences")}
    return {**total, "rate": total["divergences"] / max(1, total["tokens"])}


def _figures(comparison: Comparison) -> dict[str, int]:
    return {"tokens": comparison.tokens, "divergences": len(comparison.divergences)}


if __name__ == "__main__":
    sys.exit(main())
