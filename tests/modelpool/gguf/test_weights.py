"""GGUF files as members of a pool: their logits are those of the weights that the file has."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from modelpool import loader
from modelpool.checkpoint.block_values import BLOCK_BYTES, BlockValues
from modelpool.fast.experts import QuantisedExperts
from modelpool.fast.panels import BlockWeight
from modelpool.fast.quantised import QuantisedLinear
from modelpool.gguf import weights as gguf_weights
from modelpool.kernels.library import c_library
from modelpool.packed_model import PackedModel
from test_support.factories import pool_of
from tests.modelpool.compressed import held_bytes, logits, needs_quantised
from tests.modelpool.gguf.files import (
    FAMILIES,
    MIXTURES,
    QUANTISED,
    SCALED,
    drawn_blocks,
    reference,
    save,
    write,
)
from tests.modelpool.refused import refused


def forms(model: PackedModel) -> dict[str, str]:
    """What each linear layer was rounded to."""
    named = model.model.named_modules()
    found = {name: each for name, each in named if isinstance(each, QuantisedLinear)}
    return {name: each.roundings[0][0] for name, each in found.items() if each.roundings}


def difference(packed: PackedModel, model: Any) -> float:
    """Of the logits of a few tokens, over those of `model`."""
    tokens = (torch.arange(9) * 7919 + 11) % packed.vocab_size
    with torch.inference_mode():
        wanted = model(input_ids=tokens[None], use_cache=False).logits[0].float()
    return float((logits(packed) - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    ("family", "kind"),
    [(family, "Q8_0") for family in FAMILIES]
    + [("llama", kind) for kind in ("F32", "F16", "BF16", "Q4_0")],
)
def test_in_float32_the_logits_are_those_of_the_file(
    family: str, kind: str, tmp_path: Path
) -> None:
    save(family, tmp_path / "m")
    file = write(family, tmp_path / "m", tmp_path / "m.gguf", kind)
    packed = pool_of(file, dtype="float32").get("m")
    assert not forms(packed)
    assert difference(packed, reference(family, tmp_path / "m", file)) < 1e-5


@needs_quantised
@pytest.mark.parametrize("kind", BLOCK_BYTES)
def test_blocks_have_the_file_s_values(kind: str) -> None:
    drawn = np.random.default_rng(0).standard_normal((70, 512), np.float32)
    stored = (
        drawn_blocks(kind, drawn)
        if kind in SCALED
        else gguf.quantize(drawn, gguf.GGMLQuantizationType[kind])
    )
    library = c_library()
    assert library is not None
    found = BlockValues.of(kind, stored, library)
    wanted = gguf.dequantize(stored, gguf.GGMLQuantizationType[kind])
    assert found is not None
    assert torch.equal(found.plain(), torch.from_numpy(wanted))


@needs_quantised
@pytest.mark.parametrize("kind", [*QUANTISED, *SCALED])
def test_every_type_is_read_and_kept_in_as_many_bits(kind: str, tmp_path: Path) -> None:
    """In float32 as they are. Rounded, the error is that of a model without training, whose layers
    are loud."""
    save("llama", tmp_path / "m", hidden=256, dtype="float32", tied=False)
    file = write("llama", tmp_path / "m", tmp_path / "m.gguf", kind)
    model = reference("llama", tmp_path / "m", file)
    plain = pool_of(file, dtype="float32").get("m")
    assert difference(plain, model) < 1e-5
    in_blocks = kind in BLOCK_BYTES
    if in_blocks:
        pool = pool_of(file)
        said, exact = pool.plan("m").footprint.weight_bytes, pool.get("m")
        assert said == pytest.approx(held_bytes(exact), rel=0.03)
        linears = [one for one in exact.model.modules() if isinstance(one, QuantisedLinear)]
        assert len(linears) == 2 * 7 + 1
        assert all(isinstance(one.shared, BlockWeight) for one in linears)
        assert not forms(exact)
        assert difference(exact, model) < 0.2
    is_int4 = kind.strip("IQ")[0] in "234"
    pool = pool_of(file, weights=("int4" if is_int4 else "int8") if in_blocks else "auto")
    said, rounded = pool.plan("m").footprint.weight_bytes, pool.get("m")
    assert said == pytest.approx(held_bytes(rounded), rel=0.03)
    found = forms(rounded)
    assert set(found.values()) <= ({"int4", "int8"} if is_int4 else {"int8"})
    assert len(found) == 2 * 7 + 1
    assert ("int4" in found.values()) == is_int4
    assert difference(rounded, model) < (0.6 if is_int4 else 0.2)


@needs_quantised
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_are_never_plain_and_compute_what_they_did(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a plain model is loaded, and then quantised."""
    save(family, tmp_path / "m", hidden=256)
    file = write(family, tmp_path / "m", tmp_path / "m.gguf", "Q5_0")
    made_plain = list[str]()
    values = gguf_weights._values

    def noted(stored: Any, kind: str) -> torch.Tensor:
        made_plain.extend([kind] if kind in BLOCK_BYTES else [])
        return values(stored, kind)

    monkeypatch.setattr(gguf_weights, "_values", noted)
    found = logits(pool_of(file, weights="exact", dtype="float32").get("m"))
    assert not made_plain
    monkeypatch.setattr(loader, "_keeps_blocks", lambda *_: False)
    assert torch.equal(logits(pool_of(file, weights="exact", dtype="float32").get("m")), found)
    assert made_plain


