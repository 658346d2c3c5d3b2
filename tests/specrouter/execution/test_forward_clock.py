"""Forwards are timed one by one, and add up to what stages are told."""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch

from specrouter.execution.forward_clock import ForwardClock

CPU = torch.device("cpu")
Told = list[tuple[str, int, float, float, int]]


@pytest.fixture
def told() -> Told:
    return []


@pytest.fixture
def clock(told: Told) -> ForwardClock:
    return ForwardClock(lambda *forward: told.append(forward))


class Time:
    """Stands still but for what is slept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now_s = 100.0
        monkeypatch.setattr("specrouter.execution.forward_clock.time", self)

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds

    def perf_counter(self) -> float:
        return self._now_s


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


def test_forwards_of_one_size_are_told_together_with_their_mean(
    clock: ForwardClock, told: Told, hand: Time
) -> None:
    inside = clock.watch("big", CPU)
    for tokens, seconds in ((2, 0.001), (7, 0.005), (2, 0.002), (2, 0.006)):
        with inside(tokens, 100.0 * tokens):
            hand.sleep(seconds)
    hand.sleep(0.004)
    assert not told
    assert clock.take_ms() == pytest.approx(14.0)
    assert [(*of, times) for *of, _, times in told] == [("big", 2, 200.0, 3), ("big", 7, 700.0, 1)]
    assert [ms for *_, ms, _ in told] == pytest.approx([3.0, 5.0])
    assert clock.take_ms() == 0.0


def test_a_stages_own_time_is_what_is_left_beside_its_forwards(
    clock: ForwardClock, hand: Time
) -> None:
    inside = clock.watch("big", CPU)
    with inside(1, 0.0):
        hand.sleep(0.02)
    started = hand.perf_counter()
    with inside(1, 0.0):
        hand.sleep(0.05)
    hand.sleep(0.01)
    ended = hand.perf_counter()
    hand.sleep(0.001)
    with inside(2, 0.0):
        hand.sleep(0.03)
    assert clock.own_ms(started, ended) == pytest.approx(10.0)
    assert clock.take_ms() == pytest.approx(30.0)


class Event:
    """As the accelerator's, which are over from the first ones on; nobody waits for them."""

    clock_ms = 0.0
    over_ms = math.inf  # what was recorded until then is over
    streams: ClassVar[list[object]] = []  # that events were recorded on

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = math.nan

    def record(self, stream: object) -> None:
        self.streams.append(stream)
        self.at = Event.clock_ms = Event.clock_ms + 5.0

    def query(self) -> bool:
        return self.at <= Event.over_ms

    def elapsed_time(self, end: "Event") -> float:
        assert end.query()
        return end.at - self.at


def test_an_accelerators_forward_is_told_when_a_stage_has_waited_and_it_is_over(
    clock: ForwardClock, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", "the stream of {}".format)
    inside = clock.watch("big", torch.device("cuda", 1))
    with inside(1, 0.0):
        pass
    monkeypatch.setattr(Event, "over_ms", Event.clock_ms)
    with inside(2, 0.0):
        pass
    assert not told
    assert clock.take_ms() == pytest.approx(5.0)
    assert clock.take_ms() == 0.0
    monkeypatch.setattr(Event, "over_ms", math.inf)
    assert clock.take_ms() == pytest.approx(5.0)
    assert told == [("big", 1, 0.0, 5.0, 1), ("big", 2, 0.0, 5.0, 1)]
    assert set(Event.streams) == {"the stream of cuda:1"}


def test_each_thread_has_the_times_of_its_own_forwards(clock: ForwardClock, told: Told) -> None:
    inside = clock.watch("big", CPU)
    with inside(1, 0.0), ThreadPoolExecutor(1) as other:

        def run() -> float:
            with clock.watch("small", CPU)(2, 0.0):
                time.sleep(0.001)
            return clock.take_ms()

        assert other.submit(run).result() >= 1.0
    assert [model for model, *_ in told] == ["small"]
    assert clock.take_ms() >= 1.0
    assert [model for model, *_ in told] == ["small", "big"]
