"""Small random models that share one byte-level BPE tokenizer, written as local checkpoints.

Each `save_*` makes a directory that `transformers` loads: weights in safetensors, the config,
and the tokenizer. Weights are drawn from a seed, and are large enough that the logits of
different contexts differ clearly: with the library's initialisation (0.02) every greedy
continuation of so small a model is one repeated token.
"""

import functools
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 320  # 256 bytes, one special id, the rest merges
EOS_TOKEN = "<|endoftext|>"
MAX_POSITIONS = 512
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


def save_llama(
    directory: Path | str,
    *,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    vocab_size: int = VOCAB_SIZE,
    seed: int = 0,
    dtype: str = "float64",
    tied: bool = True,
) -> Path:
    """Write a random Llama with its tokenizer."""
    config = LlamaConfig(
        **_shape(hidden, layers, heads, kv_heads, vocab_size), tie_word_embeddings=tied
    )
    return _save(config, Path(directory), seed=seed, dtype=dtype)


def save_qwen2(
    directory: Path | str,
    *,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    vocab_size: int = VOCAB_SIZE,
    seed: int = 0,
    dtype: str = "float64",
    tied: bool = True,
) -> Path:
    """Write a random Qwen2 (biased queries, keys and values) with its tokenizer."""
    config = Qwen2Config(
        **_shape(hidden, layers, heads, kv_heads, vocab_size), tie_word_embeddings=tied
    )
    return _save(config, Path(directory), seed=seed, dtype=dtype)


def save_qwen3(
    directory: Path | str,
    *,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    vocab_size: int = VOCAB_SIZE,
    seed: int = 0,
    dtype: str = "float64",
    tied: bool = True,
) -> Path:
    """Write a random Qwen3 (query and key norms) with its tokenizer."""
    config = Qwen3Config(
        **_shape(hidden, layers, heads, kv_heads, vocab_size),
        head_dim=hidden // heads,
        tie_word_embeddings=tied,
    )
    return _save(config, Path(directory), seed=seed, dtype=dtype)


def save_gpt2(
    directory: Path | str,
    *,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    vocab_size: int = VOCAB_SIZE,
    seed: int = 0,
    dtype: str = "float64",
) -> Path:
    """Write a random GPT-2 (learnt positions, no grouped heads) with its tokenizer."""
    config = GPT2Config(
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        n_positions=MAX_POSITIONS,
        vocab_size=vocab_size,
        bos_token_id=0,
        eos_token_id=0,
    )
    return _save(config, Path(directory), seed=seed, dtype=dtype)


def save_mistral(
    directory: Path | str,
    *,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    vocab_size: int = VOCAB_SIZE,
    seed: int = 0,
    dtype: str = "float64",
    tied: bool = True,
) -> Path:
    """Write a random Mistral (a sliding window in every layer) with its tokenizer."""
    config = MistralConfig(
        **_shape(hidden, layers, heads, kv_heads, vocab_size),
        sliding_window=SLIDING_WINDOW,
        tie_word_embeddings=tied,
    )
    return _save(config, Path(directory), seed=seed, dtype=dtype)


def save_opt(
    directory: Path | str,
    *,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    vocab_size: int = VOCAB_SIZE,
    seed: int = 0,
    dtype: str = "float64",
) -> Path:
    """Write a random OPT (learnt positions from 2 on) with its tokenizer."""
    config = OPTConfig(
        **_shape(hidden, layers, heads, heads, vocab_size),
        ffn_dim=4 * hidden,
        word_embed_proj_dim=hidden,
    )
    return _save(config, Path(directory), seed=seed, dtype=dtype)


def save_gpt_neox(
    directory: Path | str,
    *,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    vocab_size: int = VOCAB_SIZE,
    seed: int = 0,
    dtype: str = "float64",
) -> Path:
    """Write a random GPT-NeoX (parallel attention, partial rotation) with its tokenizer."""
    config = GPTNeoXConfig(**_shape(hidden, layers, heads, heads, vocab_size))
    return _save(config, Path(directory), seed=seed, dtype=dtype)


def save_phi(
    directory: Path | str,
    *,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    vocab_size: int = VOCAB_SIZE,
    seed: int = 0,
    dtype: str = "float64",
) -> Path:
    """Write a random Phi (parallel attention, a biased output) with its tokenizer."""
    config = PhiConfig(**_shape(hidden, layers, heads, kv_heads, vocab_size))
    return _save(config, Path(directory), seed=seed, dtype=dtype)


def save_gemma2(
    directory: Path | str,
    *,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    vocab_size: int = VOCAB_SIZE,
    seed: int = 0,
    dtype: str = "float64",
    tied: bool = True,
) -> Path:
    """Write a random Gemma 2 (capped scores, windows in turn) with its tokenizer."""
    config = Gemma2Config(
        **_shape(hidden, layers, heads, kv_heads, vocab_size),
        **_gemma_shape(hidden, layers, heads),
        attn_logit_softcapping=2.0,
        tie_word_embeddings=tied,
    )
    return _save(config, Path(directory), seed=seed, dtype=dtype)


def save_gemma3(
    directory: Path | str,
    *,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    vocab_size: int = VOCAB_SIZE,
    seed: int = 0,
    dtype: str = "float64",
    tied: bool = True,
) -> Path:
    """Write a random Gemma 3 for text (two rotations, windows in turn) with its tokenizer."""
    config = Gemma3TextConfig(
        **_shape(hidden, layers, heads, kv_heads, vocab_size),
        **_gemma_shape(hidden, layers, heads),
        tie_word_embeddings=tied,
    )
    return _save(config, Path(directory), seed=seed, dtype=dtype)


def save_perturbed(
    source: Path | str, directory: Path | str, *, noise: float = 0.03, seed: int = 0
) -> Path:
    """Write a copy of a checkpoint with each weight moved by `noise` of its tensor's spread.

    Such a pair agrees on some tokens and not on others, which two seeds never do.
    """
    model = AutoModelForCausalLM.from_pretrained(str(source))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = parameter.std().item() if parameter.numel() > 1 else 0.0
            shift = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_((noise * spread * shift).to(parameter.dtype))
    model.save_pretrained(str(directory))
    make_tokenizer(directory)
    return Path(directory)


def is_post_norm(name: str) -> bool:
    """Whether a Gemma's weight scales what a layer adds to the residual stream."""
    return "post_attention_layernorm" in name or "post_feedforward_layernorm" in name


def _shape(hidden: int, layers: int, heads: int, kv_heads: int, vocab_size: int) -> dict[str, Any]:
    return {
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
    }


def _gemma_shape(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    kinds = ("sliding_attention", "full_attention")
    return {
        "head_dim": hidden // heads,
        "query_pre_attn_scalar": hidden // heads,
        "sliding_window": SLIDING_WINDOW,
        "layer_types": [kinds[layer % 2] for layer in range(layers)],
    }


def _save(config: PreTrainedConfig, directory: Path, *, seed: int, dtype: str) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cast(Any, AutoModelForCausalLM).from_config(config)
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name:
                torch.nn.init.uniform_(parameter, 0.7, 1.3)
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
