"""Architectures with their checkpoints: honoured ones say the same in packs, others say why not."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PhimoeConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from modelpool.errors import UnsupportedModelError
from modelpool.packed_model import PackedModel
from test_support.factories import (
    HYBRID,
    HYBRIDS,
    SAVERS,
    SLIDING_WINDOW,
    VOCAB_SIZE,
)
from test_support.llama_models import SHAPE, Feeder, make_model, texts

WINDOWED = ("mistral", "gemma2", "gemma3")
_SHAPE = SHAPE | {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 2}


@contextmanager
def softmax_in_the_dtype_of_scores() -> Iterator[None]:
    """Eager attention takes it in float32."""
    ordinary = torch.nn.functional.softmax

    def wide(scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return ordinary(scores, dim=dim, dtype=scores.dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "softmax", wide)
        yield


def load(path: Path) -> PreTrainedModel:
    return cast(Any, AutoModelForCausalLM).from_pretrained(str(path)).eval()  # type: ignore[no-any-return]


def ordinary_logits(model: PreTrainedModel, read: Tensor) -> Tensor:
    with torch.inference_mode(), softmax_in_the_dtype_of_scores():
        logits: Tensor = model(input_ids=read, use_cache=False).logits
    return logits


def feeder(model: PreTrainedModel) -> Feeder:
    packed = PackedModel.wrap("it", model, VOCAB_SIZE)
    return Feeder(packed.forward, packed)


# Honoured


@pytest.mark.parametrize("name", SAVERS)
def test_packs_give_the_logits_of_the_ordinary_forward(name: str, tmp_path: Path) -> None:
    vocab_size = VOCAB_SIZE + 24  # it is padded
    path = SAVERS[name](tmp_path, layers=3, vocab_size=vocab_size, dtype="float64")
    wanted = ordinary_logits(load(path), texts(4))
    assert wanted.shape[-1] == vocab_size
    assert wanted.std() > 0.3
    packs = ({0: 1, 2: 9}, {0: 1, 1: 30, 2: 1}, {0: 4, 1: 3, 2: 1, 3: 2}, {3: 38, 0: 1}, {1: 1})
    for row, got in feeder(load(path)).feed_all(packs).items():
        expected = wanted[row, : len(got), :VOCAB_SIZE]
        if name in HYBRIDS and name != HYBRID:  # transformers sums chunks, in float32 at most
            assert (got - expected).abs().mean() < 1e-5 * wanted.std()
        else:
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_forgets_what_lies_before_it(name: str, tmp_path: Path) -> None:
    fed = feeder(load(SAVERS[name](tmp_path, layers=1)))  # of a single layer, with a window
    fed.texts[1, 1:] = fed.texts[0, 1:]
    got = fed.feed_all([{0: 5, 1: 9}, {0: 35, 1: 31}])
    assert (got[0] - got[1])[:SLIDING_WINDOW].abs().amax(-1).min() > 1e-6
    after = (got[row][SLIDING_WINDOW:] for row in range(2))
    torch.testing.assert_close(*after, rtol=0, atol=1e-10)


# Refused


def refusal(model: PreTrainedModel, vocab_size: int = VOCAB_SIZE) -> str:
    """The refusal's reason; it must name the model as the configuration does."""
    with pytest.raises(UnsupportedModelError) as caught:
        PackedModel.wrap("odd-one", model, vocab_size)
    assert caught.value.field == "pool.models[odd-one]"
    return caught.value.reason


def test_an_encoder_decoder_is_refused() -> None:
    config = T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, pad_token_id=0)
    assert "encoder-decoder" in refusal(T5ForConditionalGeneration(config))


def test_fewer_output_ids_than_the_tokenizer_are_refused() -> None:
    assert "output ids" in refusal(make_model(LlamaConfig(**_SHAPE)), VOCAB_SIZE + 1)


def test_a_model_that_mixes_the_tokens_of_a_pack_is_refused() -> None:
    model = make_model(LlamaConfig(**_SHAPE))
    norm: Any = model.model.norm
    ordinary = norm.forward
    norm.forward = lambda x: ordinary(x) + 0.1 * x.roll(1, dims=1)
    assert "changes its logits" in refusal(model)


def test_a_model_that_uses_its_attention_otherwise_is_refused() -> None:
    model = make_model(LlamaConfig(**_SHAPE))
    attention: Any = model.model.layers[1].self_attn
    ordinary = attention.forward

    def shifted(*args: Any, **kwargs: Any) -> Any:
        output, weights = ordinary(*args, **kwargs)
        return output + (0.3 if "packed_kv" in kwargs else 0.0), weights

    attention.forward = shifted
    assert "changes its logits" in refusal(model)


def test_attention_in_both_directions_is_refused() -> None:
    config = Gemma3TextConfig(**_SHAPE, head_dim=8, use_bidirectional_attention=True)
    assert refusal(make_model(config)) == "layer 0: its attention needs both directions"


def test_a_window_that_only_the_models_mask_knows_is_refused() -> None:
    """The trial forward is shorter than the window and cannot notice it."""
    config = PhimoeConfig(**_SHAPE, sliding_window=64, num_local_experts=2)
    reason = refusal(make_model(config, torch.float32))
    assert reason == "the attention of layer 0 is given a window of None, not of 64"


_ORIGINAL = {"factor": 4.0, "original_max_position_embeddings": 32}
_LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "dynamic", "factor": 4.0}, 128),
        ({"rope_type": "dynamic", **_ORIGINAL}, 32),
        ({"rope_type": "linear", "factor": 4.0}, 128),
        ({**_LONG, **_ORIGINAL}, 32),
        ({**_LONG, **_ORIGINAL, "short_factor": _LONG["long_factor"]}, 128),
    ],
)
def test_rotations_that_depend_on_the_longest_neighbour_are_capped(
    rope: dict[str, Any], limit: int
) -> None:
    config = LlamaConfig(**_SHAPE, rope_parameters={"rope_theta": 10000.0, **rope})
    longest = min(limit, 40)
    wanted = ordinary_logits(make_model(config), texts(2)[:, :longest])
    packed = PackedModel.wrap("llama", make_model(config), VOCAB_SIZE)
    assert packed.max_positions == limit
    got = Feeder(packed.forward, packed).feed_all([{0: longest, 1: 1}, {1: longest - 1}])
    torch.testing.assert_close(torch.stack([got[0], got[1]]), wanted, rtol=0, atol=1e-9)
