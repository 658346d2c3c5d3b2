"""What evidence counts for: how it ages, and how it is drawn to a prior; the same for all of it."""

from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")

PRIOR = 12.0  # observations that count as if they had come out as was thought before
MEMORY = 500.0  # observations after which older ones have faded
AVERAGE = 0.05  # weight of what is new in a moving average
HALF_LIFE = 512.0  # cycles without news after which what was learned counts half
RECENT = 16  # cycles that are the text and the load of now
MOST_ERROR = 0.4  # logarithm: what one cycle may tell of a factor, and the largest factor
_MOST_KEYS = 256  # chains and their ways to run of which something is kept


def age(cycles: float, half_life: float = HALF_LIFE) -> float:
    """What evidence still counts after cycles without news."""
    return float(0.5 ** (max(0.0, cycles) / half_life))


def within(value: float, most: float = MOST_ERROR) -> float:
    """A logarithm within its bounds."""
    return min(max(value, -most), most)


def forget_oldest(known: dict[Any, _T], last: Callable[[_T], int]) -> None:
    """Makes room for one more: callers may ask for any chains that they can name."""
    if len(known) >= _MOST_KEYS:
        del known[min(known, key=lambda key: last(known[key]))]
