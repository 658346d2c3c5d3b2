"""Small random decoders of Llama's shape, of other shapes that are known, and others; packs of
tokens to feed them."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
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

from modelpool.attention.kv_view import TreePaths
from modelpool.attention.path import reference
from modelpool.fast.layer_reference import LayerKernels, gated, rotate_and_write
from modelpool.forward import Forward, ForwardOutput, HiddenLayers
from modelpool.packed_model import PackedModel
from statemgr import ModelState

VOCAB = 90  # of 96: the rest is padding
SLOTS = 128
COMMON: dict[str, Any] = {"vocab_size": 96, "bos_token_id": 0, "eos_token_id": 0}
SHAPE: dict[str, Any] = {
    **COMMON,
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

LLAMA_SHAPED: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "llama-tied": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama-biased": lambda: LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "llama-one-kv-head": lambda: LlamaConfig(**{**SHAPE, "num_key_value_heads": 1}),
    "llama-no-groups": lambda: LlamaConfig(**{**SHAPE, "num_key_value_heads": 4}),
    "llama-wide-heads": lambda: LlamaConfig(**SHAPE, head_dim=16),
    "llama-yarn": lambda: LlamaConfig(**SHAPE, rope_parameters=_YARN),
    "llama3": lambda: LlamaConfig(**SHAPE, rope_parameters=_LLAMA3),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=5),
    "mistral-full": lambda: MistralConfig(**SHAPE, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "qwen2-windows": lambda: Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=5, layer_types=_KINDS
    ),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=8),
}

_IN_TURN = {"sliding_window": 5, "layer_types": _KINDS}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MULTIPLIED = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.5,
    "logits_scaling": 8.0,
}
_TUNED = {**_YARN, "llama_4_scaling_beta": 0.5}

# By model type, or by what is the same but for its settings.
SHAPED: dict[str, dict[str, Any]] = {
    "apertus": {},
    "cohere": {"logit_scale": 0.3},
    "cohere2": {**_IN_TURN, "logit_scale": 0.3},
    "ernie4_5": {"use_bias": True},
    "exaone4": _IN_TURN,
    "gemma": {"head_dim": 8},
    "gemma2": {**_IN_TURN, "head_dim": 8, "query_pre_attn_scalar": 8},
    "gemma3_text": {**_IN_TURN, "head_dim": 8, "query_pre_attn_scalar": 8},
    "glm": {"head_dim": 8, "attention_bias": True},
    "glm4": {"head_dim": 8},
    "gpt_oss": {**_IN_TURN, "head_dim": 8, "num_local_experts": 4},
    "granite": _MULTIPLIED,
    "granitemoehybrid": {
        **_MULTIPLIED,
        "layer_types": ["full_attention"] * 3,
        "num_local_experts": 0,
        "shared_intermediate_size": 48,
        "mamba_n_heads": 4,
    },
    "hunyuan_v1_dense": {"head_dim": 8},
    "llama-gelu": {"hidden_act": "gelu"},
    "llama-by-length": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    },
    "ministral": {**_IN_TURN, "head_dim": 8},
    "ministral3": {"rope_parameters": _TUNED, "head_dim": 8, "sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo": {},
    "olmo2": {},
    "olmo3": _IN_TURN,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phi3": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    },
    "qwen3_moe": {**_EXPERTS, "num_experts": 4, "head_dim": 8},
    "seed_oss": {"head_dim": 8, "attention_bias": True, "attention_out_bias": False},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "starcoder2": {},
}


def shaped(name: str, **more: Any) -> PreTrainedConfig:
    """A small configuration of one of `SHAPED`."""
    kind = CONFIG_MAPPING[name.partition("-")[0]]
    config: PreTrainedConfig = kind(**{**SHAPE, **SHAPED[name], **more})
    return config


# By row, tokens. One group as it stands; one with idle places; one with an idle row; a long row
# alone; a token alone.
PACKS: tuple[dict[int, int], ...] = (
    {0: 6, 1: 6, 2: 6, 3: 6},
    {0: 1, 1: 4, 2: 1, 3: 2},
    {0: 2, 2: 2},
    {0: 3, 1: 20},
    {3: 1},
)

TREE_LINES = [[0], [1], [0, 2], [0, 3], [1, 4]]  # from a root to each node of a row

OTHERS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gpt2": lambda: GPT2Config(**COMMON, n_embd=32, n_layer=2, n_head=4),
    "opt": lambda: OPTConfig(**{**SHAPE, "pad_token_id": 1}, ffn_dim=48, word_embed_proj_dim=32),
    "phi": lambda: PhiConfig(**SHAPE),
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
    if dtype == torch.float64 and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # for which experts have no other kernels
    ready: PreTrainedModel = model.to(dtype).eval().requires_grad_(False)
    return ready


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def texts(rows: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(2, VOCAB, size=(rows, 40)))


class Feeder:
    """Feeds rows of `texts` to a forward, through a state of its own."""

    def __init__(self, forward: Forward, packed: PackedModel, rows: int = 4) -> None:
        self.forward = forward
        self.state = ModelState(packed.kv_layers, rows, SLOTS, recurrent=packed.recurrent_layers)
        self.texts = texts(rows)
        self.fed = dict.fromkeys(range(rows), 0)

    def feed(self, counts: dict[int, int], wanted: list[int] | None = None) -> Tensor:
        """The next `counts[row]` tokens of each row; logits [n, V] of the `wanted` of the pack."""
        return self.read(counts, wanted).logits

    def read(
        self, counts: dict[int, int], wanted: list[int] | None = None, hidden: HiddenLayers = ()
    ) -> ForwardOutput:
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
        pack = torch.from_numpy(tokens), torch.from_numpy(positions), view, index
        with torch.inference_mode():
            return self.forward(*pack, hidden)

    def feed_all(self, packs: Iterable[dict[int, int]]) -> dict[int, Tensor]:
        """By row, the logits of all its tokens."""
        got: dict[int, list[Tensor]] = defaultdict(list)
        for counts in packs:
            rows = sorted(counts)
            parts = torch.split(self.feed(counts), [counts[row] for row in rows])
            for row, part in zip(rows, parts, strict=True):
                got[row].append(part)
        return {row: torch.cat(parts) for row, parts in got.items()}


def feed_tree(forward: Forward, packed: PackedModel) -> Tensor:
    """Logits [15, V] of a tree of five nodes after seven tokens of each of three rows."""
    return read_tree(forward, packed).logits


def read_tree(forward: Forward, packed: PackedModel, hidden: HiddenLayers = ()) -> ForwardOutput:
    lines = TREE_LINES
    feeder = Feeder(forward, packed)
    feeder.feed(dict.fromkeys(range(3), 7))
    rows, counts = np.arange(3), np.full(3, len(lines))
    positions = np.tile([6 + len(line) for line in lines], 3)
    tokens = torch.arange(len(positions)) + 5
    slots = feeder.state.append(rows, counts, tokens.numpy(), positions)
    starts = np.array([7, 7, 7, SLOTS])
    paths = torch.tensor([[*line, line[-1]][:2] for line in lines] * 3, dtype=torch.int32)
    tree = TreePaths(starts, paths)
    view = feeder.state.view(rows, counts, positions, slots, tree)
    with torch.inference_mode():
        return forward(tokens, torch.from_numpy(positions), view, torch.arange(len(tokens)), hidden)


def reference_kernels() -> LayerKernels:
    """In plain torch."""
    return LayerKernels(rotate_and_write, reference, gated)
