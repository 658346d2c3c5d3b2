"""Sums over replicas of what each counts: field by field, whatever the figures."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import reduce
from itertools import zip_longest
from typing import Any, TypeVar

from specrouter.engine.engine_state import EngineState

Figures = TypeVar("Figures")


def total(every: Iterable[Figures]) -> Figures:
    """Of at least one; of mappings and tuples entry by entry, of sets the union."""
    return reduce(_added, every)


def total_state(every: Iterable[EngineState]) -> EngineState:
    """The tightest objective is no sum, and of margins the widest is told."""
    states = list(every)
    tightest = [one.tightest_tpot_ms for one in states if one.tightest_tpot_ms is not None]
    summed = total(replace(one, tightest_tpot_ms=0.0) for one in states)
    widest = max(one.pace_margin for one in states)
    return replace(summed, tightest_tpot_ms=min(tightest, default=None), pace_margin=widest)


def _added(one: Any, other: Any) -> Any:
    if is_dataclass(one) and not isinstance(one, type):
        names = [field.name for field in fields(one)]
        return type(one)(*(_added(getattr(one, name), getattr(other, name)) for name in names))
    if isinstance(one, Mapping):
        shared = {key: _added(one[key], other[key]) for key in one if key in other}
        return {**one, **other, **shared}
    if isinstance(one, frozenset):
        return one | other
    if isinstance(one, tuple):
        return tuple(_added(a, b) for a, b in zip_longest(one, other, fillvalue=0))
    return one + other
