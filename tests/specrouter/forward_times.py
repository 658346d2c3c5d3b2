"""Two models' times of forwards, regressions that know them, any curves, and noise."""

import random
from collections.abc import Iterator

from hypothesis import strategies as st

from specrouter.profile.time_curve import TimeCurve
from specrouter.profile.time_regression import TimeRegression, TimeSample

DRAFTER = TimeCurve(((1, 1.0), (16, 1.1), (128, 3.0)), 5.0)
TARGET = TimeCurve(((1, 10.0), (16, 12.0), (128, 40.0)), 50.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
TIMES_MS = st.floats(0.01, 1e4)


def curves() -> st.SearchStrategy[TimeCurve]:
    points = st.lists(st.tuples(st.integers(1, 500), TIMES_MS), min_size=1, max_size=8).map(
        lambda pairs: tuple(
            zip(
                map(float, sorted({n for n, _ in pairs})),
                sorted(ms for _, ms in dict(pairs).items()),
                strict=True,
            )
        )
    )
    return st.builds(TimeCurve, points, st.floats(0.0, 1e3))


def profiled(curve: TimeCurve, sizes: tuple[int, ...] = SIZES) -> TimeRegression:
    return TimeRegression.profiled(
        TimeSample(n, n * slots, curve.at(n, n * slots)) for n in sizes for slots in (128.0, 512.0)
    )


def jitter(mean: float) -> Iterator[float]:
    chance = random.Random(0)
    while True:
        yield 1.0 + (chance.expovariate(1 / mean) if mean else 0.0)
