"""`weights: int8`, and checkpoints that come in int8: what a pool makes of them, and refuses."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Llama4TextConfig

from modelpool.checkpoint.int8_values import read_int8
from modelpool.device_manager import DeviceInfo
from modelpool.fast.int8 import Int8Weight
from modelpool.fast.lean_forward import LeanForward
from modelpool.fast.linear import PackedLinear
from modelpool.fast.quantised import QuantisedLinear
from modelpool.packed_model import PackedModel
from test_support.factories import (
    VOCAB_SIZE,
    make_tokenizer,
    pool_of,
    save_llama,
)
from tests.modelpool.compressed import compress, declare, held_bytes, logits, needs_int8
from tests.modelpool.refused import refused

GIB = 2**30
FIELD = "pool.models[0]"
PLAIN_EXPERTS = "their form cannot be quantised"


def int8_layers(model: PackedModel) -> dict[str, QuantisedLinear]:
    named = model.model.named_modules()
    return {name: each for name, each in named if isinstance(each, QuantisedLinear)}


@needs_int8
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tied", [True, False])
def test_all_linear_layers_are_quantised_at_load(dtype: str, tied: bool, tmp_path: Path) -> None:
    save_llama(tmp_path, dtype=dtype, tied=tied)
    plain = pool_of(tmp_path).get("m")
    pool = pool_of(tmp_path, weights="int8")
    model = pool.get("m")
    assert len(int8_layers(model)) == 2 * 7 + 1
    assert isinstance(model.shortcut, LeanForward)
    assert model.parameter_count == plain.parameter_count == pool.parameter_count("m")
    assert str(model.dtype) == f"torch.{dtype}"
    difference = (logits(model) - logits(plain)).norm() / logits(plain).norm()
    assert 0 < difference < 0.1
    assert pool.plan("m").weights == "int8"


@needs_int8
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_experts_of_another_form_are_counted_as_they_are_kept(weights: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = dict.fromkeys(("hidden_size", "intermediate_size"), 64)
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = Llama4TextConfig(
        vocab_size=VOCAB_SIZE, num_hidden_layers=1, num_local_experts=4, **sizes, **heads
    )
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    make_tokenizer(tmp_path)
    pool = pool_of(tmp_path, weights=weights)
    plan = pool.plan("m")
    assert plan.weights == weights
    assert plan.warning == f"{FIELD}.weights: 'm' keeps its experts in bfloat16: {PLAIN_EXPERTS}"
    assert plan.footprint.weight_bytes == held_bytes(pool.get("m"))


def test_a_gpu_has_no_kernels_for_int8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_llama(tmp_path, dtype="bfloat16")
    devices = DeviceInfo("cuda:0", GIB, GIB), DeviceInfo("cpu", GIB, GIB)
    with refused(f"{FIELD}.weights", "int8 has no kernels on cuda:0"):
        pool_of(tmp_path, *devices, device="auto", weights="int8")
    assert pool_of(tmp_path, *devices, weights="int8").plan("m").weights == "int8"
    compress(tmp_path)
    with refused(f"{FIELD}.weights", "int8 has no kernels on cuda:0"):
        pool_of(tmp_path, *devices, device="auto")
    monkeypatch.setattr("modelpool.member.quantised_refusal", lambda: "no VNNI")
    with refused(f"{FIELD}.weights", "int8 has no kernels on cuda:0"):
        pool_of(tmp_path, *devices, device="auto")


@pytest.mark.parametrize("stored", [True, False])
def test_a_cpu_that_cannot_sum_int8_keeps_weights_plain_and_says_so(
    stored: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    save_llama(tmp_path, dtype="bfloat16", tied=False)
    if stored:
        compress(tmp_path)
    for place in ("member", "placed_members"):
        monkeypatch.setattr(f"modelpool.{place}.quantised_refusal", lambda: "no VNNI")
    monkeypatch.setattr("modelpool.member.exact_kernels", lambda: None)
    with caplog.at_level(logging.WARNING):
        pool = pool_of(tmp_path, dtype="bfloat16", weights="auto" if stored else "int8")
    plan = pool.plan("m")
    assert plan.weights == "plain"
    assert plan.int8_read_bytes is None
    said = f"{FIELD}.weights: no VNNI: 'm' keeps them in bfloat16"
    assert said in (plan.warning or "")
    assert said in caplog.text
    assert plan.footprint.weight_bytes == 2 * pool.parameter_count("m")
    assert not int8_layers(pool.get("m"))


@needs_int8
def test_weights_that_change_the_model_too_much_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_llama(tmp_path, dtype="bfloat16")
    multiply = QuantisedLinear.forward
    monkeypatch.setattr(QuantisedLinear, "forward", lambda self, x: multiply(self, x).mul_(1.2))
    with refused(f"{FIELD}.weights", "int8 changes its logits"):
        pool_of(tmp_path, weights="int8").get("m")


@needs_int8
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_compressed_checkpoint_is_served_with_its_own_levels(dtype: str, tmp_path: Path) -> None:
    tensors = compress(save_llama(tmp_path, dtype=dtype, tied=False))
    pool = pool_of(tmp_path)
    model = pool.get("m")
    layers = int8_layers(model)
    scaled = [name.removesuffix(".weight_scale") for name in tensors if name.endswith("scale")]
    assert sorted(layers) == sorted(scaled)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    _, values = read_int8(tmp_path)
    name = "model.layers.1.self_attn.k_proj"
    assert torch.equal(values[name].levels, tensors[f"{name}.weight"])
    assert torch.equal(layers[name](x), Int8Weight(values[name], None).multiply(x))
    assert isinstance(model.model.lm_head, PackedLinear | nn.Linear)
    assert isinstance(model.shortcut, LeanForward)
    plan = pool.plan("m")
    stored = sum(t.nbytes for name, t in tensors.items() if not name.endswith("_scale"))
    scales = sum(4 * t.numel() for name, t in tensors.items() if name.endswith("_scale"))
    assert plan.footprint.weight_bytes == stored + scales
    assert plan.footprint.parameter_count == model.parameter_count
    every = pool_of(tmp_path, weights="int8").get("m")
    assert set(int8_layers(every)) == {*layers, "lm_head"}


def test_what_transformers_quantises_is_not_quantised_again(tmp_path: Path) -> None:
    declare(save_llama(tmp_path, dtype="bfloat16"), {"quant_method": "bitsandbytes"})
    with refused(f"{FIELD}.weights", "quantised already"):
        pool_of(tmp_path, weights="int8")
