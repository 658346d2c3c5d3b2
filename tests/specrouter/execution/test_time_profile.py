"""The profile of a model, and where it is kept."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modelpool import ModelPool
from modelpool.attention.backend import READING_QUERIES
from modelpool.fast.model_key import key_of
from modelpool.forward import ForwardOutput
from modelpool.packed_model import PackedModel
from specrouter.execution.time_profile import is_too_slow, profile_model
from specrouter.profile.time_regression import TimeRegression
from tests.specrouter.execution.test_time_cache import curve_of


@pytest.fixture(scope="module")
def pool() -> ModelPool:
    model = {"name": "m", "source": "bundled:tiny-1m", "dtype": "float32"}
    return ModelPool.from_config({"target": "m", "models": [model]})


@pytest.fixture(scope="module")
def model(pool: ModelPool) -> PackedModel:
    return pool.get("m")


SHORT = [1, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128]


def test_a_profile_covers_1_to_128_tokens_at_least(model: PackedModel) -> None:
    samples = profile_model(model, budget_s=60.0)  # it ends before, when times have settled
    short, long = samples[:11], samples[11:13]
    assert [sample.tokens for sample in short] == SHORT
    assert [sample.tokens for sample in long] == [16, 64]
    attended = {sample.tokens: sample.attended for sample in short}
    assert attended[6] == 128 * (6 + READING_QUERIES)  # one row
    assert attended[8] == pytest.approx(128 * 8 * (1 + READING_QUERIES))  # eight
    curve = curve_of(TimeRegression.profiled(samples))  # asserts that it rises
    assert 0.0 < curve.at(1) <= curve.at(128) < 1000.0  # flat where others use the machine


def clock_of(monkeypatch: pytest.MonkeyPatch, each_token_ms: float) -> Callable[[], float]:
    """In seconds; stands still but for forwards, of 100 ms and so many for each token."""
    now_s, forward = [0.0], PackedModel.forward

    def timed(self: PackedModel, ids: torch.Tensor, *others: Any) -> ForwardOutput:
        now_s[0] += (100.0 + each_token_ms * len(ids)) / 1000
        return forward(self, ids, *others)

    monkeypatch.setattr(PackedModel, "forward", timed)
    return lambda: now_s[0]


@pytest.mark.parametrize(("each_token_ms", "largest"), [(1.0, 1024), (3.0, 256), (9.0, 128)])
def test_larger_sizes_are_timed_as_long_as_they_are_cheap(
    each_token_ms: float, largest: int, model: PackedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = clock_of(monkeypatch, each_token_ms)
    samples = profile_model(model, budget_s=60.0, clock=clock)
    tokens = sorted({sample.tokens for sample in samples})
    assert tokens == sorted({*SHORT, *(256 << i for i in range(3) if 256 << i <= largest)})


def test_a_profile_ends_with_the_forward_that_spends_its_budget(model: PackedModel) -> None:
    ticks = iter(range(10**6))  # every look at the clock takes a second
    samples = profile_model(model, budget_s=20.0, clock=lambda: float(next(ticks)))
    assert next(ticks) < 30
    assert [sample.tokens for sample in samples] == [1, 4, 6, 8, 12, 16, 24, 32][: len(samples)]
    assert {sample.ms for sample in samples} == {1000.0}


def test_a_profile_ends_when_its_times_have_settled(model: PackedModel) -> None:
    ticks = iter(range(10**6))
    samples = profile_model(model, budget_s=1e9, clock=lambda: float(next(ticks)))
    assert len(samples) == 16
    assert next(ticks) < 3 * (16 + 4 * 16)  # four rounds of all sizes


def test_a_curve_from_a_slow_moment_is_told_by_a_few_forwards(
    model: PackedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = clock_of(monkeypatch, 1.0)
    curve = curve_of(TimeRegression.profiled(profile_model(model, 60.0, clock)))
    assert is_too_slow(curve.scaled(1.2), model, clock)
    assert not is_too_slow(curve, model, clock)


def test_a_profile_leaves_no_trace_in_the_model(model: PackedModel) -> None:
    before = {name: value.clone() for name, value in model.model.state_dict().items()}
    profile_model(model, budget_s=0.1)
    assert all(torch.equal(before[k], v) for k, v in model.model.state_dict().items())
    assert not torch.is_inference_mode_enabled()


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
