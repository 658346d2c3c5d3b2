"""The lean forward says what a model's own says, and exists for Llama-shaped decoders only."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from modelpool.lean_forward import LeanForward, check, lean_forward_of
from modelpool.packed_linear import can_pack
from modelpool.packed_model import PackedModel
from modelpool.tuning import Tuning
from statemgr import ModelState
from statemgr.forward_view import TreeMask

VOCAB = 90  # of 96: the rest is padding
SLOTS = 128
_COMMON: dict[str, Any] = {"vocab_size": 96, "bos_token_id": 0, "eos_token_id": 0}
_SHAPE: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]

LEAN: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SHAPE),
    "llama-tied": lambda: LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "llama-biased": lambda: LlamaConfig(**_SHAPE, attention_bias=True, mlp_bias=True),
    "llama-one-kv-head": lambda: LlamaConfig(**{**_SHAPE, "num_key_value_heads": 1}),
    "llama-no-groups": lambda: LlamaConfig(**{**_SHAPE, "num_key_value_heads": 4}),
    "llama-wide-heads": lambda: LlamaConfig(**_SHAPE, head_dim=16),
    "llama-yarn": lambda: LlamaConfig(**_SHAPE, rope_parameters=_YARN),
    "llama3": lambda: LlamaConfig(**_SHAPE, rope_parameters=_LLAMA3),
    "mistral": lambda: MistralConfig(**_SHAPE, sliding_window=5),
    "mistral-full": lambda: MistralConfig(**_SHAPE, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**_SHAPE),
    "qwen2-windows": lambda: Qwen2Config(
        **_SHAPE, use_sliding_window=True, sliding_window=5, layer_types=_KINDS
    ),
    "qwen3": lambda: Qwen3Config(**_SHAPE, head_dim=8),
}

OTHERS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gpt2": lambda: GPT2Config(**_COMMON, n_embd=32, n_layer=2, n_head=4),
    "opt": lambda: OPTConfig(**{**_SHAPE, "pad_token_id": 1}, ffn_dim=48, word_embed_proj_dim=32),
    "phi": lambda: PhiConfig(**_SHAPE),
    "gemma2": lambda: Gemma2Config(**_SHAPE, head_dim=8),
    "another activation": lambda: LlamaConfig(**_SHAPE, hidden_act="gelu"),
    "rotation by length": lambda: LlamaConfig(
        **_SHAPE, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    ),
}


def make_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """Random in all of its parameters, and loud enough that attention shows in the logits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        factory: Any = AutoModelForCausalLM
        model = factory.from_config(config)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                nn.init.uniform_(parameter, 0.7, 1.3)
            else:
                nn.init.normal_(parameter, std=2.0 * parameter.shape[-1] ** -0.5)
    ready: PreTrainedModel = model.to(dtype).eval().requires_grad_(False)
    return ready


def wrap(
    config: PreTrainedConfig, dtype: torch.dtype = torch.float64, tuning: Tuning | None = None
) -> tuple[PackedModel, LeanForward]:
    packed = PackedModel.wrap("m", make_model(config, dtype), VOCAB, tuning or Tuning())
    lean = lean_forward_of(packed)
    assert lean is not None
    return packed, lean


def texts(rows: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(2, VOCAB, size=(rows, 40)))


class Feeder:
    """Feeds rows of `texts` to a forward, through a state of its own."""

    def __init__(self, forward: Callable[..., Tensor], packed: PackedModel, rows: int = 4) -> None:
        self.forward = forward
        self.state = ModelState(packed.kv_layers, rows, SLOTS)
        self.texts = texts(rows)
        self.fed = dict.fromkeys(range(rows), 0)

    def feed(self, counts: dict[int, int], wanted: list[int] | None = None) -> Tensor:
        """The next `counts[row]` tokens of each row; logits [n, V] of the `wanted` of the pack."""
        rows = np.array(sorted(counts))
        parts = [np.arange(self.fed[r], self.fed[r] + counts[r]) for r in rows.tolist()]
        drawn = zip(rows.tolist(), parts, strict=True)
        tokens = np.concatenate([self.texts[row].numpy()[part] for row, part in drawn])
        positions = np.concatenate(parts)
        amounts = np.array([len(part) for part in parts])
        slots = self.state.append(rows, amounts, tokens, positions)
        view = self.state.view(rows, amounts, positions, slots)
        index = torch.tensor(range(len(tokens)) if wanted is None else wanted, dtype=torch.int64)
        for row in counts:
            self.fed[row] += counts[row]
        with torch.inference_mode():
            return self.forward(torch.from_numpy(tokens), torch.from_numpy(positions), view, index)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", LEAN)
def test_packs_give_the_logits_of_the_ordinary_forward(name: str, dtype: torch.dtype) -> None:
    ordinary = make_model(LEAN[name](), dtype)
    packed, lean = wrap(LEAN[name](), dtype)
    feeder = Feeder(lean, packed)
    with torch.inference_mode():
        wanted = ordinary(texts(4)).logits[:, :, :VOCAB]
    got: dict[int, list[Tensor]] = {row: [] for row in range(4)}
    # One group as it stands; one with idle places; one with an idle row; a long row alone.
    for counts in (
        dict.fromkeys(range(4), 6),
        {0: 1, 1: 4, 2: 1, 3: 2},
        {0: 2, 2: 2},
        {0: 3, 1: 20},
        {3: 1},
    ):
        logits = torch.split(feeder.feed(counts), [counts[row] for row in sorted(counts)])
        for row, part in zip(sorted(counts), logits, strict=True):
            got[row].append(part)
    # In float64 transformers' norms still round to float32.
    tolerance = 1e-4 if dtype == torch.float64 else 5e-3
    for row in range(4):
        ours = torch.cat(got[row])
        torch.testing.assert_close(ours, wanted[row, : len(ours)], atol=tolerance, rtol=0.0)