@needs_quantised
@pytest.mark.parametrize(("kind", "weights"), [("Q8_0", "int8"), ("Q4_0", "int4")])
def test_rounded_weights_are_those_of_a_checkpoint_in_bfloat16(
    kind: str, weights: str, tmp_path: Path
) -> None:
    save("qwen3", tmp_path / "m", hidden=64)
    file = write("qwen3", tmp_path / "m", tmp_path / "m.gguf", kind)
    model = reference("qwen3", tmp_path / "m", file)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "m")
    of_file = pool_of(file, dtype="bfloat16", weights=weights).get("m")
    of_checkpoint = pool_of(tmp_path / "m", dtype="bfloat16", weights=weights).get("m")
    assert torch.equal(logits(of_file), logits(of_checkpoint))


@needs_quantised
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("weights", ["auto", "int4"])
def test_layers_of_more_bits_stay_in_int8_beside_those_in_four(
    family: str, weights: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(family, tmp_path / "m", hidden=256)
    file = write(
        family,
        tmp_path / "m",
        tmp_path / "m.gguf",
        lambda name: "Q6_K" if "down" in name or "attn_v" in name else "Q4_0",
    )
    pool = pool_of(file, weights=weights)
    with caplog.at_level(logging.INFO):
        packed = pool.get("m")
    found = forms(packed)
    said = [one for one in caplog.messages if "rounded to" in one]
    if weights == "auto":  # all stay as they are
        assert not found
        return
    narrow = [each for each in ("gate", "o_proj", "q_proj") if any(each in name for name in found)]
    assert narrow == ["gate", "o_proj", "q_proj"]
    assert {kept for name, kept in found.items() if "down" in name or "v_proj" in name} == {"int8"}
    assert any("rounded to int4, mean relative error 0.0" in one for one in said)
    assert any("rounded to int8, mean relative error 0.00" in one for one in said)


def test_a_split_file_is_one_model(tmp_path: Path) -> None:
    save("qwen2", tmp_path / "m")
    write("qwen2", tmp_path / "m", tmp_path / "m.gguf", "Q8_0", split=10)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) > 1
    for number, part in enumerate(parts):  # as the hub's cache has files
        part.symlink_to(part.rename(tmp_path / f"blob{number}"))
    packed = pool_of(parts[0], dtype="float32").get("m")
    assert difference(packed, reference("qwen2", tmp_path / "m", *parts)) < 1e-5


@needs_quantised
@pytest.mark.parametrize("family", MIXTURES)
def test_experts_are_kept_as_their_types_say(family: str, tmp_path: Path) -> None:
    """Those of a layer in one tensor, of which the second projection may have more bits."""
    save(family, tmp_path / "m", hidden=256, layers=1)

    def kind(name: str) -> str:
        return "Q6_K" if "down" in name else "Q4_0"

    file = write(family, tmp_path / "m", tmp_path / "m.gguf", kind)
    model = reference(family, tmp_path / "m", file)
    assert difference(pool_of(file, dtype="float32").get("m"), model) < 1e-5
    for weights, narrow in (("auto", []), ("int4", ["int4"] * 4 + ["int8"] * 4)):
        pool = pool_of(file, weights=weights)
        packed = pool.get("m")
        [experts] = [one for one in packed.model.modules() if isinstance(one, QuantisedExperts)]
        assert [kept for kept, _ in experts.roundings] == narrow
        taken = held_bytes(packed)
        assert pool.plan("m").footprint.weight_bytes == pytest.approx(taken, rel=0.03)
        assert difference(packed, model) < (0.6 if narrow else 0.3)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"qwen3moe.expert_used_count": 5}, "expert_used_count is 5, of 4 experts"),
        ({"qwen3moe.expert_gating_func": 2}, "expert_gating_func is 2, which is not read"),
        ({"qwen3moe.expert_shared_count": 1}, "expert_shared_count is 1, which is not read"),
        ({"qwen3moe.expert_count": 8}, r"'blk.0.ffn_gate_exps.weight' is \[4, 32, 32\], and not"),
    ],
)
def test_mixtures_that_choose_otherwise_are_refused(
    facts: dict[str, int], reason: str, tmp_path: Path
) -> None:
    save("qwen3moe", tmp_path / "m")
    file = write("qwen3moe", tmp_path / "m", tmp_path / "m.gguf", facts=facts)
    with refused("pool.models[0].source", reason):
        pool_of(file)
