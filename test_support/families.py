"""Small random families whose members resemble one another, so that drafts are accepted.

A family grows from one random model: the next member is a noisy copy of the last with another
layer that speaks softly. Sizes grow strictly, as chains want it.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from test_support import factories
from test_support.factories import GEMMAS, is_post_norm, make_tokenizer

SAVERS = factories.SAVERS
NAMES = ("small", "middle", "target")
_LAYERS = {"gpt2": "transformer.h", "gpt_neox": "gpt_neox.layers", "opt": "model.decoder.layers"}
# What a layer adds to the residual stream. Not covered: Gemma, which norms it afterwards.
_OUTPUTS = (
    "o_proj.",
    "out_proj.",
    "down_proj.",
    "c_proj.",
    ".dense.",
    "dense_4h_to_h.",
    "fc2.",
    "output_linear.",
)
_LOUDNESS = 0.3  # of a grown layer, beside its original


def perturb(model: PreTrainedModel, scale: float, seed: int) -> None:
    """Moves all weights by `scale` of each tensor's spread."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight.add_(scale * weight.std(correction=0) * noise)


def noisy_copy(source: Path, directory: Path, scale: float, seed: int) -> Path:
    """A copy whose weights are moved by `scale` of each tensor's spread."""
    model = _load(source)
    perturb(model, scale, seed)
    return _save(model, directory)


def grown_copy(source: Path, directory: Path) -> Path:
    """A copy with one more layer, which repeats the last one softly."""
    model = _load(source)
    config = AutoConfig.from_pretrained(str(source))
    last = config.num_hidden_layers - 1
    _set_layers(config, last + 2)
    weights = model.state_dict()
    prefix = _LAYERS.get(config.model_type, "model.layers")
    for name, weight in list(weights.items()):
        if name.startswith(f"{prefix}.{last}."):
            above = name.replace(f".{last}.", f".{last + 1}.", 1)
            weights[above] = _softened(config.model_type, name, weight)
    grown = cast(Any, AutoModelForCausalLM).from_config(config, dtype=model.dtype)
    grown.load_state_dict(weights)
    return _save(grown, directory)


def padded_copy(source: Path, directory: Path, rows: int, seed: int) -> Path:
    """A copy that knows `rows` more ids than the tokenizer, all likelier than the real ones."""
    model: Any = _load(source)
    count = model.config.vocab_size
    model.resize_token_embeddings(count + rows, mean_resizing=False)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            padding = layer.weight[count:]
            noise = torch.randn(padding.shape, generator=generator, dtype=torch.float64)
            padding.copy_(4.0 * layer.weight[:count].std() * noise)
    return _save(model, directory)


def save_family(
    directory: Path,
    architecture: str = "llama",
    *,
    noise: float = 0.05,
    seed: int = 0,
    padding: Sequence[int] = (0, 0, 0),
) -> dict[str, Path]:
    """Three models of growing size, weakest first, under `directory`.

    `padding` is how many ids beyond the tokenizer's each of them knows.
    """
    raw = SAVERS[architecture](directory / "small-raw", layers=1, seed=seed)
    paths = {"small": _unbiased_copy(raw, directory / "small")}
    for step, (below, name) in enumerate(itertools.pairwise(NAMES), start=1):
        grown = grown_copy(paths[below], directory / f"{name}-grown")
        paths[name] = noisy_copy(grown, directory / name, noise, seed + step)
    for name, rows in zip(NAMES, padding, strict=True):
        if rows:
            paths[name] = padded_copy(paths[name], directory / f"{name}-padded", rows, seed)
    return paths


def pool_settings(paths: dict[str, Path], dtype: str = "float64", **extra: Any) -> dict[str, Any]:
    """The `pool:` section for such a family; the last of `paths` is the target."""
    models = [
        {"name": name, "source": str(path), "dtype": dtype, "device": "cpu"}
        for name, path in paths.items()
    ]
    return {"target": list(paths)[-1], "models": models, **extra}


def _unbiased_copy(source: Path, directory: Path) -> Path:
    """A copy without norm biases: they would make every context predict the same token."""
    model = _load(source)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ("ln_" in name or "norm" in name) and name.endswith("bias"):
                weight.zero_()
    return _save(model, directory)


def _softened(model_type: str, name: str, weight: Tensor) -> Tensor:
    if model_type in GEMMAS:  # whose norms multiply by 1 + weight
        return _LOUDNESS * (1.0 + weight) - 1.0 if is_post_norm(name) else weight
    return weight * _LOUDNESS if any(part in name for part in _OUTPUTS) else weight


def _set_layers(config: PreTrainedConfig, layers: int) -> None:
    kinds = getattr(config, "layer_types", None)
    config.num_hidden_layers = layers
    if kinds is None or "layer_types" not in vars(config):  # it follows from their number
        return
    if config.model_type in GEMMAS:
        pattern = ["sliding_attention", "full_attention"]
        config.layer_types = [pattern[layer % len(pattern)] for layer in range(layers)]
    else:
        config.layer_types = [*kinds, *kinds[-1:] * (layers - len(kinds))]


def _load(source: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(str(source))
    return model


def _save(model: PreTrainedModel, directory: Path) -> Path:
    model.save_pretrained(str(directory))
    make_tokenizer(directory)
    return directory
