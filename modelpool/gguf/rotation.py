"""Rotation of queries and keys in a GGUF file's model, as `rope_parameters` of `transformers`.

Contract: a fact or a tensor that would give the model another rotation is refused by name.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelpool.gguf.facts import Facts

FREQUENCIES = "rope_freqs.weight"
LONG_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
_LOCAL_THETA = 10_000.0  # for layers with a window, and for others if the file does not say
_PLAIN = {
    "freq_base_swa": _LOCAL_THETA, "scaling.attn_factor": 1.0, "scaling.yarn_ext_factor": 1.0,
    "scaling.yarn_attn_factor": 1.0, "scaling.yarn_beta_fast": 32.0, "scaling.yarn_beta_slow": 1.0,
    "scaling.yarn_log_multiplier": 0.0,
}  # fmt: skip
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_POSITIONS = 8192
_NOT_ROTATED = 1e29  # from here on a frequency's divisor leaves a pair unchanged
_DIGITS = 6  # digits of a scale, which the file has in float32


def rotation(facts: Facts, size: int, theta: float = _LOCAL_THETA, *read: str) -> dict[str, Any]:
    """Return a rotation: plain, scaled, or that of Llama 3.

    Args:
        facts: facts of the model.
        size: number of rotated elements of a head.
        theta: default if the file does not say.
        read: facts that the caller reads itself.
    """
    base: dict[str, Any] = {"rope_type": "default"}
    base["rope_theta"] = facts.number("rope.freq_base", theta)
    old = facts.number("rope.scale_linear", 0.0)  # the name in version 2
    factor = facts.number("rope.scaling.factor", old)
    is_scaled = factor not in (0.0, 1.0)
    kind = facts.text("rope.scaling.type", "linear" if is_scaled else "none")
    for name, plain in _PLAIN.items():
        found = facts.number(f"rope.{name}", plain)
        if found != plain and name not in read:
            raise facts.error(f"rope.{name}", f"is {found}, and is read as {plain} alone")
    if kind not in ("none", "linear", "yarn"):
        raise facts.error("rope.scaling.type", f"is {kind!r}, not none, linear or yarn")
    is_plain = kind == "none" or (kind == "linear" and not is_scaled)
    if FREQUENCIES in facts.header.tensors:
        if not is_plain:
            raise facts.error("rope.scaling.type", f"is {kind!r}, beside a tensor {FREQUENCIES!r}")
        return base | _llama3(facts, base["rope_theta"], size)
    if is_plain:
        return base
    base |= {"rope_type": kind, "factor": facts.number("rope.scaling.factor", old or None)}
    if kind == "yarn":
        original = facts.size("rope.scaling.original_context_length")
        base["original_max_position_embeddings"] = original
    return base


def partial_rotation(facts: Facts, head: int) -> dict[str, Any]:
    """Return a rotation of the first part of each head, or of all of it."""
    size = facts.size("rope.dimension_count", head)
    return rotation(facts, size) | {"partial_rotary_factor": size / head}


def mixed_rotation(facts: Facts, head: int) -> dict[str, Any]:
    """Return the rotation of Qwen 3.5, by three positions, which are equal in a text."""
    name = "rope.dimension_sections"
    sections = [size for size in facts.of_layers(name, 4) if size]
    return partial_rotation(facts, head) | {"mrope_section": sections, "mrope_interleaved": True}


def untruncated_rotation(facts: Facts, head: int) -> dict[str, Any]:
    """Return the rotation of gpt-oss, where the bounds of YaRN are no whole numbers."""
    found = rotation(facts, head)
    return found | ({"truncate": False} if found["rope_type"] == "yarn" else {})


def full_rotation(facts: Facts, head: int) -> dict[str, Any]:
    """Return the rotation of OLMo 3's layers without a window; `_olmo2` sets that of the others."""
    return rotation(facts, head, _LOCAL_THETA, "freq_base_swa")


def local_rotation(facts: Facts, head: int) -> dict[str, Any]:
    """Return the rotations of Gemma 3, where layers with a window have another one."""
    local = {"rope_type": "default", "rope_theta": _local_theta(facts)}
    found = rotation(facts, head, 1e6, "freq_base_swa")
    return {"full_attention": found, "sliding_attention": local}


