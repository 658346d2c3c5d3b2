"""What the samples say: medians over rounds of ratios within a round. Pure functions.

A machine that other work shares drifts from minute to minute. Contenders that take turns within a
round drift together, so their ratio is steady where their speeds are not.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from specrouter.bench.sample import Sample, mean_of_known, summed
from specrouter.profile.profiler import EngineStatistics

Rounds = Sequence[Sequence[Sample]]  # [round][batch of the round]


class Spread(TypedDict):
    median: float
    low: float  # first quartile
    high: float  # third quartile


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles; of one value, that value."""
    if len(values) < 2:
        return Spread(median=values[0], low=values[0], high=values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median=middle, low=low, high=high)


def mean_spread(found: Sequence[Spread]) -> Spread:
    """The mean over categories of their medians, and of their quartiles."""
    return Spread(
        median=statistics.fmean(one["median"] for one in found),
        low=statistics.fmean(one["low"] for one in found),
        high=statistics.fmean(one["high"] for one in found),
    )


def speeds(rounds: Rounds) -> list[float]:
    """Tokens per second of each round."""
    return [sum(s.tokens for s in samples) / sum(s.seconds for s in samples) for samples in rounds]


def ratios(ours: Rounds, base: Rounds) -> list[float]:
    """Speed over the base's, round by round."""
    return [a / b for a, b in zip(speeds(ours), speeds(base), strict=True)]


def request_rates(rounds: Rounds) -> list[float]:
    """Requests per second of each round."""
    return [sum(s.requests for s in one) / sum(s.seconds for s in one) for one in rounds]


def tpots(rounds: Rounds) -> list[float | None]:
    """Mean TPOT of each round's requests, in ms; None where it is not known of all its batches."""
    found: list[float | None] = []
    for samples in rounds:
        known = [(s.tpot_ms, s.requests) for s in samples if s.tpot_ms is not None]
        total = sum(ms * requests for ms, requests in known)
        complete = known and len(known) == len(samples)
        found.append(total / sum(requests for _, requests in known) if complete else None)
    return found


def eaf(ours: Rounds, alone: Rounds) -> list[float]:
    """The target's own TPOT over a contender's, round by round. Source: SpecRouter, section 6."""
    pairs = zip(tpots(alone), tpots(ours), strict=True)
    return [a / b for a, b in pairs if a is not None and b is not None and b > 0]


def control_share(time: EngineStatistics) -> float:
    """Of the cycles' time, what is neither a model's nor spent on logits."""
    return 1 - (sum(time.model_ms.values()) + time.logits_ms) / time.cycle_ms


def mean_pack(time: EngineStatistics, model: str) -> float:
    """Tokens of this model's forwards, on average."""
    return time.pack_tokens[model] / time.forwards[model]


def row(
    samples: Mapping[str, Rounds],
    name: str,
    bases: Sequence[str],
    categories: Sequence[str | None],
    by_category: bool = False,
) -> dict[str, Any]:
    """All figures of one contender at one batch size, as JSON has them.

    Args:
        samples: of every contender, over the same rounds and batches.
        bases: contenders that its speed is divided by.
        categories: of the batches of a round, in their order; None where they are mixed.
        by_category: the headline ratios are means over categories.
    """
    ours = samples[name]
    flat = [sample for samples_of_round in ours for sample in samples_of_round]
    over = {base: spread(ratios(ours, samples[base])) for base in bases}
    parts = _by_category(samples, categories)
    by = {
        category: {base: spread(ratios(part[name], part[base])) for base in bases}
        for category, part in parts.items()
    }
    if by_category and by:
        over = {base: mean_spread([found[base] for found in by.values()]) for base in bases}
    return {
        "tokens_per_s": spread(speeds(ours)),
        "over": over,
        "over_by_category": by,
        "tokens_per_s_by_category": {
            category: spread(speeds(part[name])) for category, part in parts.items()
        },
        "requests_per_s": spread(request_rates(ours)),
        **_tpot_figures(samples, name),
        "acceptance_length": mean_of_known(s.acceptance_length for s in flat),
        "distinct_4grams": mean_of_known(share for sample in flat for share in sample.distinct),
        **_engine_figures(flat),
    }


def _by_category(
    samples: Mapping[str, Rounds], categories: Sequence[str | None]
) -> dict[str, dict[str, Rounds]]:
    """The samples of each category, by contender."""

    def of(rounds: Rounds, category: str) -> Rounds:
        return [
            [sample for sample, own in zip(samples, categories, strict=True) if own == category]
            for samples in rounds
        ]

    return {
        category: {name: of(rounds, category) for name, rounds in samples.items()}
        for category in categories
        if category is not None
    }


def _tpot_figures(samples: Mapping[str, Rounds], name: str) -> dict[str, Any]:
    """`tpot_ms`, and `eaf_tpot` over the target alone, "off"; None where they are not known."""
    known_ms = [ms for ms in tpots(samples[name]) if ms is not None]
    gains = eaf(samples[name], samples["off"]) if "off" in samples else []
    return {
        "tpot_ms": spread(known_ms) if known_ms else None,
        "eaf_tpot": spread(gains) if gains else None,
    }


def _engine_figures(samples: Iterable[Sample]) -> dict[str, Any]:
    """Where a contender of our own spent its time, and on which chains."""
    found = list(samples)
    parts = [sample.engine for sample in found if sample.engine is not None]
    if not parts:
        return {}
    time = summed(parts)
    chains: Counter[str] = Counter()
    for sample in found:
        chains.update(sample.chains)
    cycles = chains.total()
    return {
        "model_share": {name: ms / time.cycle_ms for name, ms in time.model_ms.items() if ms},
        "logits_share": time.logits_ms / time.cycle_ms,
        "control_share": control_share(time),
        "cycle_ms": time.cycle_ms / time.cycles,
        "mean_pack_tokens": {name: mean_pack(time, name) for name, n in time.forwards.items() if n},
        "chains": {chain: count / cycles for chain, count in chains.most_common()},
    }
