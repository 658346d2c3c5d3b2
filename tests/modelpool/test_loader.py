"""Loading takes safetensors, in the dtype that was asked for, and says whose fault a failure is."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from modelpool import loader
from modelpool.checkpoint.unpacked import Unpacked
from modelpool.config import ModelConfig
from modelpool.device_manager import Placement
from modelpool.fast import lean_forward, sum_order
from modelpool.fast.lean_forward import LeanForward
from modelpool.fast.linear import PackedLinear, can_pack, parameter_count
from modelpool.fast.tuning import PLAIN, Tuning
from modelpool.loader import load_model
from modelpool.packed_model import PackedModel
from test_support.factories import VOCAB_SIZE, edit_weights, save_llama
from tests.modelpool.refused import refused

FIELD = "pool.models[0]"
UP = "model.layers.1.mlp.up_proj.weight"


def config(**options: str) -> ModelConfig:
    return ModelConfig.model_validate({"name": "m", "source": "path:m", **options})


def load(directory: Path, tuning: Tuning = PLAIN) -> PackedModel:
    return load_model(config(), directory, Placement("cpu"), VOCAB_SIZE, FIELD, tuning)


def test_auto_is_the_dtype_of_the_checkpoint(tmp_path: Path) -> None:
    save_llama(tmp_path, dtype="bfloat16")
    model = load(tmp_path)
    assert (model.dtype, model.vocab_size, model.device.type) == (torch.bfloat16, VOCAB_SIZE, "cpu")
    wide = load_model(config(dtype="float64"), tmp_path, Placement("cpu"), VOCAB_SIZE, FIELD)
    assert wide.dtype == torch.float64


def test_weights_in_several_files_are_the_same_model(tmp_path: Path) -> None:
    save_llama(tmp_path, dtype="float32")
    whole = load(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path).save_pretrained(tmp_path, max_shard_size="100KB")
    (tmp_path / "model.safetensors").unlink()
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    divided = load(tmp_path)
    expected = whole.model.state_dict()
    found = divided.model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_weights_that_are_not_whole_name_the_source(tmp_path: Path) -> None:
    file = save_llama(tmp_path) / "model.safetensors"
    edit_weights(tmp_path, lambda weights: weights.pop(UP))
    with refused(f"{FIELD}.source", r"lacks 1 weights, such as .*mlp\.up_proj"):  # none is invented
        load(tmp_path)
    file.write_bytes(file.read_bytes()[:-8])
    with refused(f"{FIELD}.source", "cannot load"):
        load(tmp_path)


def test_a_load_without_memory_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_llama(tmp_path)

    def reading(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(loader, "_read", reading)
    with pytest.raises(torch.OutOfMemoryError):
        load(tmp_path)


@pytest.mark.parametrize("left", ["disk", "cpu"])
def test_a_spread_model_that_its_devices_do_not_hold_has_no_memory(
    left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_llama(tmp_path)
    read = loader._read

    def reading(config: Any, stored: Unpacked, placement: Placement) -> Any:
        found = read(config, stored, Placement("cpu"))
        where = {"model.layers.0": 0, "model.layers.1": left, "lm_head": left}
        vars(found.model)["hf_device_map"] = where
        return found

    monkeypatch.setattr(loader, "_read", reading)
    spread = Placement("cuda:0", (("cuda:0", 10), ("cuda:1", 10)))
    with pytest.raises(torch.OutOfMemoryError, match=r"2 parts .* lm_head"):
        load_model(config(), tmp_path, spread, VOCAB_SIZE, FIELD)


DRAFTER = Tuning(pack_weights=True, lean=True)


class Weights:
    """What `load_model` reads, and the elements that it packs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plain: list[weakref.ref[Tensor]] = []
        self.count = self.packed = 0
        read, pack = loader._read, sum_order.pack

        def reading(*arguments: Any) -> Any:
            found = read(*arguments)
            self.count = parameter_count(found.model)
            linears = [module for module in found.model.modules() if type(module) is nn.Linear]
            self.plain = [weakref.ref(module.weight) for module in linears]
            return found

        def packing(weight: Tensor) -> Tensor:
            self.packed += weight.numel()
            return pack(weight)

        monkeypatch.setattr(loader, "_read", reading)
        monkeypatch.setattr("modelpool.fast.linear.pack", packing)

    def left(self) -> int:
        """Plain weights of linear layers that are still somewhere."""
        gc.collect()
        return sum(weight() is not None for weight in self.plain)


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> Weights:
    return Weights(monkeypatch)


@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="oneDNN without bfloat16")
@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_a_drafters_weights_are_in_memory_once(
    tied: bool, pack: bool, weights: Weights, tmp_path: Path
) -> None:
    save_llama(tmp_path, dtype="bfloat16", tied=tied)
    model = load(tmp_path, Tuning(pack_weights=pack, lean=True))
    assert isinstance(model.shortcut, LeanForward)
    plain = {p for p in model.model.parameters() if not p.is_meta}
    embedding: Any = model.model.get_input_embeddings().weight
    assert weights.left() == tied  # the embedding is looked up, and multiplied with
    assert (
        sum(p.numel() for p in plain) + weights.packed == weights.count + tied * embedding.numel()
    )
    assert model.parameter_count == weights.count
    maps = Path("/proc/self/maps")
    if maps.is_file():
        assert str(tmp_path) not in maps.read_text()


@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="oneDNN without bfloat16")
def test_a_drafter_without_a_lean_forward_is_packed(
    weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_llama(tmp_path, dtype="bfloat16", tied=False)
    monkeypatch.setattr(lean_forward, "check", lambda *_: "it would not do")
    model = load(tmp_path, DRAFTER)
    assert model.shortcut is None
    assert any(isinstance(module, PackedLinear) for module in model.model.modules())
    assert weights.left() == 0
    assert model.parameter_count == parameter_count(model.model) == weights.count
    other = load(tmp_path, Tuning(lean=True))
    assert not any(isinstance(module, PackedLinear) for module in other.model.modules())


def test_packing_that_changes_what_a_drafter_says_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(model: nn.Module, every: bool) -> int:
        for parameter in model.parameters():
            parameter.data = -2 * parameter.data.roll(1, 0)
        return 1

    save_llama(tmp_path)
    monkeypatch.setattr(lean_forward, "check", lambda *_: "it would not do")
    monkeypatch.setattr("modelpool.packed_model.pack_linears", spoil)
    with refused(f"{FIELD}.source", "changes its logits"):
        load(tmp_path, DRAFTER)
