"""Placement, on devices that were made up."""

import logging

import pytest

from modelpool.device_manager import DeviceInfo, DeviceManager, Placement, place, read_devices
from modelpool.errors import ConfigError
from modelpool.footprint import ModelFootprint

CPU = DeviceInfo("cpu", 1000, 1000)


def gpu(index: int, free: int, load: int = 0) -> DeviceInfo:
    return DeviceInfo(f"cuda:{index}", free, 0, load)  # no total: all that is free is usable


def model(name: str, size: int, kv: int = 0, device: str = "auto") -> ModelFootprint:
    return ModelFootprint(name, size, kv, field=f"pool.models[{name}]", device=device)


def devices_of(
    models: list[ModelFootprint], devices: list[DeviceInfo], kv_tokens: int = 0
) -> dict[str, str]:
    return {
        name: placement.device
        for name, placement in place(
            models, devices, target=models[-1].name, kv_tokens=kv_tokens
        ).items()
    }


def test_without_an_accelerator_all_models_are_on_the_cpu_and_nothing_is_warned_of() -> None:
    placed = place([model("a", 1), model("t", 9)], [CPU], target="t", kv_tokens=0)
    assert set(placed.values()) == {Placement("cpu")}


def test_the_largest_goes_first_to_the_freest_device() -> None:
    models = [model("a", 10), model("b", 30), model("t", 60)]
    assert devices_of(models, [gpu(0, 70), gpu(1, 80), CPU]) == {
        "t": "cuda:1",
        "b": "cuda:0",
        "a": "cuda:0",
    }


def test_among_equally_free_devices_the_least_loaded_is_taken() -> None:
    assert devices_of([model("t", 5)], [gpu(0, 50, load=2), gpu(1, 50), CPU]) == {"t": "cuda:1"}


def test_kv_counts_as_well_as_weights() -> None:
    models = [model("a", 10, kv=1), model("t", 10, kv=2)]
    assert devices_of(models, [gpu(0, 60), CPU], kv_tokens=10) == {"t": "cuda:0", "a": "cuda:0"}
    assert devices_of(models, [gpu(0, 60), CPU], kv_tokens=20) == {"t": "cuda:0", "a": "cpu"}


def test_headroom_is_kept() -> None:
    tight = DeviceInfo("cuda:0", 100, 100)
    assert devices_of([model("a", 1), model("t", 95)], [tight, CPU]) == {"t": "cuda:0", "a": "cpu"}


def test_a_drafter_without_room_falls_back_to_the_cpu_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager = DeviceManager([gpu(0, 70), CPU])
    with caplog.at_level(logging.WARNING):
        placed = manager.place([model("a", 20), model("t", 60)], "t")
    assert placed["a"].device == "cpu"
    assert "'a'" in caplog.text
    assert "CPU" in caplog.text


def test_the_target_never_falls_back_by_itself() -> None:
    with pytest.raises(ConfigError) as caught:
        place([model("t", 80)], [gpu(0, 70), CPU], target="t", kv_tokens=0)
    assert caught.value.field == "pool.models[t].device"
    assert "'t'" in caught.value.reason
    assert devices_of([model("t", 80, device="cpu")], [gpu(0, 70), CPU]) == {"t": "cpu"}


def test_a_target_too_large_for_the_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="'t'"):
        place([model("t", 2000)], [CPU], target="t", kv_tokens=0)


def test_a_model_too_large_for_one_device_is_spread_with_room_for_its_kv() -> None:
    placed = place([model("t", 90, kv=1)], [gpu(0, 80), gpu(1, 40), CPU], target="t", kv_tokens=12)
    shares = dict(placed["t"].max_memory)
    assert set(shares) == {"cuda:0", "cuda:1"}
    assert 90 <= sum(shares.values()) <= 120 - 12
    assert shares["cuda:0"] < 80
    assert shares["cuda:1"] < 40


def test_what_a_spread_model_takes_is_charged_to_its_devices() -> None:
    models = [model("a", 15), model("t", 90)]
    assert devices_of(models, [gpu(0, 60), gpu(1, 40), CPU])["a"] == "cpu"
    assert devices_of(models, [gpu(0, 80), gpu(1, 40), CPU])["a"] == "cuda:0"


def test_a_device_that_is_asked_for_is_given_or_refused() -> None:
    devices = [gpu(0, 70), gpu(1, 90), CPU]
    assert devices_of([model("t", 5, device="cuda:0")], devices) == {"t": "cuda:0"}
    assert devices_of([model("t", 5, device="cuda")], devices) == {"t": "cuda:1"}
    for absent, there in (("cuda:2", devices), ("cuda", [CPU])):
        with pytest.raises(ConfigError, match="not available"):
            place([model("t", 5, device=absent)], there, target="t", kv_tokens=0)


def test_this_machine_has_a_cpu_with_memory() -> None:
    cpu = read_devices()[-1]
    assert cpu.name == "cpu"
    assert 0 < cpu.free_bytes <= cpu.total_bytes
