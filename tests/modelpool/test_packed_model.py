"""A wrapped model's packs say what its ordinary forward says; what would not is refused."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    T5Config,
    T5ForConditionalGeneration,
)

from modelpool.attention.packed import (
    OpaqueView,
    UnsupportedAttention,
    packed_attention_forward,
)
from modelpool.errors import UnsupportedModelError
from modelpool.fast.tuning import Tuning
from modelpool.packed_model import PackedModel
from statemgr import ModelState

VOCAB = 96
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
_SHAPE: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
_GATED: dict[str, Any] = {**_SHAPE, "intermediate_size": 48, "num_key_value_heads": 2}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_GATED),
    "qwen2": lambda: Qwen2Config(**_GATED),
    "qwen3": lambda: Qwen3Config(**_GATED, head_dim=8),
    "mistral": lambda: MistralConfig(**_GATED, sliding_window=5),
    "gpt2": lambda: GPT2Config(**_COMMON, n_embd=32, n_layer=2, n_head=4, n_positions=128),
    "opt": lambda: OPTConfig(**{**_SHAPE, "pad_token_id": 1}, ffn_dim=48, word_embed_proj_dim=32),
    "gpt-neox": lambda: GPTNeoXConfig(**_SHAPE, intermediate_size=48),
    "phi": lambda: PhiConfig(**_GATED),
}


def make_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """Random, and loud enough that attention shows in the logits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        factory: Any = AutoModelForCausalLM
        model = factory.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=2.0 * parameter.shape[-1] ** -0.5)
    wide: PreTrainedModel = model.to(dtype).eval()
    return wide


