"""What one contender did with one batch, and what the engine says of the time that it took."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial, reduce
from statistics import fmean
from typing import Any

from specrouter.profile.profiler import EngineStatistics

NGRAM = 4


class MeasurementError(RuntimeError):
    """A contender failed."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One batch of one contender.

    Attributes:
        tokens: of all outputs.
        seconds: from the first request's start to the last one's end.
        distinct: of each output, the share of its 4-grams that are distinct.
        acceptance_length: tokens per target pass, the mean over outputs; None where unknown.
        chains: request cycles by chain.
        requests: how many the batch had.
        tpot_ms: mean time of a token after the first, the mean over outputs; None where unknown.
    """

    tokens: int
    seconds: float
    distinct: tuple[float, ...] = ()
    acceptance_length: float | None = None
    engine: EngineStatistics | None = None
    chains: Mapping[str, int] = field(default_factory=dict)
    requests: int = 1
    tpot_ms: float | None = None


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """None where nothing is known."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def distinct_share(token_ids: Sequence[int]) -> float:
    """Distinct 4-grams over all of them; 1 for an output that is too short to have two."""
    grams = [tuple(token_ids[i : i + NGRAM]) for i in range(len(token_ids) - NGRAM + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def spent(before: EngineStatistics, after: EngineStatistics) -> EngineStatistics:
    """What the engine has counted between both."""
    return _field_by_field(operator.sub, after, before)


def summed(parts: Iterable[EngineStatistics]) -> EngineStatistics:
    return reduce(partial(_field_by_field, operator.add), parts, EngineStatistics())


def _field_by_field(
    combine: Callable[[Any, Any], Any], one: EngineStatistics, other: EngineStatistics
) -> EngineStatistics:
    def combined(name: str) -> Any:
        a, b = getattr(one, name), getattr(other, name)
        if not isinstance(a, Mapping):
            return combine(a, b)
        return {model: combine(a.get(model, 0), b.get(model, 0)) for model in {**a, **b}}

    return EngineStatistics(**{each.name: combined(each.name) for each in fields(one)})