def proportional_rotation(facts: Facts, head: int) -> dict[str, Any]:
    """Return the rotations of Gemma 4.

    In layers without a window some pairs are not rotated: their frequencies have very large
    divisors.
    """
    stored, turned = _vector(facts, FREQUENCIES, head // 2), head // 2
    if stored is not None:
        turned = int((stored == 1.0).sum())
        if not (stored[:turned] == 1.0).all() or not (stored[turned:] > _NOT_ROTATED).all():
            raise facts.header.error(f"tensor {FREQUENCIES!r} has not the factors of Gemma 4")
    theta = facts.number("rope.freq_base", 1e6)
    full = {"rope_type": "proportional", "rope_theta": theta}
    full["partial_rotary_factor"] = 2 * turned / head
    local = {"rope_type": "default", "rope_theta": _local_theta(facts)}
    return {"full_attention": full, "sliding_attention": local}


def long_rotation(facts: Facts, head: int) -> dict[str, Any]:
    """Return the rotation of Phi 3, with other frequencies beyond the original training length."""
    size = facts.size("rope.dimension_count", head)
    length = facts.size("context_length")
    original = facts.size("rope.scaling.original_context_length", length)
    long, short = (_vector(facts, name, size // 2) for name in LONG_FACTORS)
    if long is None or short is None:
        return partial_rotation(facts, head)
    found: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": facts.number("rope.freq_base", _LOCAL_THETA),
        "partial_rotary_factor": size / head,
        "long_factor": long.tolist(),
        "short_factor": short.tolist(),
        "original_max_position_embeddings": original,
    }
    longer = max(math.log(length / original), 0.0)
    usual = math.sqrt(1 + longer / math.log(original))
    said = facts.number("rope.scaling.attn_factor", 1.0)
    if not math.isclose(said, usual, rel_tol=1e-5):
        found["attention_factor"] = said
    return found


def scaled_rotation(facts: Facts, size: int) -> dict[str, Any]:
    """Return the rotation of Ministral 3 and DeepSeek.

    A factor gives the scale that YaRN applies to scores; DeepSeek's files have a tenth of it.
    """
    name = "scaling.yarn_log_multiplier"
    found = rotation(facts, size, _LOCAL_THETA, name)
    is_tenth = facts.architecture == "deepseek2"
    scale = round(facts.number(f"rope.{name}", 0.0) * (10 if is_tenth else 1), _DIGITS)
    if found["rope_type"] == "yarn" and scale:
        found |= {"mscale": scale if is_tenth else 1.0, "mscale_all_dim": scale}
    return found


def _local_theta(facts: Facts) -> float:
    return facts.number("rope.freq_base_swa", _LOCAL_THETA)


def _vector(facts: Facts, name: str, size: int) -> Any:
    """Return a tensor as [size] float32, or None if there is none."""
    tensor = facts.header.tensors.get(name)
    if tensor is None:
        return None
    if (tensor.type, tensor.shape) != ("F32", (size,)):
        found = f"{tensor.type} {list(tensor.shape)}"
        raise facts.header.error(f"tensor {name!r} is {found}, and not F32 [{size}]")
    return np.fromfile(tensor.file, "<f4", size, offset=tensor.start)


def _llama3(facts: Facts, theta: float, size: int) -> dict[str, Any]:
    """Return the rotation of Llama 3, after a check that the factors of frequencies are its own."""
    stored = _vector(facts, FREQUENCIES, size // 2)
    factor = float(stored.max(initial=0.0))
    found = {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    found["original_max_position_embeddings"] = _LLAMA3_POSITIONS
    wanted = frequency_factors(found | {"rope_theta": theta}, size) if 1 <= factor < 1e6 else None
    if wanted is None or not torch.allclose(torch.from_numpy(stored), wanted, rtol=1e-4):
        reason = "has not the factors of Llama 3's rotation"
        raise facts.header.error(f"tensor {FREQUENCIES!r} {reason}")
    return found


def frequency_factors(parameters: Mapping[str, Any], head_dim: int) -> Tensor | None:
    """Return llama.cpp's divisors of the frequencies, [d / 2], for Llama 3's rotation, else None.

    Source: "The Llama 3 Herd of Models" (2407.21783), as `transformers` computes it.
    """
    if parameters.get("rope_type") != "llama3":
        return None
    steps = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    wavelengths = 2 * math.pi * float(parameters["rope_theta"]) ** steps
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    original, factor = parameters["original_max_position_embeddings"], float(parameters["factor"])
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    factors: Tensor = 1.0 / ((1.0 - smooth) / factor + smooth)
    return factors.float()
