"""Samples, and what they say: medians over rounds of ratios within a round. Pure functions.

A machine that other work shares drifts from minute to minute. Contenders that take turns within a
round drift together, so their ratio is steady where their speeds are not.
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
        tokens: of all outputs.
        seconds: from the first request's start to the last one's end.
        distinct: of each output, the share of its 4-grams that are distinct.
        acceptance_length: tokens per target pass, the mean over outputs; None where unknown.
        cycle_ms: of an engine of our own, of which `control_ms` are neither a model's nor spent on
            logits; 0 of others.
        chains: request cycles by chain.
        requests: how many the batch had.
        tpot_ms: mean time of a token after the first, the mean over outputs; None where unknown.
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
    """None where nothing is known."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def distinct_share(token_ids: Sequence[int]) -> float:
    """Distinct 4-grams over all of them; 1 for an output that is too short to have two."""
    grams = [tuple(token_ids[i : i + _NGRAM]) for i in range(len(token_ids) - _NGRAM + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles; of one value, that value."""
    if len(values) < 2:
        return Spread(median=values[0], low=values[0], high=values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median=middle, low=low, high=high)


def speeds(rounds: Rounds) -> list[float]:
    """Tokens per second of each round."""
    return [sum(s.tokens for s in samples) / sum(s.seconds for s in samples) for samples in rounds]


def ratios(ours: Rounds, base: Rounds) -> list[float]:
    """Speed over the base's, round by round."""
    return [a / b for a, b in zip(speeds(ours), speeds(base), strict=True)]


def request_rates(rounds: Rounds) -> list[float]:
    """Requests per second of each round."""
    return [sum(s.requests for s in one) / sum(s.seconds for s in one) for one in rounds]


def tpots(rounds: Rounds) -> list[float]:
    """Mean TPOT of a round's requests, in ms, of each round whose batches all say theirs."""
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
    """All figures of one contender at one batch size, as JSON has them.

    Args:
        samples: of every contender, over the same rounds and batches.
        bases: contenders that its speed is divided by.
        categories: of the batches of a round, in their order; None where they are mixed.
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
    """Of a contender of our own: where its time went that no model had, and its chains."""
    cycle_ms = sum(sample.cycle_ms for sample in samples)
    if not cycle_ms:
        return {}
    chains = sum((Counter(sample.chains) for sample in samples), Counter[str]())
    return {
        "control_share": sum(sample.control_ms for sample in samples) / cycle_ms,
        "chains": {chain: count / chains.total() for chain, count in chains.most_common()},
    }
