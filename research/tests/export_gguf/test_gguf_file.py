"""GGUF files: read back, they are the checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save
from transformers import AutoModelForCausalLM, AutoTokenizer

from modelpool.checkpoint.bundled import bundled_root
from modelpool.errors import ConfigError
from modelpool.gguf.rotation import frequency_factors
from modelpool.inflate.llama_sizes import shape_of
from research.__main__ import main
from research.export_gguf.gguf_file import Type, export_gguf
from research.export_gguf.llama_tensors import rotated_pairs, sources
from test_support.factories import edit_config, save_llama, save_qwen2

BUNDLED = bundled_root() / "tiny-1m"


def tensors_of(file: Path) -> dict[str, Any]:
    return {one.name: one for one in gguf.GGUFReader(file).tensors}


def laid_out(directory: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors by llama.cpp's names, in its order of rows."""
    weights = load_file(directory / "model.safetensors")
    shape = shape_of(json.loads((directory / "config.json").read_text()))
    return {name: one.laid_out(weights[one.name]) for name, one in sources(shape).items()}


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of float32 weights, so that bfloat16 rounds."""
    folder = tmp_path_factory.mktemp("untied")
    return save_llama(folder, hidden=64, heads=4, kv_heads=2, dtype="float32", tied=False)


@pytest.mark.parametrize("is_bundled", [True, False])
def test_bf16_has_every_tensor_bit_for_bit(untied: Path, is_bundled: bool, tmp_path: Path) -> None:
    source = BUNDLED if is_bundled else untied
    exported = export_gguf(source, tmp_path / "a.gguf")
    found, wanted = tensors_of(exported.path), laid_out(source)
    assert exported.tensors == len(found)
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert found[name].shape.tolist() == list(tensor.shape)[::-1]
        if tensor.ndim == 1:
            assert (found[name].data == tensor.float().numpy()).all()
        else:
            bits = found[name].data.view(np.int16).reshape(tensor.shape)
            assert (bits == tensor.bfloat16().contiguous().view(torch.int16).numpy()).all()


# Of the largest value of a block, how much a step is; the farthest that a value may be from what is
# read, in steps. The end of q4_0's range that has one step less may cost a whole one.
@pytest.mark.parametrize(
    ("written", "steps_of_largest", "farthest"), [("q8_0", 127, 0.5), ("q4_0", 8, 1.0)]
)
def test_quantised_values_are_within_a_step(
    written: Type, steps_of_largest: int, farthest: float, tmp_path: Path
) -> None:
    found = tensors_of(export_gguf(BUNDLED, tmp_path / "a.gguf", written).path)
    kinds = {name: one.tensor_type.name for name, one in found.items()}
    assert kinds["token_embd.weight"] == "Q8_0"
    assert kinds["blk.0.attn_q.weight"] == written.upper()
    assert kinds["output_norm.weight"] == "F32"
    for name, tensor in laid_out(BUNDLED).items():
        values = tensor.float().numpy()
        read = gguf.dequantize(found[name].data, found[name].tensor_type).reshape(values.shape)
        if tensor.ndim == 1:
            assert (read == values).all()
            continue
        steps = np.abs(values.reshape(-1, 32)).max(axis=1, keepdims=True) / steps_of_largest
        # The scale is stored in float16: so many steps of it may be off by 2^-11 of their sum.
        error = np.abs(read - values).reshape(-1, 32)
        assert (error <= (farthest + steps_of_largest * 2**-11) * steps).all()


def test_rows_that_are_no_whole_blocks_stay_bf16(tmp_path: Path) -> None:
    source = save_llama(tmp_path / "s", hidden=40, heads=2, kv_heads=2, layers=1, dtype="float32")
    found = tensors_of(export_gguf(source, tmp_path / "a.gguf", "q4_0").path)
    assert found["blk.0.attn_q.weight"].tensor_type.name == "BF16"


def test_what_llama_cpp_alone_reads(tmp_path: Path) -> None:
    fields = gguf.GGUFReader(export_gguf(BUNDLED, tmp_path / "a.gguf").path).fields
    facts = {name: one.contents() for name, one in fields.items()}
    assert facts["general.file_type"] == 32
    assert facts["tokenizer.ggml.token_type"][:2] == [3, 1]  # <|endoftext|> is a control token
    assert facts["tokenizer.ggml.add_bos_token"] is False
    assert facts["tokenizer.ggml.pre"] == "smollm"


def test_another_reader_of_the_format_computes_the_same_logits(tmp_path: Path) -> None:
    """`transformers` undoes the order of rows by code of its own."""
    export_gguf(BUNDLED, tmp_path / "a.gguf")
    read = AutoModelForCausalLM.from_pretrained(
        str(tmp_path), gguf_file="a.gguf", dtype=torch.float32
    )
    own = AutoModelForCausalLM.from_pretrained(str(BUNDLED), dtype=torch.float32)
    ids = torch.tensor([AutoTokenizer.from_pretrained(str(BUNDLED))("def f(x):")["input_ids"]])
    with torch.no_grad():
        assert torch.equal(read(ids).logits, own(ids).logits)


@pytest.mark.parametrize("heads", [1, 3])
def test_halves_of_a_head_become_neighbours(heads: int) -> None:
    rows = torch.arange(heads * 6.0)[:, None]
    found = rotated_pairs(rows, heads)[:, 0].tolist()
    one_head = [0, 3, 1, 4, 2, 5]
    assert found == [6 * head + row for head in range(heads) for row in one_head]


def test_llama_3_has_its_frequencies(tmp_path: Path, untied: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    source = copy_with(untied, tmp_path / "s", rope_parameters=scaling)
    found = tensors_of(export_gguf(source, tmp_path / "a.gguf").path)["rope_freqs.weight"]
    wanted = frequency_factors(scaling, 16)
    assert wanted is not None
    assert (found.data == wanted.numpy()).all()
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig.from_pretrained(str(source))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500_000.0 ** -(torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(plain / wanted, scaled)


def copy_with(source: Path, target: Path, **changes: Any) -> Path:
    """A checkpoint with another configuration."""
    return edit_config(shutil.copytree(source, target), **changes)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
        ({"attention_bias": True}, "attention_bias is set"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is set"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type is yarn"),
        ({"num_hidden_layers": 3}, "has no tensor model.layers.2."),
        ({"num_hidden_layers": 1}, "tensor model.layers.1.* has no place"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    untied: Path, changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    source = copy_with(untied, tmp_path / "s", **changes)
    with pytest.raises(ConfigError, match=rf"^export-gguf: .*{complaint}"):
        export_gguf(source, tmp_path / "a.gguf")
    assert not list(tmp_path.glob("*a.gguf*"))


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    source = save_qwen2(tmp_path / "s", hidden=64)
    with pytest.raises(ConfigError, match=r"is Qwen2ForCausalLM; only LlamaForCausalLM"):
        export_gguf(source, tmp_path / "a.gguf")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", None),
        ("model.safetensors", None),
        ("model.safetensors", b"\0" * 100),
        ("model.safetensors", save({"a": torch.zeros(1)})),
        ("config.json", b"{"),
        ("config.json", b"[]"),
    ],
)
def test_what_cannot_be_exported_is_told_in_one_line(
    file: str,
    content: bytes | None,
    untied: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, out = copy_with(untied, tmp_path / "s"), tmp_path / "a.gguf"
    (source / file).unlink()
    if content is not None:
        (source / file).write_bytes(content)
    assert main(["export-gguf", str(source), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("specrouter: export-gguf: ")
    assert error.count("\n") == 1
    assert not list(tmp_path.glob("*a.gguf*"))


def test_the_command_names_its_file_by_the_folder_and_the_type(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export-gguf", str(BUNDLED), "--type", "q8_0"]) == 0
    assert (tmp_path / "tiny-1m-q8_0.gguf").is_file()
    assert capsys.readouterr().out.startswith("tiny-1m-q8_0.gguf: ")


def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert main(["export-gguf", str(BUNDLED), "--out", str(tmp_path / "a.gguf")]) == 2
    wanted = "specrouter: export-gguf: needs the package gguf: pip install specrouter[gguf]\n"
    assert capsys.readouterr().err == wanted
