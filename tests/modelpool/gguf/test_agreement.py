"""What was compared at the first load of a file is not compared again, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from modelpool.checkpoint.cache_dir import cache_dir
from modelpool.checkpoint.json_cache import JsonCache
from modelpool.fast import model_key
from modelpool.packed_model import PackedModel
from test_support.factories import pool_of
from tests.modelpool.compressed import logits, needs_quantised
from tests.modelpool.gguf.families import save, write

pytestmark = needs_quantised


# Of layers without and with sliding windows, keys and values that layers share, latent attention,
# experts and recurrence.
FAMILIES = ("smollm3", "gemma4 e2b", "deepseek2 v3", "granitemoe", "falcon-h1", "qwen35")


@pytest.fixture
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    family = getattr(request, "param", "smollm3")
    save(family, tmp_path / "m")
    return write(family, tmp_path / "m", tmp_path / "m.gguf", "Q8_0")


@pytest.fixture
def loaded(file: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[PackedModel, int]]:
    """Load the file; return the model, and how many forwards that took."""
    count = [0]
    usual = PackedModel.forward

    def forward(*given: object, **options: object) -> object:
        count[0] += 1
        return usual(*given, **options)  # type: ignore[arg-type]

    def load() -> tuple[PackedModel, int]:
        count[0] = 0
        with monkeypatch.context() as patch:
            patch.setattr(PackedModel, "forward", forward)
            return pool_of(file).get("m"), count[0]

    return load


@pytest.mark.parametrize("file", FAMILIES, indirect=True)
def test_a_later_load_compares_nothing_and_has_the_same_bits(
    loaded: Callable[[], tuple[PackedModel, int]],
) -> None:
    first, compared = loaded()
    second, passes = loaded()
    assert passes == 1 < compared, "the one that shows layers"
    assert type(second.shortcut) is type(first.shortcut)
    assert second.kv_layers == first.kv_layers
    assert second.recurrent_layers.keys() == first.recurrent_layers.keys()
    assert second.max_positions == first.max_positions
    assert torch.equal(logits(second), logits(first))


def test_other_sources_compare_again(
    loaded: Callable[[], tuple[PackedModel, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded()
    monkeypatch.setattr(model_key, "package_sources", lambda: "changed")
    assert loaded()[1] > 1


@pytest.mark.parametrize("kept", [None, {"direct": 1, "lean": True}, {"lean": True}])
def test_what_is_no_agreement_compares_again(
    loaded: Callable[[], tuple[PackedModel, int]], kept: object
) -> None:
    folder = cache_dir() / "agreements"
    before = {*folder.glob("*.json")}
    loaded()
    [made] = {*folder.glob("*.json")} - before
    if kept is None:
        made.write_text("{")
    else:
        JsonCache(folder, "agreement").store(made.stem, kept)
    assert loaded()[1] > 1
    assert loaded()[1] == 1, "it was written anew"
