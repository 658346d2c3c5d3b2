"""Rounds of benchmarks, on contenders that only count."""

from __future__ import annotations

import io

import pytest

from specrouter.bench.prompts import Work
from specrouter.bench.rounds import measure
from specrouter.bench.sample import MeasurementError, Sample
from specrouter.progress import Progress

LOG: list[tuple[str, int]] = []


class Counting:
    """`fails`: from which of its runs on, counted from 0."""

    def __init__(self, name: str, fails: int | None = None) -> None:
        self.name, self._fails, self._runs = name, fails, 0

    def run(self, work: Work) -> Sample:
        self._runs += 1
        if self._fails is not None and self._runs > self._fails:
            raise MeasurementError(f"{self.name}: broken")
        LOG.append((self.name, work.seeds[0]))
        return Sample(tokens=1, seconds=1.0)


def deal(number: int) -> list[Work]:
    return [Work((), (seed,), 1, 0.0, None) for seed in (10 * number, 10 * number + 1)]


def quiet() -> Progress:
    return Progress(stream=io.StringIO())


def test_contenders_take_turns_on_each_batch() -> None:
    LOG.clear()
    samples = measure([Counting("a"), Counting("b")], deal, 2, "batch 1", quiet())
    warm_up, counted = LOG[:4], LOG[4:]
    assert counted == [(name, seed) for seed in (0, 1, 10, 11) for name in ("a", "b")]
    assert len(warm_up) == 4
    lengths = {name: [len(found) for found in rounds] for name, rounds in samples.items()}
    assert lengths == {"a": [2, 2], "b": [2, 2]}


@pytest.mark.parametrize("fails", [0, 3])
def test_a_failure_ends_the_measurement(fails: int) -> None:
    with pytest.raises(MeasurementError, match="b: broken"):
        measure([Counting("b", fails=fails)], deal, 3, "", quiet())


def test_progress_away_from_a_terminal_is_a_line_per_round() -> None:
    stream = io.StringIO()
    measure([Counting("a")], deal, 2, "batch 4", Progress(stream=stream))
    assert stream.getvalue().splitlines() == [
        "batch 4, warm-up: a 1.0 tokens/s",
        "batch 4, round 1/2: a 1.0 tokens/s",
        "batch 4, round 2/2: a 1.0 tokens/s",
    ]
