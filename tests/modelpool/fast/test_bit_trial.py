"""What the trial of a target's bits finds, says, and keeps."""

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from modelpool.checkpoint.bundled import bundled_root
from modelpool.checkpoint.cache_dir import cache_dir
from modelpool.config import ModelConfig
from modelpool.device_manager import Placement
from modelpool.fast import bit_trial
from modelpool.fast.bit_trial import BATCH, PACK, THREADS, TREE, UNTRIED, settle_bits
from modelpool.fast.direct_forward import direct_forward_of
from modelpool.fast.linear import PackedLinear, can_pack
from modelpool.fast.thread_choice import OtherPrograms
from modelpool.fast.tuning import Tuning
from modelpool.forward import ForwardOutput
from modelpool.loader import load_model
from modelpool.packed_model import PackedModel
from test_support.cache_damage import OF_FILE
from test_support.llama_models import LLAMA_SHAPED, VOCAB, make_model, shaped
from tests.modelpool.compressed import needs_quantised

CONFIG = LLAMA_SHAPED["llama3"]()
NEEDS_PACKING = pytest.mark.skipif(not can_pack(torch.float32), reason="no packed layers")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels").symlink_to(cache_dir() / "kernels")
    monkeypatch.setenv("SPECROUTER_CACHE", str(tmp_path))


def packed_model(dtype: torch.dtype = torch.float32, every: bool = True) -> PackedModel:
    model = make_model(copy.deepcopy(CONFIG), dtype)
    packed = PackedModel.wrap("m", model, VOCAB, Tuning(threads=2))
    if every:
        packed.pack_weights(every=True)
    packed.shortcut = direct_forward_of(packed)
    return packed


def shake(packed: PackedModel, kind: str) -> None:
    """From now on its logits have other last bits in some packs."""
    plain = packed.shortcut or packed._forward

    def shaken(tokens: Any, positions: Any, view: Any, *asked: Any) -> ForwardOutput:
        output = plain(tokens, positions, view, *asked)
        moved = {
            PACK: len(tokens) == 5,
            BATCH: len(view.pack.rows) > 1,
            TREE: view.pack.tree is not None,
            THREADS: torch.get_num_threads() == 1,
        }
        return ForwardOutput(output.logits * (1 + 1e-6 * moved[kind]))

    packed.shortcut = shaken


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[PackedModel]:
    """The models that were tried."""
    tried: list[PackedModel] = []
    plain = bit_trial.bits_depend_on

    def counted(model: PackedModel) -> str | None:
        tried.append(model)
        return plain(model)

    monkeypatch.setattr(bit_trial, "bits_depend_on", counted)
    return tried


@NEEDS_PACKING
def test_a_model_that_keeps_its_bits_is_told_of_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, trials: list[PackedModel]
) -> None:
    for _ in range(2):
        assert settle_bits(packed_model(), tmp_path, may_pack=False) is None
    assert len(trials) == 1
    assert not caplog.messages


@NEEDS_PACKING
@pytest.mark.parametrize("kind", [PACK, BATCH, TREE])
def test_bits_that_move_are_found_out_and_told_each_time(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, trials: list[PackedModel]
) -> None:
    packed = packed_model()
    shake(packed, kind)
    for _ in range(2):
        assert settle_bits(packed, tmp_path, may_pack=True) == kind
    assert len(trials) == 1
    expected = f"m: texts may differ in last bits between batches: they depend on {kind}"
    assert caplog.messages == [expected] * 2


@NEEDS_PACKING
def test_bits_that_one_thread_moves_cost_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    packed = packed_model()
    shake(packed, THREADS)
    assert settle_bits(packed, tmp_path, may_pack=True) == THREADS
    assert packed.threads == 2
    assert not caplog.messages


@NEEDS_PACKING
def test_layers_are_packed_where_that_keeps_bits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, trials: list[PackedModel]
) -> None:
    for tried in (2, 2):  # the second time the cache says what helps
        packed = packed_model(every=False)
        shake(packed, PACK)  # it stands for a library whose sums depend on the rows
        assert settle_bits(packed, tmp_path, may_pack=True) is None
        assert len(trials) == tried
        assert any(isinstance(module, PackedLinear) for module in packed.model.modules())
    assert not caplog.messages


@NEEDS_PACKING
def test_a_damaged_verdict_is_told_in_one_line_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bit_trial, "bits_depend_on", lambda _: None)
    packed = packed_model()
    settle_bits(packed, tmp_path, may_pack=False)
    (file,) = (cache_dir() / "bits").glob("*.json")
    for name in sorted({*OF_FILE} - {"gone", "a link to nothing"}):
        OF_FILE[name](file)
        for lines in (1, 1):
            assert settle_bits(packed, tmp_path, may_pack=False) is None
            assert len(caplog.messages) == lines, name
        assert "ignored the verdict" in caplog.text
        caplog.clear()


def test_a_model_of_few_positions_always_has_its_threads(tmp_path: Path) -> None:
    config = shaped("llama-gelu", max_position_embeddings=32)
    packed = PackedModel.wrap("m", make_model(config, torch.float32), VOCAB, Tuning(threads=2))
    assert settle_bits(packed, tmp_path, may_pack=False) == THREADS


@needs_quantised
def test_a_long_pass_beside_busy_programs_has_one_thread_where_all_of_it_is_in_c() -> None:
    folder = bundled_root() / "tiny-3m"
    clock = itertools.count(0.0, 1.0).__next__
    others = OtherPrograms(lambda: (2.0 * clock(), 0.0), clock)  # two cores
    tuning = Tuning(threads=2, lean=True, is_target=True, others=others, weights="int4")
    asked = ModelConfig(name="m", source="bundled:tiny-3m", weights="int4")
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    loaded = load_model(asked, folder, Placement("cpu"), vocab, "pool.models[0]", tuning)
    choice, used = loaded.thread_choice, set[int]()
    assert choice is not None
    for _ in range(8):
        with choice.chosen(64):
            used.add(torch.get_num_threads())
    assert loaded.computed_by == "C library"
    assert 1 in used


@pytest.mark.parametrize("is_target", [True, False])
def test_a_target_is_served_though_its_trial_fails(
    is_target: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(_: PackedModel) -> str | None:
        raise RuntimeError("no such\noperator")

    monkeypatch.setattr(bit_trial, "bits_depend_on", failing)
    make_model(copy.deepcopy(CONFIG), torch.float32).save_pretrained(tmp_path)
    asked = ModelConfig(name="m", source=f"path:{tmp_path}", dtype="float32")
    tuning = Tuning(threads=2, is_target=is_target)
    loaded = load_model(asked, tmp_path, Placement("cpu"), VOCAB, "pool.models[0]", tuning)
    assert loaded.bits_depend_on == (UNTRIED if is_target else None)
    assert loaded.thread_choice is None
    assert len(caplog.messages) == is_target
    assert all("tried: RuntimeError: no such operator" in line for line in caplog.messages)
