"""Figures from samples: medians over rounds of ratios within a round. Pure functions.

The speed of a shared machine drifts from minute to minute. Contenders that take turns within a
round drift together, so their ratio is stable where their speeds are not.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

_NGRAM = 4


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One batch of one contender.

    Attributes:
        tokens: tokens of all outputs.
        seconds: time from the first request's start to the last one's end.
        distinct: for each output, the share of its 4-grams that are distinct.
        acceptance_length: tokens per target pass, the mean over outputs; None if unknown.
        cycle_ms: time of cycles of this project's engine; 0 for other contenders.
        control_ms: part of `cycle_ms` spent neither in models nor on logits.
        chains: number of request cycles by chain.
        requests: number of requests in the batch.
        tpot_ms: mean time of a token after the first, the mean over outputs; None if unknown.
    """

    tokens: int
    seconds: float
    distinct: tuple[float, ...] = ()
    acceptance_length: float | None = None
    cycle_ms: float = 0.0
    control_ms: float = 0.0
    chains: Mapping[str, int] = field(default_factory=dict)
    requests: int = 1
    tpot_ms: float | None = None


Rounds = Sequence[Sequence[Sample]]  # [round][batch of the round]


class Spread(TypedDict):
    median: float
    low: float  # first quartile
    high: float  # third quartile


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None, or None if there is none."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def distinct_share(token_ids: Sequence[int]) -> float:
    """Return the share of distinct 4-grams; 1 for an output without 4-grams."""
    grams = [tuple(token_ids[i : i + _NGRAM]) for i in range(len(token_ids) - _NGRAM + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def spread(values: Sequence[float]) -> Spread:
    """Return median and quartiles; a single value is all three."""
    if len(values) < 2:
        return Spread(median=values[0], low=values[0], high=values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median=middle, low=low, high=high)


def speeds(rounds: Rounds) -> list[float]:
    """Return tokens per second of each round."""
    return [sum(s.tokens for s in samples) / sum(s.seconds for s in samples) for samples in rounds]


def ratios(ours: Rounds, base: Rounds) -> list[float]:
    """Return the speed over the base's, round by round."""
    return [a / b for a, b in zip(speeds(ours), speeds(base), strict=True)]


def request_rates(rounds: Rounds) -> list[float]:
    """Return requests per second of each round."""
    return [sum(s.requests for s in one) / sum(s.seconds for s in one) for one in rounds]


def tpots(rounds: Rounds) -> list[float]:
    """Return the mean TPOT in ms of each round in which every batch has one."""
    return [
        sum((s.tpot_ms or 0.0) * s.requests for s in samples) / sum(s.requests for s in samples)
        for samples in rounds
        if all(s.tpot_ms is not None for s in samples)
    ]


def row(
    samples: Mapping[str, Rounds],
    name: str,
    bases: Sequence[str],
    categories: Sequence[str | None],
) -> dict[str, Any]:
    """Return all figures of one contender at one batch size, as JSON has them.

    Args:
        samples: samples of every contender, over the same rounds and batches.
        name: the contender.
        bases: contenders that its speed is divided by.
        categories: categories of the batches of a round, in order; None for a mixed batch.
    """

    def of(category: str, contender: str) -> Rounds:
        return [
            [sample for sample, own in zip(batches, categories, strict=True) if own == category]
            for batches in samples[contender]
        ]

    ours = samples[name]
    flat = [sample for batches in ours for sample in batches]
    known = [category for category in dict.fromkeys(categories) if category is not None]
    tpot_ms = tpots(ours)
    return {
        "tokens_per_s": spread(speeds(ours)),
        "over": {base: spread(ratios(ours, samples[base])) for base in bases},
        "over_by_category": {
            one: {base: spread(ratios(of(one, name), of(one, base))) for base in bases}
            for one in known
        },
        "tokens_per_s_by_category": {one: spread(speeds(of(one, name))) for one in known},
        "requests_per_s": spread(request_rates(ours)),
        "tpot_ms": spread(tpot_ms) if tpot_ms else None,
        "acceptance_length": mean_of_known(s.acceptance_length for s in flat),
        "distinct_4grams": mean_of_known(share for sample in flat for share in sample.distinct),
        **_engine_figures(flat),
    }


def _engine_figures(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the share of time outside models, and the chains, of this project's engine."""
    cycle_ms = sum(sample.cycle_ms for sample in samples)
    if not cycle_ms:
        return {}
    chains = sum((Counter(sample.chains) for sample in samples), Counter[str]())
    return {
        "control_share": sum(sample.control_ms for sample in samples) / cycle_ms,
        "chains": {chain: count / chains.total() for chain, count in chains.most_common()},
    }
