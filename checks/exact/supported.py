"""The page of supported models, of what `checks.exact.families` found.

    python -m checks.exact.families --classes named > FIGURES.json
    python -m checks.exact.supported FIGURES.json [MORE.json] > docs/models.md

What a released shape takes is told by a model without weights.
"""

import argparse
import json
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4MoeLiteConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from checks.exact.families import build, quiet, settings_of
from checks.exact.named_families import NAMED
from checks.exact.small_configs import Family
from modelpool import ModelPool
from modelpool.gguf.architectures import ARCHITECTURES
from modelpool.outline import outline_of

CHECKS = 18  # that a family passes
_GB, _KIB = 1e9, 1024


def _sizes(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **more: int
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


# By family a released model, its parameters in billions, and its shape, all from memory: the
# defaults of its class where nothing is given.
PUBLISHED: Mapping[str, tuple[str, float, Callable[[], PreTrainedConfig]]] = {
    "llama 3": ("Llama 3.1 8B", 8.03, lambda: LlamaConfig(
        vocab_size=128_256, **_sizes(4096, 14_336, 32, 32, 8))),
    "mistral 7b": ("Mistral 7B", 7.24, MistralConfig),
    "qwen2.5": ("Qwen2.5 7B", 7.62, lambda: Qwen2Config(
        vocab_size=152_064, **_sizes(3584, 18_944, 28, 28, 4))),
    "qwen3 8b": ("Qwen3 8B", 8.19, lambda: Qwen3Config(
        vocab_size=151_936, **_sizes(4096, 12_288, 36, 32, 8, head_dim=128))),
    "qwen3 30b-a3b": ("Qwen3 30B-A3B", 30.5, lambda: Qwen3MoeConfig(
        vocab_size=151_936, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, **_sizes(2048, 6144, 48, 32, 4, head_dim=128))),
    "gemma 2 9b": ("Gemma 2 9B", 9.24, lambda: Gemma2Config(
        **_sizes(3584, 14_336, 42, 16, 8, head_dim=256))),
    "gemma 3 text": ("Gemma 3 27B, text", 27.0, lambda: Gemma3TextConfig(
        vocab_size=262_208, **_sizes(5376, 21_504, 62, 32, 16, head_dim=128))),
    "olmo 2": ("OLMo 2 7B", 7.30, lambda: Olmo2Config(
        vocab_size=100_352, **_sizes(4096, 11_008, 32, 32, 32))),
    "phi-4-mini": ("Phi-4-mini", 3.84, lambda: Phi3Config(
        vocab_size=200_064, tie_word_embeddings=True, **_sizes(3072, 8192, 32, 24, 8))),
    "gpt-2": ("GPT-2", 0.124, GPT2Config),
    "mixtral 8x7b": ("Mixtral 8x7B", 46.7, MixtralConfig),
    "gpt-oss": ("gpt-oss-20b", 20.9, lambda: GptOssConfig(
        num_hidden_layers=24, num_local_experts=32)),
    "deepseek v3": ("DeepSeek-V3", 671.0, DeepseekV3Config),
    "glm-4.7-flash": ("GLM-4.7-Flash", 30.0, Glm4MoeLiteConfig),
}  # fmt: skip

_HEAD = """\
# Supported models

Made by `python -m checks.exact.supported`; do not edit. Each family is a small random model of its
class, with the layers, rotations and scales of the released ones. Served in float64 it passed all
{checks} checks: alone and in batches of 4 and 16, with chains and trees of drafts, beyond
its windows, after cached prefixes, where rows are taken back and where another replica began,
greedy texts are those of `transformers`' `generate` (with recurrent layers those of a plain loop in
float64), and sampled ones are the same with drafts and without. **No released weights were run.**
What is refused, and why: [guarantees](guarantees.md#supported-models).

- forward: `direct` is a shorter way through the model to the same bits, `generic` the class's own.
- int8, int4: of linear layers and experts, which ones `weights: int8` and `weights: int4` quantise
  on a CPU. It is read off the class, and no part of these checks.
- GB, KiB: weights, and keys and values of a token, of a released shape in bfloat16. The shapes are
  from memory. Experts of gpt-oss count as they are kept, not as stored.
{gguf}

| family | class | forward | int8, int4 | released shape | GB | KiB |
|---|---|---|---|---|---|---|
"""


def page(verified: Iterable[str]) -> str:
    """Of the families of these names."""
    names = frozenset(verified)
    rows = [_row(family) for family in NAMED if family.name in names]
    return _HEAD.format(checks=CHECKS, gguf=_gguf()) + "".join(
        f"| {' | '.join(row)} |\n" for row in rows
    )


def _gguf() -> str:
    read = ", ".join(f"`{name}`" for name in ARCHITECTURES)
    told = (
        f"- GGUF files are read of these architectures, as llama.cpp names them: {read}. Mixtral's"
    )
    told += " are of `llama`, OLMo 3's of `olmo2`, DeepSeek V2's and V3's of `deepseek2`, Mistral"
    told += " Small 3's of `mistral3`, Phi 4's of `phi3`. How those of the hub are named:"
    told += " [quickstart](quickstart.md#your-own-models)."
    return textwrap.fill(told, 100, subsequent_indent="  ", break_on_hyphens=False)


def memory(config: PreTrainedConfig) -> tuple[int, int]:
    """Parameters, and elements of keys and values of a token."""
    outline = outline_of(config)
    return outline.parameter_count, outline.kv_elements_per_token


def _row(family: Family) -> Sequence[str]:
    with quiet(), tempfile.TemporaryDirectory() as directory:
        pool = ModelPool.from_config(settings_of(build(family, Path(directory)))["pool"])
        packed = pool.get("target")
        forward = "generic" if packed.shortcut is None else "direct"
        kind, config = type(packed.model).__name__, packed.model.config
    quantised = "all but experts" if outline_of(config).has_plain_experts else "all"
    shape = ("", "", "")
    if family.name in PUBLISHED:
        name, _, published = PUBLISHED[family.name]
        count, elements = memory(published())
        shape = (name, f"{2 * count / _GB:.1f}", f"{2 * elements / _KIB:.0f}")
    return (family.name, f"`{kind}`", forward, quantised, *shape)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "figures", type=Path, nargs="+", help="what `checks.exact.families` printed"
    )
    given = parser.parse_args(arguments)
    lasts = [file.read_text(encoding="utf-8").splitlines()[-1] for file in given.figures]
    found = [one for last in lasts for one in json.loads(last)["families"]]
    exact = [one["name"] for one in found if (one["status"], one["checks"]) == ("exact", CHECKS)]
    sys.stdout.write(page(exact))
    return 0


if __name__ == "__main__":
    sys.exit(main())
