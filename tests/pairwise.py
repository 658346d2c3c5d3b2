"""A short list of cases in which every two values of different factors meet."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def pairwise(**factors: Sequence[Any]) -> list[dict[str, Any]]:
    """Greedy: the case that adds the most pairs not yet seen comes next. By index: any values."""
    names = list(factors)
    cases = [
        dict(zip(names, chosen, strict=True))
        for chosen in itertools.product(*(range(len(factors[name])) for name in names))
    ]
    missing = set().union(*map(_pairs, cases))
    found: list[dict[str, Any]] = []
    while missing:
        best = max(cases, key=lambda case: len(_pairs(case) & missing))
        found.append({name: factors[name][index] for name, index in best.items()})
        missing -= _pairs(best)
    return found


def _pairs(case: Mapping[str, int]) -> set[tuple[tuple[str, int], tuple[str, int]]]:
    return set(itertools.combinations(case.items(), 2))