def tokens_of(row: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    drawn: np.ndarray[tuple[int], np.dtype[np.int64]] = np.random.default_rng(row).integers(
        2, VOCAB, size=count
    )
    return drawn


def run(
    model: PackedModel, state: ModelState, texts: dict[int, int], feed: dict[int, int]
) -> dict[int, Tensor]:
    """Feeds the next `feed[row]` tokens of each row; logits [feed[row], V] of each."""
    rows = np.array(sorted(feed))
    counts = np.array([feed[row] for row in rows.tolist()])
    parts = [range(texts.get(row, 0), texts.get(row, 0) + feed[row]) for row in rows.tolist()]
    positions = np.concatenate([np.array(part) for part in parts])
    tokens = np.concatenate(
        [tokens_of(row, 64)[part.start : part.stop] for row, part in zip(rows, parts, strict=True)]
    )
    slots = state.append(rows, counts, tokens, positions)
    view = state.view(rows, counts, positions, slots)
    with torch.inference_mode():
        logits = model.forward(
            torch.from_numpy(tokens),
            torch.from_numpy(positions),
            view,
            torch.arange(len(tokens)),
        )
    for row in feed:
        texts[row] = texts.get(row, 0) + feed[row]
    parts_of_logits = torch.split(logits, counts.tolist())
    return dict(zip(rows.tolist(), parts_of_logits, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", CONFIGS)
def test_packs_give_the_logits_of_the_ordinary_forward(name: str, dtype: torch.dtype) -> None:
    ordinary, packed = (make_model(CONFIGS[name](), dtype) for _ in range(2))
    model = PackedModel.wrap(name, packed, VOCAB)
    state = ModelState(model.kv_layers, rows=4, slots=128)
    wanted = {}
    with torch.inference_mode():
        for row in range(4):
            text = torch.from_numpy(tokens_of(row, 64)).unsqueeze(0)
            wanted[row] = ordinary(input_ids=text, use_cache=False).logits[0]
    seen: dict[int, int] = {}
    got: dict[int, list[Tensor]] = {row: [] for row in range(4)}
    steps = ({0: 1, 2: 9}, {0: 1, 1: 30, 2: 1}, {0: 4, 1: 3, 2: 1, 3: 2}, {3: 20, 0: 1}, {1: 1})
    for feed in steps:
        for row, logits in run(model, state, seen, feed).items():
            got[row].append(logits)
    tolerance = 1e-10 if dtype == torch.float64 else 2e-4
    for row, count in seen.items():
        assert wanted[row][:count].std() > 0.1
        torch.testing.assert_close(torch.cat(got[row]), wanted[row][:count], rtol=0, atol=tolerance)


def test_a_wrapped_model_tells_the_shapes_of_its_cache() -> None:
    model = PackedModel.wrap("llama", make_model(CONFIGS["llama"](), torch.float32), VOCAB)
    assert [(k.kv_heads, k.head_dim, k.dtype) for k in model.kv_layers] == [
        (2, 8, torch.float32)
    ] * 2
    assert model.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert model.max_positions == 128
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)
    assert model.parameter_count == sum(p.numel() for p in model.model.parameters())


def test_only_the_wanted_logits_come_back_without_padded_ids() -> None:
    model = PackedModel.wrap("llama", make_model(CONFIGS["llama"]()), VOCAB - 6)
    state = ModelState(model.kv_layers, rows=1, slots=128)
    rows, counts, positions = np.array([0]), np.array([3]), np.arange(3)
    slots = state.append(rows, counts, positions, positions)
    view = state.view(rows, counts, positions, slots)
    fed = torch.arange(3)
    with torch.inference_mode():
        assert model.forward(fed, fed, view, torch.tensor([0, 2])).shape == (2, VOCAB - 6)
        assert model.forward(fed, fed, view, torch.zeros(0, dtype=torch.int64)).shape[0] == 0


def refusal(model: PreTrainedModel, vocab_size: int = VOCAB) -> str:
    """The refusal's reason; it must name the model as the configuration does."""
    with pytest.raises(UnsupportedModelError) as caught:
        PackedModel.wrap("odd-one", model, vocab_size)
    assert caught.value.field == "pool.models[odd-one]"
    assert "odd-one" in str(caught.value)
    return caught.value.reason


def test_a_model_that_does_not_dispatch_its_attention_is_refused() -> None:
    config = BloomConfig(**_COMMON, hidden_size=32, n_layer=2, n_head=4)
    assert "Bloom" in refusal(make_model(config))


def test_a_recurrent_model_is_refused() -> None:
    config = MambaConfig(**_COMMON, hidden_size=32, state_size=4, num_hidden_layers=2)
    assert refusal(make_model(config))


def test_an_encoder_decoder_is_refused() -> None:
    config = T5Config(
        **{**_COMMON, "pad_token_id": 0}, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4
    )
    reason = refusal(T5ForConditionalGeneration(config))
    assert "encoder-decoder" in reason


def test_unknown_layer_types_are_refused() -> None:
    config = LlamaConfig(**_GATED)
    config.layer_types = ["full_attention", "linear_attention"]
    model = make_model(LlamaConfig(**_GATED))
    model.config = config
    assert "linear_attention" in refusal(model)


def test_a_model_that_mixes_the_tokens_of_a_pack_is_refused() -> None:
    model = make_model(LlamaConfig(**_GATED))
    norm: Any = model.model.norm
    ordinary = norm.forward
    norm.forward = lambda x: ordinary(x) + 0.1 * x.roll(1, dims=1)
    assert "changes its logits" in refusal(model)


def test_fewer_output_ids_than_the_tokenizer_are_refused() -> None:
    assert "output ids" in refusal(make_model(LlamaConfig(**_GATED)), vocab_size=VOCAB + 1)


def test_a_model_that_uses_its_attention_otherwise_is_refused() -> None:
    model = make_model(LlamaConfig(**_GATED))
    attention: Any = model.model.layers[1].self_attn
    ordinary = attention.forward

    def shifted(*args: Any, **kwargs: Any) -> Any:
        output, weights = ordinary(*args, **kwargs)
        return output + (0.3 if "packed_kv" in kwargs else 0.0), weights

    attention.forward = shifted
    assert "changes its logits" in refusal(model)


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "dynamic", "factor": 4.0}, 128),
        ({"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 32}, 32),
        ({"rope_type": "linear", "factor": 4.0}, 128),
        (
            {
                "rope_type": "longrope",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
            },
            32,
        ),
    ],
)
def test_rope_that_depends_on_neighbours_is_capped(rope: dict[str, Any], limit: int) -> None:
    config = LlamaConfig(**_GATED, rope_parameters={"rope_theta": 10000.0, **rope})
    assert PackedModel.wrap("llama", make_model(config), VOCAB).max_positions == limit


