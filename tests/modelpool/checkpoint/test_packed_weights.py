"""AWQ, GPTQ, compressed-tensors and FP8 are read as the numbers that they stand for."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from modelpool.checkpoint import packed_weights
from modelpool.checkpoint.cache_dir import cache_dir
from modelpool.checkpoint.footprint import read_checkpoint, read_config
from modelpool.checkpoint.headers import header_of
from modelpool.checkpoint.quantization import packing_of
from modelpool.fast.panels import BlockWeight
from modelpool.fast.quantised import QuantisedLinear
from specrouter import LLM
from test_support.factories import edit_weights, pool_of
from tests.modelpool.checkpoint.packers import FORMATS, check_same, checkpoints, same_weights
from tests.modelpool.compressed import held_bytes, logits, needs_quantised
from tests.modelpool.refused import refused

FIELD = "pool.models[0]"
LAYER = "model.layers.1.mlp.up_proj"


def loaded_alike(stored: Path, plain: Path, dtype: str = "bfloat16") -> Mapping[str, Tensor]:
    """The weights of both."""
    return same_weights([pool_of(one, dtype=dtype, pack_weights=False) for one in (stored, plain)])


@pytest.mark.parametrize("name", FORMATS)
def test_the_weights_are_those_of_the_format_s_own_formula(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weights, "_AT_ONCE", 64 * 40)  # so that a layer has several parts
    stored, plain = checkpoints(FORMATS[name], tmp_path)
    for dtype in ("float32", *["bfloat16"] * (name in ("awq", "fp8"))):
        check_same(stored, plain, dtype, 1e-6 if name == "fp8" and dtype == "float32" else 0.0)
    assert not list((cache_dir() / "unpacked").iterdir())


@pytest.mark.parametrize("name", ["awq", "gptq", "packed", "fp8"])
def test_experts_are_read_one_by_one(name: str, tmp_path: Path) -> None:
    stored, plain = checkpoints(FORMATS[name], tmp_path, Qwen3MoeConfig)
    assert any(one.dim() == 3 for one in loaded_alike(stored, plain).values())


@needs_quantised
@pytest.mark.parametrize(
    "name",
    ["awq", "gptq", "gptq-2-bits", "gptq-channel", "packed", "packed-channel", "packed-old-zeros"],
)
def test_groups_of_four_bits_stay_where_that_is_asked(name: str, tmp_path: Path) -> None:
    stored, plain = checkpoints(FORMATS[name], tmp_path)
    pool, exact = pool_of(stored, weights="exact"), dict[str, BlockWeight]()
    packed = pool.get("m")
    for layer, one in packed.model.named_modules():
        if isinstance(one, QuantisedLinear) and not one.roundings:
            assert isinstance(one.shared, BlockWeight)
            exact[layer] = one.shared
    assert len(exact) == 14
    assert "weights are as they are" in str(pool.plan("m").warning)
    assert pool.plan("m").footprint.weight_bytes == pytest.approx(held_bytes(packed), rel=0.03)
    wanted = logits(pool_of(plain, dtype="float32").get("m"))
    assert float((logits(packed) - wanted).norm() / wanted.norm()) < 0.05


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_have_the_format_s_own_values(name: str, tmp_path: Path) -> None:
    """Those of other orders, numbers and groups are in none."""
    stored, plain = checkpoints(FORMATS[name], tmp_path)
    packing = packing_of(read_config(stored, trust_remote_code=False))
    assert packing is not None
    tensor = load_file(stored / "model.safetensors").__getitem__
    found = packed_weights.packed_weights(header_of(stored / "model.safetensors"), packing)
    values = {one: each.blocks(tensor) if each.has_blocks else None for one, each in found.items()}
    assert len(values) == 14
    are_there = name in {
        "awq", "gptq", "gptq-2-bits", "gptq-channel", "gptq-v2", "packed", "packed-channel",
        "packed-zeros", "packed-old-zeros", "packed-unordered",
    }  # fmt: skip
    assert all((one is not None) == are_there for one in values.values())
    wanted = load_file(plain / "model.safetensors")
    for key, one in values.items():
        if one is not None:
            assert torch.equal(one.plain(), wanted[key].float())


@pytest.mark.parametrize("kind", ["plain", "gptq-8-bits"])
def test_exact_is_for_what_has_four_bits(kind: str, tmp_path: Path) -> None:
    stored, plain = checkpoints(FORMATS["gptq-8-bits"], tmp_path)
    with refused("pool.models[0].weights", "exact keeps blocks, and the checkpoint has none"):
        pool_of(plain if kind == "plain" else stored, weights="exact")


@needs_quantised
@pytest.mark.parametrize("stem", ["model.language_model.", "language_model.model."])
def test_so_do_those_of_a_composite(stem: str, tmp_path: Path) -> None:
    """Beside a bias of zeros: both have the composite's names."""
    stored, _ = checkpoints(FORMATS["gptq-channel"], tmp_path)
    tensors = load_file(stored / "model.safetensors") | {f"{LAYER}.bias": torch.zeros(128).half()}
    named = {re.sub(r"^model\.", stem, name): one for name, one in tensors.items()}
    save_file(named, stored / "model.safetensors", {"format": "pt"})
    text = json.loads((stored / "config.json").read_text())
    composite = {
        "model_type": "mistral3", "quantization_config": text.pop("quantization_config"),
        "text_config": text, "tie_word_embeddings": False,
    }  # fmt: skip
    (stored / "config.json").write_text(json.dumps(composite))
    model = pool_of(stored, weights="exact").get("m").model
    found = [one for one in model.modules() if isinstance(one, QuantisedLinear)]
    assert sum(not one.roundings for one in found) == 14


