"""Inflation changes what a model costs and nothing that it says."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from modelpool.inflate.inflate import inflate, inflate_to
from modelpool.inflate.llama_sizes import Growth, realistic_growth
from test_support.factories import VOCAB_SIZE, edit_config, save_llama
from tests.modelpool.refused import refused


def float64_norm(self: LlamaRMSNorm, hidden: torch.Tensor) -> torch.Tensor:
    variance = hidden.pow(2).mean(-1, keepdim=True)
    return self.weight * (hidden * torch.rsqrt(variance + self.variance_epsilon))


@pytest.fixture
def exact_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """RMSNorm computes in float32 whatever the model's dtype, and would hide a difference."""
    monkeypatch.setattr(LlamaRMSNorm, "forward", float64_norm)


def load(path: Path) -> Any:
    """In evaluation mode, as `from_pretrained` leaves it."""
    return AutoModelForCausalLM.from_pretrained(path)


SHAPES: dict[str, dict[str, Any]] = {
    "as it was": {"width_exponent": 0, "layers": 2, "mlp": 64},
    "wider": {"width_exponent": 2, "layers": 2, "mlp": 64},
    "deeper": {"width_exponent": 0, "layers": 5, "mlp": 64},
    "larger MLP": {"width_exponent": 0, "layers": 2, "mlp": 200},
    "all of it": {"width_exponent": 1, "layers": 4, "mlp": 300},
}


@pytest.mark.usefixtures("exact_norm")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_the_function_is_unchanged(shape: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    source = save_llama(tmp_path / "source", tied=tied)
    new = inflate(source, tmp_path / "out", Growth(**shape), dtype="float64")
    before, after = load(source), load(tmp_path / "out")
    assert sum(p.numel() for p in after.parameters()) == new.parameter_count
    tokens = torch.arange(40).unsqueeze(0) * 7 % VOCAB_SIZE
    with torch.inference_mode():
        difference = (before(tokens).logits - after(tokens).logits).abs().max()
        assert difference <= 1e-12
        options = {"max_new_tokens": 40, "do_sample": False}
        assert torch.equal(
            before.generate(tokens[:, :9], **options), after.generate(tokens[:, :9], **options)
        )


def test_inflate_to_reaches_what_was_asked_for_and_little_more(tmp_path: Path) -> None:
    source = save_llama(tmp_path / "source", hidden=48, heads=2, kv_heads=1, dtype="bfloat16")
    shape = inflate_to(source, tmp_path / "out", 12_000_000)
    stored = sum(t.numel() for t in load_file(tmp_path / "out" / "model.safetensors").values())
    assert stored == shape.parameter_count
    assert shape.parameter_count >= 12_000_000
    assert (shape.hidden, shape.mlp, shape.query_heads, shape.kv_heads) == (768, 3072, 32, 16)
    at_200m = realistic_growth(shape, 200_000_000).of(shape)
    assert 200_000_000 <= at_200m.parameter_count < 215_000_000


@pytest.mark.parametrize("heads", [{"num_attention_heads": 3}, {"num_key_value_heads": 3}])
def test_heads_that_do_not_divide_are_refused(heads: dict[str, int], tmp_path: Path) -> None:
    source = edit_config(save_llama(tmp_path / "source"), **heads)
    with refused("source", "heads, of 32 .hidden.: they do not divide"):
        inflate_to(source, tmp_path / "out", 12_000_000)


def test_the_source_is_never_overwritten(tmp_path: Path) -> None:
    source = save_llama(tmp_path / "source")
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "model.safetensors").symlink_to(source / "model.safetensors")
    (tmp_path / "hard").mkdir()
    (tmp_path / "hard" / "tokenizer.json").hardlink_to(source / "tokenizer.json")
    itself = (source, source / ".." / "source", tmp_path / "link")
    for out in (*itself, tmp_path / "linked", tmp_path / "hard"):
        with refused("out"):
            inflate(source, out, Growth(**SHAPES["wider"]))
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before
    inflate(source, source / "tokenizer-and-model", Growth(**SHAPES["wider"]))  # no file of it
    inflate(source, source / "tokenizer-and-model", Growth(**SHAPES["wider"]))
    assert (source / "tokenizer-and-model" / "tokenizer.json").is_file()


def test_what_a_checkpoint_leaves_out_or_has_beside_its_weights(tmp_path: Path) -> None:
    source = save_llama(tmp_path / "source")
    settings = json.loads((source / "config.json").read_text())
    assert settings.pop("rms_norm_eps") == 1e-6
    (source / "config.json").write_text(json.dumps(settings))
    other = {"model.norm.weight": torch.zeros(32)}
    save_file(other, source / "original.safetensors")
    inflate(source, tmp_path / "out", Growth(**SHAPES["wider"]))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rms_norm_eps"] == 1e-6 / 16
    assert load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"].any()
