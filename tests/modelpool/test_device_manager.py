"""Placement, on devices that were made up."""

import pytest
import torch
from accelerate import infer_auto_device_map
from transformers import LlamaConfig, LlamaForCausalLM

from modelpool.checkpoint.footprint import ModelFootprint
from modelpool.device_manager import (
    DeviceInfo,
    bytes_by_device,
    place,
)
from modelpool.errors import ConfigError
from tests.modelpool.refused import refused

CPU = DeviceInfo("cpu", 1000, 1000)


def gpu(index: int, free: int, load: int = 0) -> DeviceInfo:
    return DeviceInfo(f"cuda:{index}", free, 0, load)  # no total: all that is free is usable


def model(name: str, size: int, kv: int = 0, device: str = "auto") -> ModelFootprint:
    return ModelFootprint(
        name=name,
        weight_bytes=size,
        kv_bytes_per_token=kv,
        field=f"pool.models[{name}]",
        device=device,
    )


def size(tensor: torch.Tensor) -> int:
    return tensor.nbytes


def devices_of(
    models: list[ModelFootprint], devices: list[DeviceInfo], kv_tokens: int = 0
) -> dict[str, str]:
    return {
        name: placement.device
        for name, placement in place(
            models, devices, target=models[-1].name, kv_tokens=kv_tokens
        ).items()
    }


def test_the_largest_goes_first_to_the_freest_device() -> None:
    models = [model("a", 10), model("b", 30), model("t", 60)]
    assert devices_of(models, [gpu(0, 70), gpu(1, 80), CPU]) == {
        "t": "cuda:1",
        "b": "cuda:0",
        "a": "cuda:0",
    }


def test_headroom_is_kept() -> None:
    tight = DeviceInfo("cuda:0", 100, 100)
    assert devices_of([model("a", 1), model("t", 95)], [tight, CPU]) == {"t": "cuda:0", "a": "cpu"}


def test_a_drafter_without_room_falls_back_to_the_cpu_with_a_warning() -> None:
    models = [model("a", 20), model("t", 60)]
    placed = place(models, [gpu(0, 70), CPU], target="t", kv_tokens=0)["a"]
    assert placed.device == "cpu"
    assert "no room for 'a'" in str(placed.warning)
    assert "it runs on the CPU" in str(placed.warning)


def test_the_target_never_falls_back_by_itself() -> None:
    with refused("pool.models[t].device", "'t'"):
        place([model("t", 80)], [gpu(0, 70), CPU], target="t", kv_tokens=0)
    assert devices_of([model("t", 80, device="cpu")], [gpu(0, 70), CPU]) == {"t": "cpu"}


def test_a_target_too_large_for_the_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="'t'"):
        place([model("t", 2000)], [CPU], target="t", kv_tokens=0)


@pytest.mark.parametrize(("weights", "kv"), [(90, 12), (90, 30), (50, 50), (10, 99)])
def test_each_part_of_a_spread_model_leaves_room_for_its_own_kv(weights: int, kv: int) -> None:
    free = {"cuda:0": 8000, "cuda:1": 4000}
    devices = [*(DeviceInfo(name, room, 0) for name, room in free.items()), CPU]
    large = model("t", 100 * weights, kv=1)
    placed = place([large], devices, target="t", kv_tokens=100 * kv)
    most = dict(placed["t"].max_memory)
    assert most.keys() == free.keys()
    assert sum(most.values()) >= 100 * weights - len(most)  # they are rounded down
    for name, part in most.items():  # KV is where the layers are
        assert part + part * kv // weights <= free[name]


@pytest.mark.parametrize("rooms", [(0.7, 0.7), (0.9, 0.5), (0.5, 0.9), (0.5, 0.5, 0.5)])
def test_accelerate_puts_no_more_on_a_device_than_its_weights_and_kv_have_room_for(
    rooms: tuple[float, ...],
) -> None:
    config = LlamaConfig(vocab_size=1000, hidden_size=64, intermediate_size=172)
    with torch.device("meta"):
        llama = LlamaForCausalLM(config)
    weights, kv = sum(map(size, llama.parameters())), 10_000_000
    need = weights + kv
    layers = sum(map(size, llama.model.layers.parameters()))
    large = ModelFootprint(
        name="t", weight_bytes=weights, kv_bytes_per_token=1, outer_bytes=weights - layers
    )
    devices = [gpu(index, int(room * need)) for index, room in enumerate(rooms)]
    placed = place([large], [*devices, CPU], target="t", kv_tokens=kv)["t"]
    most = {int(name.removeprefix("cuda:")): part for name, part in placed.max_memory}
    where = infer_auto_device_map(llama, most, no_split_module_classes=["LlamaDecoderLayer"])
    taken = dict.fromkeys(range(len(rooms)), 0)
    for name, index in where.items():
        is_layer = name.startswith("model.layers.")
        kv_bytes = kv // config.num_hidden_layers if is_layer else 0
        taken[index] += sum(map(size, llama.get_submodule(name).parameters())) + kv_bytes
    assert all(taken[index] <= device.free_bytes for index, device in enumerate(devices))
    charged = bytes_by_device(placed, large, kv)
    for index, device in enumerate(devices):  # to within the layers that do not divide
        assert charged.get(device.name, 0) == pytest.approx(taken[index], abs=0.15 * need)


def test_a_device_that_is_asked_for_is_given_or_refused() -> None:
    devices = [gpu(0, 70), gpu(1, 90), CPU]
    assert devices_of([model("t", 5, device="cuda:0")], devices) == {"t": "cuda:0"}
    assert devices_of([model("t", 5, device="cuda")], devices) == {"t": "cuda:1"}
    for absent, there in (("cuda:2", devices), ("cuda", [CPU])):
        with pytest.raises(ConfigError, match="not available"):
            place([model("t", 5, device=absent)], there, target="t", kv_tokens=0)
