"""A model's curve is of the model as it is now."""

from collections.abc import Callable
from typing import cast

import pytest

from modelpool import ModelPool
from modelpool.packed_model import PackedModel
from specrouter.profile import model_times
from specrouter.profile.model_times import ModelTimes
from specrouter.profile.profiler import PerformanceProfiler
from specrouter.profile.time_regression import TimeSample

MS = {"gpu": 1.0, "cpu": 40.0}


class Pool:
    def path(self, name: str) -> str:
        return name


@pytest.fixture
def learn(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], float]:
    """Loads a drafter on a device: the time of its forward of one token that is believed then."""

    def profile(device: PackedModel) -> tuple[TimeSample, ...]:
        return (TimeSample(1, 0.0, MS[cast(str, device)]),)

    class NoCache:
        def __init__(self, folder: object) -> None: ...
        def load(self, key: str) -> None: ...
        def store(self, key: str, times: object) -> None: ...

    monkeypatch.setattr(model_times, "TimeCache", NoCache)
    monkeypatch.setattr(model_times, "profile_model", profile)
    monkeypatch.setattr(model_times, "key_of", lambda device, path: f"{path}-{device}")
    profiler = PerformanceProfiler({"small": 10, "big": 100})
    times = ModelTimes(cast(ModelPool, Pool()), profiler)

    def load(device: str) -> float:
        times.learn("small", cast(PackedModel, device))
        believed = profiler.snapshot().times["small"].at(1)
        for _ in range(30):  # and serves a little
            profiler.record_forward("small", 1, 0.0, MS[device])
            profiler.record_forward("big", 1, 0.0, 100.0)
            profiler.record_cycle(100.0, 1, 1)
        return believed

    return load


def test_a_model_that_is_loaded_elsewhere_is_timed_anew(learn: Callable[[str], float]) -> None:
    for device in ("gpu", "cpu", "gpu", "cpu"):
        assert learn(device) == pytest.approx(MS[device], rel=0.01)
        assert learn(device) == pytest.approx(MS[device], rel=0.01)


def test_a_model_that_is_loaded_again_keeps_what_serving_taught(
    learn: Callable[[str], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    learn("gpu")
    monkeypatch.setitem(MS, "gpu", 1.5)  # which a new profile would say at once
    assert learn("gpu") == pytest.approx(1.0, rel=0.01)
    assert 1.1 < learn("gpu") < 1.5