def test_texts_are_those_of_the_plain_model(tmp_path: Path) -> None:
    stored, plain = checkpoints(FORMATS["gptq-by-activation"], tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(str(plain), dtype=torch.float64)
    model.generation_config.eos_token_id = None
    prompt = [5, 17, 101, 250]
    wanted = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
    settings = {"pool.models[0].dtype": "float64", "engine.preload": False}
    with LLM(str(stored), set=settings) as llm:
        [found] = llm.generate([prompt], max_tokens=24, temperature=0, ignore_eos=True)
    assert found.token_ids == wanted[0, len(prompt) :].tolist()


def test_biases_of_zeros_that_the_model_does_not_have_are_left_out(tmp_path: Path) -> None:
    """Old ones of AutoGPTQ have one in each layer."""
    stored, plain = checkpoints(FORMATS["gptq"], tmp_path)
    edit_weights(stored, lambda all_: all_.update({f"{LAYER}.bias": torch.zeros(128).half()}))
    loaded_alike(stored, plain)
    edit_weights(stored, lambda all_: all_.update({f"{LAYER}.bias": torch.ones(128).half()}))
    with refused(f"{FIELD}.source", f"has no {LAYER}.bias"):
        pool_of(stored).get("m")


@pytest.mark.parametrize(
    ("name", "key", "dtype", "reason"),
    [
        ("fp8", "experts.gate_up_proj", torch.float8_e4m3fn, "has FP8 tensors in experts, which"),
        ("awq", "model.odd", torch.uint16, "has model.odd in U16, which is not read"),
    ],
)
def test_tensors_that_are_no_layer_s_are_named(
    name: str, key: str, dtype: torch.dtype, reason: str, tmp_path: Path
) -> None:
    stored, _ = checkpoints(FORMATS[name], tmp_path)
    edit_weights(stored, lambda all_: all_.update({key: torch.zeros(2, 4, 8).to(dtype)}))
    with refused(f"{FIELD}.source", reason):
        read_checkpoint(stored, field=FIELD)


def test_a_full_disk_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, _ = checkpoints(FORMATS["awq"], tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**4))
    with refused(f"{FIELD}.source", r"it takes 0\.\d+ GB while it is loaded, and 0.00 GB are free"):
        pool_of(stored).get("m")


@pytest.mark.parametrize(
    ("name", "missing", "there"),
    [
        ("awq", "qzeros", "qweight"),
        ("awq", "scales", "qweight"),
        ("gptq", "qweight", "qzeros"),
        ("gptq-by-activation", "g_idx", "qweight"),
        ("packed", "weight_scale", "weight_packed"),
        ("packed-zeros", "weight_zero_point", "weight_packed"),
        ("packed-ordered", "weight_g_idx", "weight_packed"),
        ("fp8", "weight_scale_inv", "weight"),
        ("fp8", "weight", "weight_scale_inv"),
    ],
)
def test_a_missing_tensor_is_named(name: str, missing: str, there: str, tmp_path: Path) -> None:
    stored, _ = checkpoints(FORMATS[name], tmp_path)
    edit_weights(stored, lambda all_: all_.pop(f"{LAYER}.{missing}"))
    with refused(f"{FIELD}.source", f"has {LAYER}.{there}, and no {LAYER}.{missing}"):
        read_checkpoint(stored, field=FIELD)


@pytest.mark.parametrize(
    ("name", "part", "change", "reason"),
    [
        ("awq", "qzeros", lambda one: one[1:], r"qzeros is \[1, 16\], and not \[2, 16\]"),
        ("awq", "qweight", lambda one: one.flatten(), "is .*, and no matrix"),
        ("gptq", "qweight", lambda one: one.long(), "in I64, and not I32"),
        ("gptq", "g_idx", lambda one: one[1:], r"g_idx is \[63\], and not \[64\]"),
        ("packed", "weight_scale", lambda one: one.int(), "in I32, and not F16 or BF16 or F32"),
        ("fp8", "weight_scale_inv", lambda one: one[1:], "weight_scale_inv is"),
        ("fp8", "weight", lambda one: one.float(), "weight is in F32, and not F8_E4M3"),
    ],
)
def test_tensors_that_do_not_fit_together_are_named(
    name: str, part: str, change: Callable[[Tensor], Tensor], reason: str, tmp_path: Path
) -> None:
    stored, _ = checkpoints(FORMATS[name], tmp_path)
    key = f"{LAYER}.{part}"
    edit_weights(stored, lambda all_: all_.update({key: change(all_[key]).contiguous()}))
    with refused(f"{FIELD}.source", f"{LAYER}.*{reason}"):
        read_checkpoint(stored, field=FIELD)


def test_a_group_that_is_not_there_is_refused(tmp_path: Path) -> None:
    stored, _ = checkpoints(FORMATS["gptq"], tmp_path)
    edit_weights(stored, lambda all_: all_[f"{LAYER}.g_idx"].fill_(2))
    with refused(f"{FIELD}.source", f"{LAYER}.g_idx has a group that is none of 0 to 1"):
        pool_of(stored).get("m")


def test_padded_weights_are_refused(tmp_path: Path) -> None:
    stored, _ = checkpoints(FORMATS["packed"], tmp_path)
    edit_weights(stored, lambda all_: all_[f"{LAYER}.weight_shape"].sub_(1))
    with refused(f"{FIELD}.source", f"{LAYER}.weight_shape says .* padded weights are not read"):
        pool_of(stored).get("m")