class _Attention(nn.Module):
    layer_idx = 0


def attend(mask: Tensor | None = None, **asked: Any) -> None:
    part = torch.zeros(1, 1, 1, 4)
    packed_attention_forward(_Attention(), part, part, part, mask, **asked)


@pytest.mark.parametrize("asked", ["s_aux", "alibi", "position_bias", "head_mask"])
def test_an_unknown_argument_of_attention_is_refused_by_name(asked: str) -> None:
    with pytest.raises(UnsupportedAttention, match=asked):
        attend(**{asked: torch.zeros(1)})


def test_masks_dropout_and_forwards_outside_the_engine_are_refused() -> None:
    state = ModelState(
        PackedModel.wrap("llama", make_model(CONFIGS["llama"]()), VOCAB).kv_layers, 1, 128
    )
    one, zero = np.array([1]), np.array([0])
    view = OpaqueView(state.view(zero, one, zero, state.append(zero, one, zero, zero)))
    with pytest.raises(UnsupportedAttention):
        attend(mask=torch.zeros(1), packed_kv=view)
    with pytest.raises(UnsupportedAttention):
        attend(dropout=0.1, packed_kv=view)
    with pytest.raises(UnsupportedAttention):
        attend()


def test_a_wrapped_model_cannot_run_outside_the_engine() -> None:
    model = PackedModel.wrap("llama", make_model(CONFIGS["llama"]()), VOCAB)
    with pytest.raises(UnsupportedAttention):
        model.model(input_ids=torch.zeros(1, 2, dtype=torch.int64))


@pytest.mark.parametrize("fails", [False, True])
def test_a_forward_has_its_own_number_of_threads(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = PackedModel.wrap("m", make_model(LlamaConfig(**_GATED)), VOCAB, Tuning(threads=3))
    assert packed.threads == 3
    before, seen = torch.get_num_threads(), []

    def forward(*_: object) -> Tensor:
        seen.append(torch.get_num_threads())
        if fails:
            raise RuntimeError("out of memory")
        return torch.zeros(1)

    monkeypatch.setattr(packed, "_forward", forward)
    unused, view = torch.zeros(1, dtype=torch.int64), MagicMock()
    with pytest.raises(RuntimeError) if fails else nullcontext():
        packed.forward(unused, unused, view, unused)
    assert seen == [3]
    assert torch.get_num_threads() == before


def test_a_tuned_model_says_what_it_said() -> None:
    tuning = Tuning(pack_weights=True, lean=True)
    packed = PackedModel.wrap("m", make_model(LlamaConfig(**_GATED), torch.float32), VOCAB, tuning)
    ordinary = make_model(LlamaConfig(**_GATED), torch.float32)
    assert type(packed.model.model.norm).__name__ == "LeanRMSNorm"
    tokens = torch.arange(20).unsqueeze(0)
    with torch.inference_mode():
        packed.model.set_attn_implementation("sdpa")
        difference = (packed.model(tokens).logits - ordinary(tokens).logits).abs().max()
    assert difference < 1e-3


def test_out_of_memory_is_no_reason_to_refuse_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(LlamaConfig(**_GATED))

    def forward(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(model, "forward", forward)
    with pytest.raises(torch.OutOfMemoryError):
        PackedModel.wrap("m", model, VOCAB)


@pytest.mark.parametrize("is_spread", [False, True])
def test_the_index_of_wanted_logits_fits_whatever_device_a_spread_model_picks_them_on(
    is_spread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(LlamaConfig(**_GATED))
    if is_spread:
        model.model.layers[1].to("meta")
    packed = PackedModel("m", model, VOCAB, 128, ())
    asked: dict[str, Any] = {}
    monkeypatch.setattr(model, "forward", lambda **given: asked.update(given) or MagicMock())
    index = MagicMock()
    packed.forward(torch.zeros(1), torch.zeros(1), MagicMock(attended=1.0), index)
    assert asked["logits_to_keep"] is (index.cpu() if is_spread else index)
