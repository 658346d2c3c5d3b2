"""What the outcomes of a replay say: attainment, goodput, latencies; all and by category.

Contract: pure. An error counts as a violation of the objective that the request had. Goodput is
tokens of requests that attained theirs over the time from the first submission to the last end;
what had no objective is in no attainment and in no goodput, but in the throughput.
Source: AdaServe, section 6.1.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from specrouter.bench.replay import Outcome
from specrouter.bench.sample import mean_of_known

_PERCENTILES = (50, 95, 99)


def figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Of one run, as JSON has them, with those `by_category`; there must be an outcome."""
    duration_s = max(o.end_s for o in outcomes) - min(o.sent_s for o in outcomes)
    categories = sorted({o.request.category for o in outcomes})
    late_s = (o.sent_s - o.request.at_s for o in outcomes)
    return {
        **_of_group(outcomes, duration_s),
        "duration_s": duration_s,
        "latest_ms": max(late_s) * 1000,
        "by_category": {
            category: _of_group([o for o in outcomes if o.request.category == category], duration_s)
            for category in categories
        },
    }


def medians(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of every figure over rounds; None where no round has it."""
    result: dict[str, Any] = {}
    for name, first in rounds[0].items():
        values = [one[name] for one in rounds if one[name] is not None]
        result[name] = medians(values) if isinstance(first, Mapping) else _median(values)
    return result


def _of_group(outcomes: Sequence[Outcome], duration_s: float) -> dict[str, Any]:
    judged = [o for o in outcomes if o.is_attained is not None]
    attained = [o for o in judged if o.is_attained]
    return {
        "requests": len(outcomes),
        "objective_ms": _median([o.request.objective_ms for o in outcomes]),
        "errors": sum(o.answer.error is not None for o in outcomes),
        "violations": len(judged) - len(attained),
        "attainment": len(attained) / len(judged) if judged else None,
        "goodput_tokens_per_s": _per_s(sum(o.answer.tokens for o in attained), duration_s),
        "tokens_per_s": _per_s(sum(o.answer.tokens for o in outcomes), duration_s),
        "requests_per_s": _per_s(sum(o.answer.error is None for o in outcomes), duration_s),
        "ttft_ms": _percentiles([o.answer.ttft_ms for o in outcomes]),
        "tpot_ms": _percentiles([o.answer.tpot_ms for o in outcomes]),
        "mean_tpot_ms": mean_of_known(o.answer.tpot_ms for o in outcomes),
        "e2e_ms": _percentiles([o.answer.e2e_ms for o in outcomes]),
        # Little's law: those that wait for a row are in.
        "mean_running": _per_s(sum(o.end_s - o.sent_s for o in outcomes), duration_s),
        "acceptance_length": mean_of_known(o.answer.acceptance_length for o in outcomes),
    }


def _percentiles(values: Sequence[float | None]) -> dict[str, float | None]:
    known = [value for value in values if value is not None]
    return {f"p{p}": float(np.percentile(known, p)) if known else None for p in _PERCENTILES}


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _per_s(amount: float, duration_s: float) -> float:
    return amount / duration_s if duration_s > 0 else 0.0
