"""Files as llama.cpp's converter writes them: their models compute what their checkpoints do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from modelpool import loader
from test_support.factories import pool_of
from tests.modelpool.compressed import held_bytes, logits, needs_quantised
from tests.modelpool.gguf.families import FAMILIES, save, write


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    """To the last bit where the converter's arithmetic can be undone. That of an exponential, and
    of multipliers that become part of weights, cannot."""
    save(family, tmp_path / "m")
    file = write(family, tmp_path / "m", tmp_path / "m.gguf")
    found, wanted = (
        logits(pool_of(source, dtype="float32").get("m")) for source in (file, tmp_path / "m")
    )
    assert wanted.std() > 0.1
    if FAMILIES[family].tolerance:
        assert float((found - wanted).norm() / wanted.norm()) < FAMILIES[family].tolerance
    else:
        assert torch.equal(found, wanted)


# One family each of heads of several sizes, latent attention, experts and two kinds of recurrence;
# `make exact` takes all.
FEW = ("gemma4 e2b", "deepseek2 v3", "granitemoe", "falcon-h1", "lfm2")


@needs_quantised
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(
            pytest.param(one, "Q8_0", marks=() if one in FEW else pytest.mark.exact)
            for one in FAMILIES
        ),
        ("gpt-oss", "MXFP4"),
        ("qwen35", "Q4_0"),
    ],
)
def test_blocks_compute_what_they_did(
    family: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a plain model is loaded, and then quantised."""
    save(family, tmp_path / "m")
    file = write(family, tmp_path / "m", tmp_path / "m.gguf", kind)
    pool = pool_of(file)
    said, packed = pool.plan("m").footprint.weight_bytes, pool.get("m")
    assert said == pytest.approx(held_bytes(packed), rel=0.03)
    found = logits(packed)
    monkeypatch.setattr(loader, "_keeps_blocks", lambda *_: False)
    assert torch.equal(logits(pool_of(file).get("m")), found)
