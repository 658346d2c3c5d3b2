"""A checkpoint's headers say what loading it would find."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from modelpool.checkpoint.footprint import read_checkpoint
from modelpool.errors import ConfigError
from test_support.factories import MAX_POSITIONS, VOCAB_SIZE, save_gpt2, save_llama, save_qwen3
from tests.modelpool.refused import refused

FIELD = "pool.models[0]"


@pytest.mark.parametrize("save", [save_llama, save_qwen3, save_gpt2])
def test_parameters_and_bytes_are_those_of_the_loaded_model(
    save: Callable[..., Path], tmp_path: Path
) -> None:
    save(tmp_path, dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    facts = read_checkpoint(tmp_path, field=FIELD)
    assert facts.parameter_count == sum(p.numel() for p in model.parameters())
    assert facts.weight_bytes == 2 * facts.parameter_count
    (layers,) = (part for part in model.modules() if isinstance(part, torch.nn.ModuleList))
    inner = sum(p.nbytes for p in layers.parameters())
    assert facts.weight_bytes - facts.outer_bytes == inner
    assert facts.max_positions == MAX_POSITIONS
    assert facts.vocab_rows == VOCAB_SIZE
    assert facts.eos_token_ids == {0}
    wide = read_checkpoint(tmp_path, field=FIELD, dtype="float32")
    assert wide.weight_bytes == 4 * facts.parameter_count
    assert wide.kv_bytes_per_token == 2 * facts.kv_bytes_per_token


def test_auto_is_the_dtype_that_transformers_would_load(tmp_path: Path) -> None:
    path = save_llama(tmp_path, dtype="float32")
    stored = read_checkpoint(path, field=FIELD)
    assert stored.dtype == "float32"
    file = path / "config.json"
    declared = json.loads(file.read_text())
    for entry, expected in (({"dtype": "bfloat16"}, "bfloat16"), ({}, "float32")):
        for key in ("dtype", "torch_dtype"):
            declared.pop(key, None)
        file.write_text(json.dumps({**declared, **entry}))
        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        facts = read_checkpoint(path, field=FIELD)
        assert facts.dtype == expected == str(model.dtype).removeprefix("torch.")
        assert facts.weight_bytes == sum(p.nbytes for p in model.parameters())


def test_a_quantized_checkpoint_takes_its_stored_bytes_and_kv_of_what_it_computes_in(
    tmp_path: Path,
) -> None:
    plain = read_checkpoint(save_llama(tmp_path, dtype="bfloat16"), field=FIELD)
    file = tmp_path / "config.json"
    quantized = {**json.loads(file.read_text()), "quantization_config": {"quant_method": "fp8"}}
    file.write_text(json.dumps(quantized))
    weights = load_file(tmp_path / "model.safetensors")
    eight = {
        name: tensor.to(torch.float8_e4m3fn) if tensor.ndim == 2 else tensor
        for name, tensor in weights.items()
    }
    save_file(eight, tmp_path / "model.safetensors")
    for dtype in ("auto", "bfloat16"):
        facts = read_checkpoint(tmp_path, field=FIELD, dtype=dtype)
        assert (facts.is_quantized, facts.dtype) == (True, "bfloat16")
        assert facts.weight_bytes == sum(tensor.nbytes for tensor in eight.values())
        assert facts.kv_bytes_per_token == plain.kv_bytes_per_token


def test_a_stored_head_that_is_tied_and_stored_masks_are_no_parameters(tmp_path: Path) -> None:
    path = save_llama(tmp_path, dtype="float32", tied=True)
    before = read_checkpoint(path, field=FIELD)
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.uint8)
    save_file(weights, path / "model.safetensors")
    assert read_checkpoint(path, field=FIELD) == before


def test_a_broken_checkpoint_names_the_source(tmp_path: Path) -> None:
    save_llama(tmp_path)
    for name, content in (("generation_config.json", b"{"), ("model.safetensors", b"\x00")):
        (tmp_path / name).write_bytes(content)
        with refused(f"{FIELD}.source"):
            read_checkpoint(tmp_path, field=FIELD)


LFS_POINTER = b"""\
version https://git-lfs.github.com/spec/v1
oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393
size 15200000
"""


def headed(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


NO_FILE = "is incomplete, or no safetensors file: download it again"


@pytest.mark.parametrize(
    ("kept", "added", "reason"),
    [
        (0, LFS_POINTER, "is a Git LFS pointer, not weights: run `git lfs pull`"),
        (0, b"", NO_FILE),
        (0, b"\x00" * 7, NO_FILE),
        (0, b"<!DOCTYPE html><html>404</html>", NO_FILE),
        (0, headed(b"[" * 200_000), NO_FILE),
        (0, headed(b"[]"), NO_FILE),
        (0, headed(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}'), NO_FILE),
        (0, headed(b'{"a": {"data_offsets": [0, 1%s]}}' % (b"0" * 400)), NO_FILE),
        (1_500_000, b"", r"is incomplete \(1\.5 of 2\.7 MB\): download it again"),
        (-1, b"", "is incomplete"),
        (None, b"\0", "is longer than its header says"),
    ],
)
def test_weights_of_another_length_than_their_header_says_are_refused(
    kept: int | None, added: bytes, reason: str, tmp_path: Path
) -> None:
    file = save_llama(tmp_path, hidden=128) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept] + added)
    with refused(f"{FIELD}.source", f"^{re.escape(repr(str(file)))} {reason}"):
        read_checkpoint(tmp_path, field=FIELD)


def test_a_truncated_part_of_divided_weights_is_named(tmp_path: Path) -> None:
    save_llama(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    last = sorted(tmp_path.glob("model-*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-8])
    with pytest.raises(ConfigError, match=f"{last.name}' is incomplete"):
        read_checkpoint(tmp_path, field=FIELD)
