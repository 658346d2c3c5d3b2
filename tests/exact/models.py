"""Small random families whose members resemble one another, so that drafts are accepted.

A family grows from one random model: the next member is a noisy copy of the last with another
layer that speaks softly. Sizes grow strictly, as chains want it.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tests.modelpool.factories import make_tokenizer, save_gpt2, save_llama, save_qwen3

SAVERS: dict[str, Callable[..., Path]] = {
    "llama": save_llama,
    "qwen3": save_qwen3,
    "gpt2": save_gpt2,
}
NAMES = ("small", "middle", "target")
_OUTPUTS = ("o_proj", "down_proj", "c_proj")  # what a layer adds to the residual stream
_LOUDNESS = 0.3  # of a grown layer, beside its original


def noisy_copy(source: Path, directory: Path, scale: float, seed: int) -> Path:
    """A copy whose weights are moved by `scale` of each tensor's spread."""
    model = _load(source)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            spread = weight.std(correction=0)
            weight.add_((scale * spread * noise).to(weight.dtype))
    return _save(model, directory)


def grown_copy(source: Path, directory: Path) -> Path:
    """A copy with one more layer, which repeats the last one softly."""
    model = _load(source)
    config = AutoConfig.from_pretrained(str(source))
    last = config.num_hidden_layers - 1
    _set_layers(config, last + 2)
    weights = model.state_dict()
    prefix = "transformer.h" if config.model_type == "gpt2" else "model.layers"
    for name, weight in list(weights.items()):
        if name.startswith(f"{prefix}.{last}."):
            loudness = _LOUDNESS if any(part in name for part in _OUTPUTS) else 1.0
            weights[name.replace(f".{last}.", f".{last + 1}.", 1)] = weight * loudness
    grown = cast(Any, AutoModelForCausalLM).from_config(config, dtype=model.dtype)
    grown.load_state_dict(weights)
    return _save(grown, directory)


def save_family(
    directory: Path, architecture: str = "llama", *, noise: float = 0.05, seed: int = 0
) -> dict[str, Path]:
    """Three models of growing size, weakest first, under `directory`."""
    raw = SAVERS[architecture](directory / "small-raw", layers=1, seed=seed)
    paths = {"small": _unbiased_copy(raw, directory / "small")}
    for step, (below, name) in enumerate(itertools.pairwise(NAMES), start=1):
        grown = grown_copy(paths[below], directory / f"{name}-grown")
        paths[name] = noisy_copy(grown, directory / name, noise, seed + step)
    return paths


def pool_settings(paths: dict[str, Path], dtype: str = "float64", **extra: Any) -> dict[str, Any]:
    """The `pool:` section for such a family; the last of `paths` is the target."""
    models = [
        {"name": name, "source": str(path), "dtype": dtype, "device": "cpu"}
        for name, path in paths.items()
    ]
    return {"target": list(paths)[-1], "models": models, **extra}


def _unbiased_copy(source: Path, directory: Path) -> Path:
    """A copy without norm biases: GPT-2's would make every context predict the same token."""
    model = _load(source)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "ln_" in name and name.endswith("bias"):
                weight.zero_()
    return _save(model, directory)


def _set_layers(config: PreTrainedConfig, layers: int) -> None:
    config.num_hidden_layers = layers
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        config.layer_types = [kinds[0]] * layers


def _load(source: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(str(source))
    return model


def _save(model: PreTrainedModel, directory: Path) -> Path:
    model.save_pretrained(str(directory))
    make_tokenizer(directory)
    return directory