@pytest.mark.parametrize("name", LEAN)
def test_token_trees_give_the_logits_of_the_packed_forward(name: str) -> None:
    packed, lean = wrap(LEAN[name]())
    lines = [[0], [1], [0, 2], [0, 3], [1, 4]]  # from a root to each node of a row
    logits = []
    for forward in (packed.forward, lean):
        feeder = Feeder(forward, packed)
        feeder.feed(dict.fromkeys(range(3), 7))
        rows, counts = np.arange(3), np.full(3, len(lines))
        positions = np.tile([6 + len(line) for line in lines], 3)
        visible = torch.zeros(len(positions), len(lines), dtype=torch.bool)
        for token in range(len(positions)):
            visible[token, lines[token % len(lines)]] = True
        tokens = torch.arange(len(positions)) + 5
        slots = feeder.state.append(rows, counts, tokens.numpy(), positions)
        starts = np.array([7, 7, 7, SLOTS])
        tree = TreeMask(starts, visible)
        view = feeder.state.view(rows, counts, positions, slots, tree)
        with torch.inference_mode():
            index = torch.arange(len(tokens))
            logits.append(forward(tokens, torch.from_numpy(positions), view, index))
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("wanted", [[], [7], [9, 2]])
def test_only_the_wanted_logits_are_computed(wanted: list[int]) -> None:
    packed, lean = wrap(LEAN["llama-tied"]())
    everything = Feeder(lean, packed).feed({0: 6, 2: 6})
    some = Feeder(lean, packed).feed({0: 6, 2: 6}, wanted)
    torch.testing.assert_close(some, everything[wanted], atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_have_no_lean_forward(name: str) -> None:
    assert LeanForward.build(make_model(OTHERS[name]()), VOCAB) is None


def _hook(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)


def _replace_forward(model: Any) -> None:  # as accelerate does
    linear = model.model.layers[0].self_attn.q_proj
    linear.forward = linear.forward


def _replace_linear(model: Any) -> None:  # as quantisation does
    class Quantised(nn.Linear):
        pass

    model.model.layers[2].mlp.up_proj = Quantised(32, 48, bias=False, dtype=torch.float64)


def _spread(model: Any) -> None:
    model.model.layers[2].to("meta")


def _replace_norm(model: Any) -> None:
    model.model.norm = nn.LayerNorm(32, dtype=torch.float64)


@pytest.mark.parametrize(
    "change", [_hook, _replace_forward, _replace_linear, _spread, _replace_norm]
)
def test_changed_modules_have_no_lean_forward(change: Callable[[Any], None]) -> None:
    model = make_model(LEAN["llama"]())
    assert LeanForward.build(model, VOCAB) is not None
    change(model)
    assert LeanForward.build(model, VOCAB) is None


def test_a_lean_forward_that_says_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed, lean = wrap(LEAN["qwen2-windows"]())
    with torch.inference_mode():
        assert check(packed, lean) is None
        monkeypatch.setattr(lean, "_rotations", lean._rotations.flip(1))
        assert "its logits differ" in str(check(packed, lean))
    monkeypatch.setattr("modelpool.lean_forward._window", lambda *_: 6)
    assert lean_forward_of(packed) is None


def test_plain_weights_are_shared_with_the_model() -> None:
    packed, lean = wrap(LEAN["llama"]())
    attention: Any = packed.model.model.layers[0].self_attn
    whole = attention.q_proj.weight.untyped_storage().data_ptr()
    assert attention.k_proj.weight.untyped_storage().data_ptr() == whole
    lean.release()
    got, wanted = (Feeder(forward, packed).feed({0: 6}) for forward in (lean, packed.forward))
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0.0)


@pytest.mark.skipif(not can_pack(), reason="oneDNN without bfloat16")
@pytest.mark.parametrize("first", [False, True], ids=["plain", "packed before"])
@pytest.mark.parametrize("name", ["llama-tied", "llama-biased", "qwen2", "qwen3"])
def test_bfloat16_is_packed_and_its_plain_weights_can_be_freed(name: str, first: bool) -> None:
    packed, lean = wrap(LEAN[name](), torch.bfloat16, Tuning(pack_weights=first))
    wanted = Feeder(packed.forward, packed).feed({0: 6, 1: 6}).double()
    lean.release()
    layer: Any = packed.model.model.layers[0]
    assert layer.self_attn.q_proj.weight.is_meta
    got = Feeder(lean, packed).feed({0: 6, 1: 6}).double()
    assert (got - wanted).abs().mean() < 0.1 * wanted.std()
    assert Feeder(lean, packed).feed({0: 6}, []).shape == (0, VOCAB)


def test_large_float32_weights_are_packed() -> None:
    shape = {**_SHAPE, "hidden_size": 256, "intermediate_size": 512}
    packed, lean = wrap(LlamaConfig(**shape), torch.float32, Tuning(lean=True))
    wanted = Feeder(packed.forward, packed).feed({0: 12})
    lean.release()
    down: Any = packed.model.model.layers[0].mlp.down_proj
    assert down.weight.is_meta == can_pack()
    got = Feeder(lean, packed).feed({0: 12})
    assert (got - wanted).abs().mean() < 1e-4 * wanted.std()
