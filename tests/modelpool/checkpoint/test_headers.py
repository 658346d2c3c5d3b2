"""What headers say of the weights that a token reads."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from modelpool.checkpoint.footprint import Kept, read_checkpoint
from modelpool.checkpoint.headers import StoredParameter, weight_bytes
from test_support.factories import save_llama

FIELD = "pool.models[0]"


def test_reads_are_of_layers_and_head_alone(tmp_path: Path) -> None:
    for tied in (True, False):
        path = save_llama(tmp_path / str(tied), dtype="bfloat16", tied=tied)
        facts = read_checkpoint(path, field=FIELD)
        table = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
        assert facts.read_bytes == facts.weight_bytes - (0 if tied else table.nbytes) - 2 * 32
        assert facts.int8_read_bytes is not None
        assert 0.5 < facts.int8_read_bytes / facts.read_bytes < 0.6
        small = read_checkpoint(path, field=FIELD, kept=Kept("int8"))
        assert small.read_bytes == facts.int8_read_bytes


def test_experts_read_what_the_token_chooses(tmp_path: Path) -> None:
    path = save_llama(tmp_path, dtype="bfloat16")
    weights = load_file(path / "model.safetensors")
    weights["model.layers.0.mlp.experts.0.up_proj.weight"] = torch.ones(8, 8)
    save_file(weights, path / "model.safetensors")
    facts = read_checkpoint(path, field=FIELD)
    assert (facts.read_bytes, facts.int8_read_bytes) == (None, None)


def test_a_tied_head_in_int8_is_a_copy() -> None:
    table = StoredParameter("model.embed_tokens.weight", "BF16", (100, 8))
    layer = StoredParameter("model.layers.0.mlp.up_proj.weight", "BF16", (16, 8))
    norm = StoredParameter("model.layers.0.norm.weight", "BF16", (8,))
    parts = [table, layer, norm]
    plain = weight_bytes(parts, 2, tied_rows=100)
    assert (plain.total, plain.outer, plain.read) == (2 * 936, 1600, 2 * 936)
    small = weight_bytes(
        parts, 2, lambda one: one.int8_bytes if one.is_linear else None, tied_rows=100
    )
    head, inner = 100 * 8 + 4 * 100, 16 * 8 + 4 * 16 + 2 * 8
    assert (small.total, small.outer, small.read) == (
        1600 + head + inner,
        1600 + head,
        head + inner,
    )
