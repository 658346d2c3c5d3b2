"""Random checkpoints of any class, in float64, with the bundled tokenizer, and their own texts.

Contract: texts vary and depend on what was said long before. Weights that a class begins with at
0 or 1 stay near them: norms that multiply by 1 + weight, gates, biases of routers.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from checks.exact.recurrences import by_recurrence
from modelpool.checkpoint.bundled import bundled_root

Tokens = tuple[int, ...]

_EMBEDDINGS = ("embed", "wte", "wpe", "lm_head", "embd", "shared.weight", "output_projection")
# What is looked up by token, and multiplied by the square root of the width before it is used.
_SCALED = ("gemma",)
# Of mixtures: quiet, or one expert has all the weight of a token.
_ROUTERS = (
    "gate.weight",
    "wg.weight",
    "router.weight",
    "router.layer.weight",
    "router.proj.weight",
)
_LARGEST = 8e6  # parameters


class TooLargeError(Exception):
    """A configuration that does not come out small."""


def random_model(config: PreTrainedConfig, kind: Any, seed: int = 0) -> PreTrainedModel:
    """A model of `kind`, in float64. Raises `TooLargeError`."""
    with torch.device("meta"):
        count = sum(one.numel() for one in kind._from_config(config).parameters())
    if count > _LARGEST:
        raise TooLargeError(f"{count / 1e6:.0f}M parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = kind._from_config(
            config, dtype=torch.float64, experts_implementation="eager"
        )
        with torch.no_grad():
            for name, weight in model.named_parameters():
                _draw(name, weight, config)
            for name, buffer in model.named_buffers():
                if name.endswith("correction_bias"):  # of a router
                    buffer.uniform_(0.0, 0.2)
    model.train(False)
    return model


def save(model: PreTrainedModel, directory: Path) -> Path:
    model.save_pretrained(str(directory))
    return _with_tokenizer(directory)


def put_inside(text: Path, directory: Path, config: PreTrainedConfig) -> Path:
    """A composite's checkpoint whose text part is the model of `text`, for composites that cannot
    be built here. Of its towers there is a weight that nobody may miss."""
    weights = load_file(text / "model.safetensors")
    inside = {
        name.replace("model.", "model.language_model.", 1): weight
        for name, weight in weights.items()
    }
    inside["model.vision_tower.stem.weight"] = torch.zeros(8, dtype=torch.float64)
    directory.mkdir()
    save_file(inside, directory / "model.safetensors", {"format": "pt"})
    config.dtype = torch.float64
    config.save_pretrained(str(directory))
    return _with_tokenizer(directory)


def _with_tokenizer(directory: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_root() / "tiny-1m" / name, directory / name)
    return directory


def load(directory: Path, kind: Any) -> PreTrainedModel:
    """As any program would, but for experts, whose grouped products know no float64."""
    model: PreTrainedModel = kind.from_pretrained(
        str(directory), dtype=torch.float64, experts_implementation="eager"
    )
    model.train(False)
    return by_recurrence(model)


@torch.inference_mode()
def generated(model: PreTrainedModel, prompt: Tokens, count: int, use_cache: bool = True) -> Tokens:
    """What `transformers` itself continues with."""
    inputs = torch.tensor([prompt])
    output: Tensor = cast(Any, model).generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=use_cache,
    )
    return tuple(output[0, len(prompt) :].tolist())


@torch.inference_mode()
def forgetting(model: PreTrainedModel, prompt: Tokens, text: Tokens, kept: int) -> int:
    """How many tokens of a text would be others if only the last `kept` tokens were known."""
    ids = torch.tensor([(*prompt, *text)[-len(text) - kept : -1]])
    best = model(input_ids=ids, use_cache=False).logits[0, -len(text) :].argmax(-1)
    return int((best != torch.tensor(text)).sum())


def _draw(name: str, weight: Tensor, config: PreTrainedConfig) -> None:
    """Louder than the embeddings, or a token's own weighs more than all that was said before."""
    if weight.dim() < 2:
        _draw_vector(name, weight)
    elif any(part in name for part in _EMBEDDINGS):
        width = weight.shape[-1]
        is_scaled = config.model_type.startswith(_SCALED) and "lm_head" not in name
        torch.nn.init.normal_(weight, std=2.0 * width**-0.5 / (width**0.5 if is_scaled else 1.0))
    elif name.endswith(_ROUTERS):
        torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    elif "norm" in name and weight.std(correction=0) == 0:  # of each head
        weight.add_(torch.empty_like(weight).uniform_(-0.3, 0.3))
    else:
        torch.nn.init.normal_(weight, std=3.5 * min(weight.shape[-2:]) ** -0.5)


def _draw_vector(name: str, weight: Tensor) -> None:
    is_norm = "norm" in name or "ln_" in name or "layernorm" in name.lower()
    if is_norm and name.endswith("bias"):
        return  # it would make every context predict the same token
    if name.endswith("A_log"):  # of recurrent states, which are to last
        weight.uniform_(-6.0, -1.0)
        return
    weight.add_(torch.empty_like(weight).uniform_(-0.3, 0.3))


def prompts_of(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[Tokens]:
    """Of ordinary tokens: special ones stand first and last in a vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randint(64, vocab_size - 64, (length,), generator=generator).tolist())
        for length in lengths
    ]
