"""How long a piece of numpy takes, told by a fixed piece of it on the same machine."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

_RNG = np.random.default_rng(0)
_FEW, _MANY = _RNG.random((32, 32)), _RNG.random((256, 32))

Input = TypeVar("Input")


@dataclass(frozen=True)
class Timing:
    """Of one call. A yardstick is 0.8 ms on the CPU of research/LOG.md."""

    ms: float
    yardsticks: float


def timed(work: Callable[[Input], object], inputs: Sequence[Input], rounds: int = 10) -> Timing:
    """The least mean over `inputs` of a round, and that over the least yardstick.

    The least: what else the machine does only ever adds to a time. They take turns, because the
    machine's own speed may change.
    """
    work_s, yardstick_s = [], []
    for _ in range(rounds):
        yardstick_s.append(_seconds(_yardstick))
        work_s.append(_seconds(lambda: [work(one) for one in inputs]) / len(inputs))
    return Timing(min(work_s) * 1e3, min(work_s) / min(yardstick_s))


def _yardstick() -> None:
    """Many calls on few numbers and one on many, as selections of nodes have them."""
    for _ in range(20):
        order = np.argsort(_FEW, axis=1)
        np.cumsum(np.take_along_axis(_FEW, order, axis=1), axis=1)
        np.where(_FEW > 0.5, _FEW, 0.0).sum(axis=1)
    np.cumsum(np.sort(_MANY, axis=None))


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
