"""Small random models that share one byte-level BPE tokenizer, written as local checkpoints.

Each saver makes a directory that `transformers` loads: weights in safetensors, the config,
and the tokenizer. Weights are drawn from a seed, and are large enough that the logits of
different contexts differ clearly: with the library's initialisation (0.02) every greedy
continuation of so small a model is one repeated token.
"""

import functools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from modelpool import ModelPool
from modelpool.config import PoolConfig, validate_config
from modelpool.device_manager import DeviceInfo
from test_support.toy_hybrid import RECURRENT, ToyHybridConfig, layer_types

VOCAB_SIZE = 320  # 256 bytes, one special id, the rest merges
EOS_TOKEN = "<|endoftext|>"
MAX_POSITIONS = 512
HYBRID = "toy-hybrid"
HYBRIDS = (HYBRID, "qwen3.5", "lfm2", "granite-4-h", "falcon-h1")  # with recurrent layers
GEMMAS = frozenset({"gemma2", "gemma3_text"})
SLIDING_WINDOW = 8  # positions, own one included; most contexts of the tests are longer

_TEXT = (
    "the quick brown fox jumps over the lazy dog and runs through the forest again",
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n",
    "the sum of the numbers from one to ten is fifty five, and the product is larger",
    "for index, value in enumerate(values):\n    print(index, value)\n",
    "there is more than one way to count the tokens of a sentence in another language",
)


