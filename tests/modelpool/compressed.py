"""Checkpoints as compressed-tensors writes them: int8 weights with a scale for each channel."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelpool.fast.cpu import int8_refusal
from modelpool.fast.experts import QuantisedExperts
from modelpool.fast.panels import PanelWeight, quantised_refusal
from modelpool.fast.quantised import QuantisedEmbedding, QuantisedLinear, QuantisedWeight
from modelpool.packed_model import PackedModel
from modelpool.probe import probed
from test_support.factories import edit_config

WEIGHTS: dict[str, Any] = {
    "num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False,
    "group_size": None, "observer": "minmax",
}  # fmt: skip
ACTIVATIONS: dict[str, Any] = {**WEIGHTS, "strategy": "token", "dynamic": True, "observer": None}
IGNORED = "lm_head"
# By oneDNN, on a CPU that computes in bfloat16, too; and by any kernels.
needs_int8 = pytest.mark.skipif(int8_refusal() is not None, reason=str(int8_refusal()))
needs_quantised = pytest.mark.skipif(quantised_refusal() is not None, reason="no int8 at all")


def logits(model: PackedModel) -> torch.Tensor:
    with torch.inference_mode():
        return probed(model.forward, model, ((0, 6), (6, 9)))[0].float()


def held_bytes(model: PackedModel) -> float:
    """Of its parameters, and of quantised weights with as many outputs and inputs as there are:
    the kernels' layout has a few more."""
    modules = list(model.model.modules())
    shared: list[QuantisedWeight] = [
        one.shared for one in modules if isinstance(one, QuantisedLinear | QuantisedEmbedding)
    ]
    for each in modules:
        shared += [*each.up, *each.down] if isinstance(each, QuantisedExperts) else []
    taken = float(sum(parameter.nbytes for parameter in model.model.parameters()))
    return taken + sum(_held(one) for one in {id(one): one for one in shared}.values())


def _held(weight: QuantisedWeight) -> float:
    if not isinstance(weight, PanelWeight):
        return weight.out_features * (weight.in_features + 4)
    taken = 0.0
    for one in (weight, *weight.others):
        form = one.described
        of_group = 8 * (form.parts * bool(form.scales) + bool(form.centres))
        of_block = 16 * (bool(form.steps) + bool(form.bases))
        of_numbers = 4 + bool(form.fifths) + bool(form.sixths) if form.nibbles else 8
        bits = of_numbers + of_group / 32 + of_block / 32 / form.block
        taken += form.outputs * (bits / 8 * one.in_features + 4)
    return taken


def scheme(
    weights: dict[str, Any] | None = None, activations: dict[str, Any] | None = None, **others: Any
) -> dict[str, Any]:
    """A `quantization_config`: W8A8 with dynamic activations, but for what is given."""
    group = {
        "targets": ["Linear"],
        "weights": WEIGHTS | (weights or {}),
        "input_activations": ACTIVATIONS | (activations or {}),
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [IGNORED],
        "kv_cache_scheme": None,
        **others,
    }


def declare(directory: Path, quantization: dict[str, Any]) -> Path:
    """Writes it into the checkpoint's configuration."""
    return edit_config(directory, quantization_config=quantization)


def compress(directory: Path) -> dict[str, torch.Tensor]:
    """Quantises the layers' linear weights of a checkpoint, with levels that do not reach 127.

    Returns the tensors that it has from then on.
    """
    file = directory / "model.safetensors"
    written: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(file).items():
        if tensor.ndim != 2 or ".layers." not in name:
            written[name] = tensor
            continue
        scale = tensor.float().abs().amax(dim=1, keepdim=True) / 120
        written[name] = (tensor.float() / scale).round().to(torch.int8)
        written[name.removesuffix("weight") + "weight_scale"] = scale.to(tensor.dtype)
    save_file(written, file)
    declare(directory, scheme())
    return written
