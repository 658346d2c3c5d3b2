"""The weight of evidence: how it ages, and how it is blended with a prior."""

from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")

PRIOR = 12.0  # weight of a prior, in observations
MEMORY = 500.0  # observations after which older ones have faded
AVERAGE = 0.05  # weight of a new value in a moving average
HALF_LIFE = 512.0  # cycles without news after which evidence counts half
RECENT = 16  # cycles that count as the current text and load
MOST_ERROR = 0.4  # logarithm: bound of one cycle's error, and of the largest factor
_MOST_KEYS = 256  # entries kept


def age(cycles: float, half_life: float = HALF_LIFE) -> float:
    """Return the weight of evidence after cycles without news."""
    return float(0.5 ** (max(0.0, cycles) / half_life))


def within(value: float, most: float = MOST_ERROR) -> float:
    """Return a logarithm clipped to its bounds."""
    return min(max(value, -most), most)


def forget_oldest(known: dict[Any, _T], last: Callable[[_T], int]) -> None:
    """Drop the oldest entry if there are many: callers may ask for any chain that they can name."""
    if len(known) >= _MOST_KEYS:
        del known[min(known, key=lambda key: last(known[key]))]
