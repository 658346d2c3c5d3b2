"""Two models' times of forwards, estimators that know them, and noise for them."""

import random
from collections.abc import Iterator

from specrouter.profile.time_curve import TimeCurve, TimeEstimator, TimeSample

DRAFTER = TimeCurve(((1, 1.0), (16, 1.1), (128, 3.0)), 5.0)
TARGET = TimeCurve(((1, 10.0), (16, 12.0), (128, 40.0)), 50.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def profiled(curve: TimeCurve, sizes: tuple[int, ...] = SIZES) -> TimeEstimator:
    return TimeEstimator.profiled(
        TimeSample(n, n * slots, curve.at(n, n * slots)) for n in sizes for slots in (128.0, 512.0)
    )


def jitter(mean: float) -> Iterator[float]:
    chance = random.Random(0)
    while True:
        yield 1.0 + (chance.expovariate(1 / mean) if mean else 0.0)
