"""Architectures with their checkpoints: honoured ones say the same in packs, others say why not."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma3TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    RecurrentGemmaConfig,
)

from modelpool.checkpoint.architecture import ignored_window
from modelpool.errors import UnsupportedModelError
from modelpool.packed_model import PackedModel
from statemgr import ModelState
from tests.modelpool import factories
from tests.modelpool.factories import MAX_POSITIONS, SLIDING_WINDOW, VOCAB_SIZE

SAVERS: dict[str, Callable[..., Path]] = {
    "llama": factories.save_llama,
    "qwen2": factories.save_qwen2,
    "qwen3": factories.save_qwen3,
    "mistral": factories.save_mistral,
    "gpt2": factories.save_gpt2,
    "opt": factories.save_opt,
    "gpt-neox": factories.save_gpt_neox,
    "phi": factories.save_phi,
    "gemma2": factories.save_gemma2,
    "gemma3": factories.save_gemma3,
}
WINDOWED = ("mistral", "gemma2", "gemma3")
LENGTH = 5 * SLIDING_WINDOW
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}


@contextmanager
def float64_softmax() -> Iterator[None]:
    """Eager attention takes its softmax in float32; this one in the dtype of its scores."""
    ordinary = torch.nn.functional.softmax

    def wide(scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return ordinary(scores, dim=dim, dtype=scores.dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "softmax", wide)
        yield


def load(path: Path) -> PreTrainedModel:
    return cast(Any, AutoModelForCausalLM).from_pretrained(str(path)).eval()  # type: ignore[no-any-return]


def random_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = cast(Any, AutoModelForCausalLM).from_config(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=2.0 * parameter.shape[-1] ** -0.5)
    wide: PreTrainedModel = cast(Any, model).to(dtype).eval()
    return wide


def ordinary_logits(model: PreTrainedModel, texts: NDArray[np.int64]) -> Tensor:
    with torch.inference_mode(), float64_softmax():
        logits: Tensor = model(input_ids=torch.from_numpy(texts), use_cache=False).logits
    return logits


def packed_logits(
    model: PackedModel, texts: NDArray[np.int64], steps: Sequence[tuple[int, ...]]
) -> list[Tensor]:
    """Logits of all tokens of each text, fed in packs of `steps[i][row]` tokens of each row."""
    state = ModelState(model.kv_layers, rows=len(texts), slots=128)
    got: list[list[Tensor]] = [[] for _ in texts]
    done = np.zeros(len(texts), dtype=np.int64)
    for step in steps:
        rows = np.flatnonzero(step)
        counts = np.array(step)[rows]
        parts = [range(done[row], done[row] + step[row]) for row in rows]
        positions = np.concatenate([np.array(part) for part in parts])
        tokens = np.concatenate([texts[row, part] for row, part in zip(rows, parts, strict=True)])
        slots = state.append(rows, counts, tokens, positions)
        view = state.view(rows, counts, positions, slots)
        index = torch.arange(len(tokens))
        with torch.inference_mode():
            logits = model.forward(
                torch.from_numpy(tokens), torch.from_numpy(positions), view, index
            )
        for row, part in zip(rows.tolist(), torch.split(logits, counts.tolist()), strict=True):
            got[row].append(part)
        done[rows] += counts
    return [torch.cat(parts) for parts in got]


def texts_of(rows: int, length: int = LENGTH) -> NDArray[np.int64]:
    return np.random.default_rng(1).integers(0, VOCAB_SIZE, (rows, length))


# Honoured


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, VOCAB_SIZE + 24], ids=["whole", "padded"])
@pytest.mark.parametrize("name", SAVERS)
def test_packs_of_two_rows_give_the_logits_of_the_ordinary_forward(
    name: str, vocab_size: int, tmp_path: Path
) -> None:
    path = SAVERS[name](tmp_path, layers=3, vocab_size=vocab_size)
    texts = texts_of(2)
    wanted = ordinary_logits(load(path), texts)
    model = PackedModel.wrap(name, load(path), VOCAB_SIZE)
    steps = [(3, 12), (1, 1), (LENGTH - 11, 4), (0, 20), (7, LENGTH - 37)]
    got = packed_logits(model, texts, steps)
    assert wanted.shape[-1] == vocab_size
    assert wanted.std() > 0.3
    for row in range(2):
        expected = wanted[row, :, :VOCAB_SIZE]
        torch.testing.assert_close(got[row], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_forgets_what_lies_before_it(name: str, tmp_path: Path) -> None:
    path = SAVERS[name](tmp_path, layers=1)  # of a single layer, with a window
    model = PackedModel.wrap(name, load(path), VOCAB_SIZE)
    texts = texts_of(2)
    texts[1, 1:] = texts[0, 1:]
    first, second = packed_logits(model, texts, [(5, 9), (LENGTH - 5, LENGTH - 9)])
    assert (first - second)[:SLIDING_WINDOW].abs().amax(-1).min() > 1e-6
    torch.testing.assert_close(first[SLIDING_WINDOW:], second[SLIDING_WINDOW:], rtol=0, atol=1e-10)


def test_capped_scores_show_in_the_logits(tmp_path: Path) -> None:
    path = factories.save_gemma2(tmp_path)
    uncapped = load(path)
    for layer in cast(Any, uncapped).model.layers:
        layer.self_attn.attn_logit_softcapping = None
    texts = texts_of(1)
    difference = ordinary_logits(load(path), texts) - ordinary_logits(uncapped, texts)
    assert difference.abs().mean() > 0.1


@pytest.mark.parametrize("name", SAVERS)
def test_positions_are_known_before_loading(name: str, tmp_path: Path) -> None:
    model = PackedModel.wrap(name, load(SAVERS[name](tmp_path)), VOCAB_SIZE)
    assert model.max_positions == MAX_POSITIONS
    assert len(model.kv_layers) == 2


# Refused


def refusal(model: PreTrainedModel) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        PackedModel.wrap("odd-one", model, VOCAB_SIZE)
    return caught.value.reason


def test_bloom_is_refused_because_its_attention_is_its_own() -> None:
    config = BloomConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    assert refusal(random_model(config)) == (
        "BloomForCausalLM does not dispatch its attention (AttentionInterface)"
    )


def test_recurrent_models_are_refused() -> None:
    mamba = MambaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, state_size=4, num_hidden_layers=2, pad_token_id=None
    )
    assert "linear_attention" in refusal(random_model(mamba))
    mixed = RecurrentGemmaConfig(**{**_SHAPE, "num_hidden_layers": 3})
    assert "linear_attention" in refusal(random_model(mixed))


def test_attention_in_both_directions_is_refused() -> None:
    config = Gemma3TextConfig(**_SHAPE, head_dim=8, use_bidirectional_attention=True)
    assert refusal(random_model(config)) == "layer 0: its attention needs both directions"


def test_a_window_that_only_the_models_mask_knows_is_refused() -> None:
    """The trial forward is shorter than the window and cannot notice it."""
    config = PhimoeConfig(**_SHAPE, sliding_window=64, num_local_experts=2)
    reason = refusal(random_model(config, torch.float32))
    assert reason == "the attention of layer 0 is given a window of None, not of 64"


def test_a_window_as_long_as_the_longest_text_is_none() -> None:
    config = PhimoeConfig(**_SHAPE, sliding_window=128, num_local_experts=2)
    wrapped = PackedModel.wrap("phimoe", random_model(config, torch.float32), VOCAB_SIZE)
    assert wrapped.name == "phimoe"


def test_a_window_must_be_that_of_the_layer() -> None:
    config = Gemma3TextConfig(
        **_SHAPE, sliding_window=16, layer_types=["sliding_attention", "full_attention"]
    )
    assert ignored_window(config, {0: 16, 1: None}) is None
    assert "layer 1" in str(ignored_window(config, {0: 16, 1: 16}))
    assert "layer 0" in str(ignored_window(config, {0: None, 1: None}))
    every = MistralConfig(**_SHAPE, sliding_window=16)
    assert ignored_window(every, {0: 16, 1: 16}) is None
    assert "not of 16" in str(ignored_window(every, {0: 16, 1: 17}))


def test_rotations_that_depend_on_the_longest_neighbour_are_capped() -> None:
    rope = {
        "rope_type": "dynamic",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    config = LlamaConfig(**_SHAPE, rope_parameters=rope)
    texts = texts_of(2, length=32)
    wanted = ordinary_logits(random_model(config), texts)
    model = PackedModel.wrap("llama", random_model(config), VOCAB_SIZE)
    assert model.max_positions == 32
    got = packed_logits(model, texts, [(32, 1), (0, 31)])
    torch.testing.assert_close(torch.stack(got), wanted, rtol=0, atol=1e-9)
