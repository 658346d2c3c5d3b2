"""The profile of a model, and where it is kept."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from modelpool import ModelPool
from modelpool.attention.backend import READING_QUERIES
from modelpool.fast.model_key import key_of
from modelpool.packed_model import PackedModel
from specrouter.execution.time_profile import factor_now, profile_model
from specrouter.profile.time_curve import TimeCurve
from specrouter.profile.time_regression import TimeRegression
from tests.specrouter.execution.test_time_cache import curve_of


@pytest.fixture(scope="module")
def pool() -> ModelPool:
    model = {"name": "m", "source": "bundled:tiny-1m", "dtype": "float32"}
    return ModelPool.from_config({"target": "m", "models": [model]})


@pytest.fixture(scope="module")
def model(pool: ModelPool) -> PackedModel:
    return pool.get("m")


SHORT = [1, 4, 6, 8, 12, 16, 24, 32, 48, 64]


def test_a_profile_covers_1_to_64_tokens_at_least(model: PackedModel) -> None:
    samples = profile_model(model, budget_s=60.0)  # it ends before, when times have settled
    short, long = samples[:10], samples[10:12]
    assert [sample.tokens for sample in short] == SHORT
    assert [sample.tokens for sample in long] == [16, 64]
    attended = {sample.tokens: sample.attended for sample in short}
    assert attended[6] == 128 * (6 + READING_QUERIES)  # one row
    assert attended[8] == pytest.approx(128 * 8 * (1 + READING_QUERIES))  # eight
    curve = curve_of(TimeRegression.profiled(samples))  # asserts that it rises
    assert 0.0 < curve.at(1) <= curve.at(64) < 1000.0  # flat where others use the machine


def test_a_profile_ends_when_its_times_have_settled(model: PackedModel) -> None:
    ticks = iter(range(10**6))
    samples = profile_model(model, budget_s=1e9, clock=lambda: float(next(ticks)))
    assert len(samples) == 16
    assert next(ticks) < 3 * (16 + 4 * 16)  # four rounds of all sizes


def test_a_key_names_what_times_depend_on(
    pool: ModelPool, model: PackedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pool.path("m")
    key = key_of(model, path)
    assert key == key_of(model, path)
    assert key.startswith("tiny-1m-")
    assert "/" not in key
    copy = tmp_path / "tiny-1m"
    copy.mkdir()
    for file in ("config.json", "model.safetensors"):
        (copy / file).write_bytes((path / file).read_bytes())
    first = key_of(model, copy)
    os.utime(copy / "model.safetensors", (1, 1))
    second = key_of(model, copy)
    with (copy / "config.json").open("a") as config:
        config.write("\n")
    third = key_of(model, copy)
    monkeypatch.setattr(model, "threads", 77, raising=False)
    fourth = key_of(model, copy)
    assert len({key, first, second, third, fourth}) == 5


def ticking() -> Callable[[], float]:
    """Every forward takes a second by this clock."""
    ticks = iter(range(10**6))
    return lambda: float(next(ticks))


def test_a_kept_curve_is_scaled_where_the_machine_is_faster_in_all_sizes(
    model: PackedModel,
) -> None:
    assert factor_now(TimeCurve(((1, 2000.0),)), model, ticking()) == pytest.approx(0.5)


def test_a_machine_that_is_slower_now_leaves_a_kept_curve_as_it_is(model: PackedModel) -> None:
    assert factor_now(TimeCurve(((1, 400.0),)), model, ticking()) == 1.0
    uneven = TimeCurve(((1, 400.0), (16, 1000.0)))
    assert factor_now(uneven, model, ticking()) == 1.0


def test_a_kept_curve_with_one_slow_size_has_a_wrong_shape(model: PackedModel) -> None:
    points = ((1.0, 1000.0), (6.0, 1500.0), (16.0, 1500.0))
    assert factor_now(TimeCurve(points), model, ticking()) is None


def test_noise_in_one_forward_of_now_does_not_condemn_a_kept_curve(model: PackedModel) -> None:
    durations = iter((1.0, 3.0, 1.0, 1.0, 1.0, 1.0))
    now, is_start = 0.0, True

    def clock() -> float:
        nonlocal now, is_start
        now += 0.0 if is_start else next(durations)
        is_start = not is_start
        return now

    assert factor_now(TimeCurve(((1, 2000.0),)), model, clock) == pytest.approx(0.5)
