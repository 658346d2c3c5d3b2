"""Tuning of static chains, on made-up speeds."""

from __future__ import annotations

from collections import Counter

import pytest

from research.bench.tuning import Shape, grid, measurements, tune
from specrouter.request.params import Chain

SMALL: Chain = ("small", "big")
MIDDLE: Chain = ("middle", "big")
THREE: Chain = ("small", "middle", "big")


class Clock:
    """Speeds by (chain, shape); counts what is measured."""

    def __init__(self, best: dict[Chain, Shape], fast: float = 20.0) -> None:
        self._best, self._fast = best, fast
        self.runs: Counter[tuple[Chain, Shape]] = Counter()
        self.rungs: list[int] = []

    def __call__(self, chain: Chain, shape: Shape, rung: int) -> tuple[int, float]:
        self.runs[chain, shape] += 1
        self.rungs.append(rung)
        best = self._best[chain]
        distance = abs(shape.depth - best.depth) + abs(shape.width - best.width)
        return 100, 100 * (1 + distance) / self._fast


def test_grid_has_only_trees_that_may_be() -> None:
    assert grid((1, 2), (1, 3)) == [Shape(1, 1), Shape(1, 3), Shape(2, 1), Shape(2, 3)]
    assert grid((16,), (4, 8)) == [Shape(16, 4)]
    assert grid((16,), (8,)) == []


def test_each_chain_gets_its_own_best_shape() -> None:
    best = {SMALL: Shape(6, 1), THREE: Shape(2, 3)}
    tuned = tune([SMALL, THREE], grid((1, 2, 4, 6), (1, 2, 3)), Clock(best))
    assert {chain: found.shape for chain, found in tuned.items()} == best
    assert tuned[SMALL].tokens_per_s == pytest.approx(20.0)


def test_half_of_the_shapes_goes_on_from_rung_to_rung() -> None:
    clock = Clock({SMALL: Shape(3, 2)})
    tune([SMALL], grid((1, 2, 3, 4, 6), (1, 2, 3)), clock)
    assert Counter(clock.rungs) == {0: 15, 1: 8, 2: 4, 3: 2}
    assert clock.runs[SMALL, Shape(3, 2)] == 4


@pytest.mark.parametrize("shapes", range(1, 16))
def test_so_many_measurements_are_expected_as_are_made(shapes: int) -> None:
    clock = Clock({SMALL: Shape(3, 2), THREE: Shape(1, 1)})
    tune([SMALL, THREE], grid((1, 2, 3, 4, 6), (1, 2, 3))[:shapes], clock)
    assert clock.runs.total() == 2 * measurements(shapes)


def test_single_lucky_measurement_does_not_win() -> None:
    def measure(chain: Chain, shape: Shape, rung: int) -> tuple[int, float]:
        if shape.depth == 1:
            return (10, 0.1) if rung == 0 else (1000, 100.0)
        return 1000, 20.0

    assert tune([SMALL], grid((1, 2, 3), (1,)), measure)[SMALL].shape.depth != 1


def test_only_shape_is_measured_once() -> None:
    clock = Clock({SMALL: Shape(4, 1), MIDDLE: Shape(4, 1)})
    tune([SMALL, MIDDLE], [Shape(4, 1)], clock)
    assert set(clock.runs.values()) == {1}
    assert len(clock.runs) == 2
