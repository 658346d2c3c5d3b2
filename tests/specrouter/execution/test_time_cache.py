"""What a cache keeps, and what it makes of files that are damaged."""

import logging
import os
import time
from pathlib import Path

import numpy as np
import pytest

from specrouter.execution.model_times import TimeCache
from specrouter.profile.time_curve import TimeCurve
from specrouter.profile.time_regression import TimeRegression, TimeSample
from test_support.cache_damage import OF_FILE, OF_NUMBERS

DAMAGES = {**OF_FILE, **OF_NUMBERS}


@pytest.fixture
def times() -> TimeRegression:
    return TimeRegression.profiled(TimeSample(n, n * 128.0, 1.0 + n / 10) for n in (1, 8, 64))


def curve_of(times: TimeRegression | None) -> TimeCurve:
    assert times is not None
    found = times.curve()
    assert found is not None
    return found


def test_a_cache_returns_what_it_was_given(tmp_path: Path, times: TimeRegression) -> None:
    cache = TimeCache(tmp_path / "new" / "times")
    assert cache.load("key") is None
    cache.store("key", times)
    loaded, known = curve_of(cache.load("key")), curve_of(times)
    assert np.array(loaded.points) == pytest.approx(np.array(known.points))
    assert loaded.slope_ms_per_million == pytest.approx(known.slope_ms_per_million)
    assert cache.load("other") is None
    assert [path.name for path in cache.folder.iterdir()] == ["key.json"]


def test_a_failed_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, times: TimeRegression, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = TimeCache(tmp_path)
    cache.store("key", times)
    before = (tmp_path / "key.json").read_text()

    def fail(*_: object) -> None:
        raise OSError("no space left on the device")

    monkeypatch.setattr(os, "replace", fail)
    times.record(8, 0.0, 100.0)
    cache.store("key", times)
    assert (tmp_path / "key.json").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["key.json"]


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_told_in_one_line_and_replaced(
    name: str, tmp_path: Path, times: TimeRegression, caplog: pytest.LogCaptureFixture
) -> None:
    cache = TimeCache(tmp_path)
    cache.store("key", times)
    DAMAGES[name](tmp_path / "key.json")
    with caplog.at_level(logging.WARNING):
        assert cache.load("key") is None
    is_gone = name in ("gone", "a link to nothing")
    assert len(caplog.messages) == (0 if is_gone else 1)
    assert all("\n" not in line and len(line) < 500 for line in caplog.messages)
    cache.store("key", times)
    assert curve_of(cache.load("key")).points == curve_of(times).points


def test_what_a_killed_process_left_goes_after_an_hour(
    tmp_path: Path, times: TimeRegression
) -> None:
    old, new = tmp_path / ".key-a.tmp", tmp_path / ".key-b.tmp"
    for path in (old, new):
        path.write_text("")
    os.utime(old, (time.time() - 3700,) * 2)
    TimeCache(tmp_path).store("key", times)
    assert not old.exists()
    assert new.exists()
