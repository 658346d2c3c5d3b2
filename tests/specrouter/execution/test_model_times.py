"""A model's curve is of the model as it is now."""

from collections.abc import Callable
from typing import cast

import numpy as np
import pytest

from modelpool import ModelPool
from modelpool.packed_model import PackedModel
from modelpool.progress import LoadProgress
from specrouter.execution import model_times
from specrouter.execution.model_times import ModelTimes
from specrouter.profile.profiler import PerformanceProfiler
from specrouter.profile.time_regression import TimeRegression, TimeSample

MS = {"gpu": 1.0, "cpu": 40.0}


class Device(str):
    """A model of which nothing matters but where it is, and what its forwards are filled up to."""

    sizes: tuple[int, ...] = ()


class Pool:
    progress = LoadProgress()

    def path(self, name: str) -> str:
        return name


class Cache:
    """Of one file, which is not written."""

    def __init__(self, kept: TimeRegression | None = None) -> None:
        self.kept = kept
        self.stored: list[TimeRegression] = []

    def load(self, key: str) -> TimeRegression | None:
        return self.kept

    def store(self, key: str, times: TimeRegression) -> None:
        self.stored.append(times)


@pytest.fixture
def learn(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], float]:
    """Loads a drafter on a device: the time of its forward of one token that is believed then."""

    def profile(device: PackedModel) -> tuple[TimeSample, ...]:
        return (TimeSample(1, 0.0, MS[cast(str, device)]),)

    monkeypatch.setattr(model_times, "TimeCache", lambda _: Cache())
    monkeypatch.setattr(model_times, "profile_model", profile)
    monkeypatch.setattr(model_times, "key_of", lambda device, path: f"{path}-{device}")
    profiler = PerformanceProfiler(parameters={"small": 10, "big": 100})
    times = ModelTimes(cast(ModelPool, Pool()), profiler)

    def load(device: str) -> float:
        times.learn("small", cast(PackedModel, Device(device)))
        believed = profiler.snapshot().times["small"].at(1)
        for _ in range(30):  # and serves a little
            profiler.record_forward("small", 1, 0.0, MS[device])
            profiler.record_forward("big", 1, 0.0, 100.0)
            profiler.record_cycle(100.0, 1, 1)
        return believed

    return load


def test_a_model_that_is_loaded_again_keeps_what_serving_taught(
    learn: Callable[[str], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    learn("gpu")
    monkeypatch.setitem(MS, "gpu", 1.5)  # which a new profile would say at once
    assert learn("gpu") == pytest.approx(1.0, rel=0.01)
    assert 1.1 < learn("gpu") < 1.5


@pytest.mark.parametrize(
    ("is_fresh", "factor", "ms", "timed"),
    [(False, 1.0, 3.0, 0), (False, 0.5, 1.5, 0), (False, None, 5.0, 1), (True, 1.0, 5.0, 1)],
)
def test_kept_times_are_used_unless_fresh_ones_are_asked_for_or_they_are_wrong(
    is_fresh: bool, factor: float | None, ms: float, timed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = TimeRegression.profiled((TimeSample(1, 0.0, 3.0),))
    cache = Cache(kept)
    monkeypatch.setattr(model_times, "TimeCache", lambda _: cache)
    monkeypatch.setattr(model_times, "factor_now", lambda *_: factor)
    monkeypatch.setattr(model_times, "profile_model", lambda _: (TimeSample(1, 0.0, 5.0),))
    monkeypatch.setattr(model_times, "key_of", lambda *_: "key")
    profiler = PerformanceProfiler(parameters={"small": 10})
    times = ModelTimes(cast(ModelPool, Pool()), profiler, is_fresh)
    times.learn("small", cast(PackedModel, Device("cpu")))
    assert profiler.snapshot().times["small"].at(1) == pytest.approx(ms)
    assert len(cache.stored) == timed


def test_sizes_are_told_as_they_are_once_the_model_was_timed(
    learn: Callable[[str], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile captures graphs, and where that fails none are left."""
    device = Device("gpu")
    device.sizes = (1, 8)

    def profile(model: Device) -> tuple[TimeSample, ...]:
        model.sizes = (1, 8, 16)
        return (TimeSample(1, 0.0, 1.0), TimeSample(16, 0.0, 2.0))

    monkeypatch.setattr(model_times, "profile_model", profile)
    profiler = PerformanceProfiler(parameters={"small": 10})
    ModelTimes(cast(ModelPool, Pool()), profiler).learn("small", cast(PackedModel, device))
    assert profiler.snapshot().times["small"].filled(np.array([9])).tolist() == [16]