def make_tokenizer(directory: Path | str) -> PreTrainedTokenizerBase:
    """Write the shared tokenizer (`VOCAB_SIZE` ids, id 0 ends a text) and return it."""
    tokenizer: PreTrainedTokenizerBase = cast(Any, PreTrainedTokenizerFast)(
        tokenizer_object=Tokenizer.from_str(_tokenizer_json()),
        eos_token=EOS_TOKEN,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(str(directory))
    return tokenizer


def pool_of(
    source: Path | str, *devices: DeviceInfo, pack_weights: bool = True, **member: Any
) -> ModelPool:
    """Of one member, `m`, on the CPU unless `member` says otherwise."""
    model = {"name": "m", "source": str(source), "device": "cpu", **member}
    settings = {"target": "m", "models": [model], "pack_weights": pack_weights}
    return ModelPool(validate_config(PoolConfig, settings, "pool"), devices=devices or None)


def edit_weights(directory: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    """Of a checkpoint in one file; `edit` changes them in place."""
    file = directory / "model.safetensors"
    weights = load_file(file)
    edit(weights)
    save_file(weights, file, {"format": "pt"})


def edit_config(directory: Path, **settings: Any) -> Path:
    """Some settings of a checkpoint's configuration are others then."""
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return directory


def save_model(
    kind: type[PreTrainedConfig],
    directory: Path | str,
    *,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    vocab_size: int = VOCAB_SIZE,
    seed: int = 0,
    dtype: str = "float64",
    tied: bool | None = None,
    **others: Any,
) -> Path:
    """Write a random model with its tokenizer.

    `head_dim`: by default the heads share `hidden`; `tied`: by default as its class has it;
    `others`: further settings, or others than these.
    """
    settings = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": MAX_POSITIONS,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
        **_settings_of(kind, hidden, layers, heads),
    }
    if head_dim is not None:
        settings["head_dim"] = head_dim
    if tied is not None:
        settings["tie_word_embeddings"] = tied
    return _save(kind(**settings | others), Path(directory), seed=seed, dtype=dtype)


save_llama = partial(save_model, LlamaConfig, tied=True)
save_qwen2 = partial(save_model, Qwen2Config, tied=True)  # biased queries, keys and values
save_qwen3 = partial(save_model, Qwen3Config, tied=True)  # norms of queries and keys
save_gpt2 = partial(save_model, GPT2Config)  # learnt positions, no grouped heads
SAVERS: dict[str, Callable[..., Path]] = {
    "llama": save_llama,
    "qwen2": save_qwen2,
    "qwen3": save_qwen3,
    "mistral": partial(save_model, MistralConfig, tied=True),  # a window in every layer
    "gpt2": save_gpt2,
    "opt": partial(save_model, OPTConfig),  # learnt positions from 2 on
    "gpt-neox": partial(save_model, GPTNeoXConfig),  # parallel attention, partial rotation
    "phi": partial(save_model, PhiConfig),  # parallel attention, a biased output
    "gemma2": partial(save_model, Gemma2Config, tied=True),  # capped scores, windows in turn
    "gemma3": partial(save_model, Gemma3TextConfig, tied=True),  # two rotations, windows in turn
    HYBRID: partial(save_model, ToyHybridConfig, tied=True),  # recurrent layers around attention
    "qwen3.5": partial(save_model, Qwen3_5TextConfig, tied=True),  # Gated DeltaNet
    "lfm2": partial(save_model, Lfm2Config, tied=True),  # short convolutions
    "granite-4-h": partial(save_model, GraniteMoeHybridConfig, tied=True),  # Mamba-2
    "falcon-h1": partial(save_model, FalconH1Config, tied=True),  # the same beside attention
}


def is_post_norm(name: str) -> bool:
    """Whether a Gemma's weight scales what a layer adds to the residual stream."""
    return "post_attention_layernorm" in name or "post_feedforward_layernorm" in name


def _settings_of(kind: type, hidden: int, layers: int, heads: int) -> dict[str, Any]:
    """What a class has beside the common settings, or in their place."""
    kinds = ("sliding_attention", "full_attention")
    gemma = {
        "head_dim": hidden // heads,
        "query_pre_attn_scalar": hidden // heads,
        "sliding_window": SLIDING_WINDOW,
        "layer_types": [kinds[layer % 2] for layer in range(layers)],
    }
    alone = {"num_key_value_heads": heads}
    mixed = layer_types(2 * layers + 1)
    hybrid = {"num_hidden_layers": len(mixed), "layer_types": mixed}
    mamba = {
        "mamba_n_heads": 4,
        "mamba_d_head": hidden // 2,
        "mamba_n_groups": 2,
        "mamba_d_state": 8,
    }
    settings: dict[type, dict[str, Any]] = {
        Qwen3Config: {"head_dim": hidden // heads},
        MistralConfig: {"sliding_window": SLIDING_WINDOW},
        GPT2Config: {"bos_token_id": 0, **alone},
        OPTConfig: {"ffn_dim": 4 * hidden, "word_embed_proj_dim": hidden, **alone},
        GPTNeoXConfig: alone,
        Gemma2Config: {**gemma, "attn_logit_softcapping": 2.0},
        Gemma3TextConfig: gemma,
        GptOssConfig: {
            "head_dim": hidden // heads,
            "sliding_window": SLIDING_WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        MixtralConfig: {"num_local_experts": 4, "num_experts_per_tok": 2},
        Qwen3MoeConfig: {
            "head_dim": hidden // heads,
            "moe_intermediate_size": hidden,
            "norm_topk_prob": True,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
        ToyHybridConfig: hybrid,
        Qwen3_5TextConfig: {
            **hybrid,
            "head_dim": hidden // heads,
            "linear_num_key_heads": heads // 2,
            "linear_num_value_heads": heads,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
        },
        Lfm2Config: {
            **hybrid,
            "layer_types": [one.replace(RECURRENT, "conv") for one in mixed],
            "block_auto_adjust_ff_dim": False,
        },
        GraniteMoeHybridConfig: {
            **hybrid,
            **mamba,
            "num_local_experts": 0,
            "shared_intermediate_size": 2 * hidden,
        },
        FalconH1Config: {**mamba, "mamba_d_ssm": 2 * hidden},
    }
    return settings.get(kind, {})


def _save(config: PreTrainedConfig, directory: Path, *, seed: int, dtype: str) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cast(Any, AutoModelForCausalLM).from_config(config)
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name:
                torch.nn.init.uniform_(parameter, 0.7, 1.3)
            elif name.endswith("A_log"):  # of recurrent states, which are to last
                torch.nn.init.uniform_(parameter, -5.0, -1.0)
            elif "embed" in name or "wte" in name or "lm_head" in name:
                torch.nn.init.normal_(parameter, std=2.0 * parameter.shape[-1] ** -0.5)
            else:  # louder than the embeddings, or tied ones make each token predict itself
                torch.nn.init.normal_(parameter, std=3.5 * min(parameter.shape) ** -0.5)
            if config.model_type in GEMMAS and "norm" in name:  # it multiplies by 1 + weight
                loudness = 8.0 if is_post_norm(name) else 2.0 if "self_attn" in name else 1.0
                parameter.data.mul_(loudness).sub_(1.0)
    model.to(getattr(torch, dtype)).save_pretrained(str(directory))
    make_tokenizer(directory)
    return directory


@functools.cache
def _tokenizer_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    return tokenizer.to_str()
