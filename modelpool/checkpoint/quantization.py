"""Quantisation that a checkpoint's configuration declares.

Contract: pure functions of a configuration. `stored_as` refuses, by its name, every quantisation
that neither this project nor `transformers` can read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from transformers.utils.import_utils import is_compressed_tensors_available
from transformers.utils.quantization_config import QuantizationMethod

from modelpool.errors import ConfigError

# "int8": compressed-tensors with int8 weights, one scale for each output channel, for activations
# that are quantised row by row; "other": left to `transformers`. Weights that the rest have packed
# become plain ones of the model's dtype when loaded: "mxfp4" is experts in 4 bits (gpt-oss); for
# the others see `Packing`.
Stored = Literal["plain", "int8", "mxfp4", "awq", "gptq", "packed", "fp8", "other"]
UNPACKED: Mapping[Stored, str] = {
    "mxfp4": "MXFP4", "awq": "AWQ", "gptq": "GPTQ", "packed": "compressed-tensors", "fp8": "FP8",
}  # fmt: skip
KEPT_PLAIN: tuple[Stored, ...] = ("plain", *UNPACKED)


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Format in which the weights of linear layers are packed.

    Attributes:
        stored: "awq", "gptq" and "packed" (compressed-tensors): integers in words of 32 bits, with
            a scale, and mostly a zero, for each output and group of inputs; "fp8": with a scale for
            each block.
        parts: ends of the names of a layer's tensors; the first is the weight.
        bits: width of a number.
        group: inputs that share a scale; None for all.
        added: number to add to zeros as they are stored.
        block: outputs and inputs that share a scale.
    """

    stored: Stored
    parts: tuple[str, ...]
    bits: int = 8
    group: int | None = None
    added: int = 0
    block: tuple[int, int] = (1, 1)


_COMPRESSED = "compressed-tensors"
_WORDS = ("qweight", "qzeros", "scales")
_FORMATS = (None, "int-quantized", "naive-quantized", "dense")
_READ = "only int8 weights per channel with dynamic int8 activations per token (W8A8) are read"


def stored_as(config: Any) -> Stored:
    """Return how a checkpoint with this `transformers` configuration stores its weights.

    Raises `ConfigError` without a field.
    """
    settings = _settings(config)
    if settings is None:
        return "plain"
    packing = packing_of(config)
    if packing is not None:
        return packing.stored
    method = settings.get("quant_method")
    if method == _COMPRESSED:
        return _compressed(settings)
    if method == "mxfp4":
        kind = getattr(config, "model_type", "")
        if kind != "gpt_oss":
            raise ConfigError("", f"its weights are MXFP4, which is read of gpt-oss, not of {kind}")
        return "mxfp4"
    if method not in {known.value for known in QuantizationMethod}:
        raise ConfigError("", f"its weights are quantised by {method!r}, which is not known here")
    return "other"


def packing_of(config: Any) -> Packing | None:
    """Return the packing of weights that are unpacked here, or None for others.

    Raises `ConfigError` for a variant that is not supported.
    """
    settings = _settings(config) or {}
    method = settings.get("quant_method")
    if method == "awq":
        return _awq(settings)
    if method == "gptq":
        return _gptq(settings)
    if method == "fp8" and settings.get("weight_block_size"):
        parts = ("weight", "weight_scale_inv")
        return Packing(stored="fp8", parts=parts, block=_block(settings["weight_block_size"]))
    if method == _COMPRESSED and settings.get("format") == "pack-quantized":
        return _packed(settings)
    return None


def unpacked_dtype(declared: Any) -> str:
    """Return the dtype that `auto` means for a model whose weights are unpacked.

    Half precision becomes bfloat16, which has the range of float32.
    """
    name = str(declared).removeprefix("torch.")
    return name if name in ("float32", "float64") else "bfloat16"


def _settings(config: Any) -> Mapping[str, Any] | None:
    declared = getattr(config, "quantization_config", None)
    if declared is None:
        declared = getattr(config, "compression_config", None)
    found: Any = declared if declared is None or isinstance(declared, dict) else declared.to_dict()
    return found  # type: ignore[no-any-return]


def _awq(settings: Mapping[str, Any]) -> Packing:
    version = str(settings.get("version", "gemm")).lower()
    bits = settings.get("bits", settings.get("w_bit", 4))
    if version != "gemm" or bits != 4 or not settings.get("zero_point", True):
        zeros = "" if settings.get("zero_point", True) else ", without zeros"
        reason = f"version {version}, {bits} bits{zeros}; read are 4 bits of version gemm"
        raise ConfigError("", f"its AWQ weights are of {reason}, with zeros")
    group = settings.get("group_size", settings.get("q_group_size", 128))
    return Packing(stored="awq", parts=_WORDS, bits=4, group=_group(group))


def _gptq(settings: Mapping[str, Any]) -> Packing:
    layout, bits = settings.get("checkpoint_format") or "gptq", settings.get("bits", 0)
    if settings.get("is_marlin_format"):
        layout = "marlin"
    if layout not in ("gptq", "gptq_v2") or bits not in (2, 4, 8):
        reason = f"format {layout!r}, {bits} bits; read are 2, 4 and 8 bits of gptq and gptq_v2"
        raise ConfigError("", f"its GPTQ weights are of {reason}")
    own = [name for name in settings.get("dynamic") or {} if not name.startswith("-")]
    if own:
        reason = f"own settings for layers ({own[0]!r}), which are not read"
        raise ConfigError("", f"its GPTQ weights have {reason}")
    group, added = _group(settings.get("group_size", 128)), int(layout == "gptq")
    parts = (*_WORDS, *["g_idx"] * bool(settings.get("desc_act")))
    return Packing(stored="gptq", parts=parts, bits=bits, group=group, added=added)


def _block(size: Any) -> tuple[int, int]:
    match size:
        case [int(outputs), int(inputs)] if min(outputs, inputs) > 0:
            return outputs, inputs
    reason = f"{size!r}, and not two whole numbers above 0"
    raise ConfigError("", f"quantization_config.weight_block_size is {reason}")


def _packed(settings: Mapping[str, Any]) -> Packing:
    found = set[Packing]()
    for group in (settings.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        kind, bits = weights.get("type", "int"), weights.get("num_bits", 0)
        is_known = kind == "int" and bits in (4, 8)
        if not is_known or weights.get("strategy") not in ("group", "channel"):
            raise _not_packed(f"weights of {_described(weights)}")
        if group.get("input_activations") or group.get("output_activations"):
            raise _not_packed("quantised activations")
        parts = ["weight_packed", "weight_scale"]
        parts += ["weight_zero_point"] * (not weights.get("symmetric", True))
        parts += ["weight_g_idx"] * (weights.get("actorder") in ("group", "dynamic", True))
        size = _group(weights.get("group_size"))
        found.add(Packing(stored="packed", parts=tuple(parts), bits=bits, group=size))
    if settings.get("kv_cache_scheme"):
        raise _not_packed("a quantised KV cache")
    if len(found) != 1:
        raise _not_packed(f"{len(found)} kinds of weights")
    return found.pop()


def _not_packed(reason: str) -> ConfigError:
    read = "only 4 and 8 bits, all weights alike, by channel or group, with plain activations"
    return ConfigError("", f"its weights are pack-quantized with {reason}; {read} are read")


def _group(size: Any) -> int | None:
    return int(size) if size is not None and int(size) > 0 else None


def _compressed(settings: Mapping[str, Any]) -> Stored:
    reason = _difference(settings)
    if reason is None:
        return "int8"
    if is_compressed_tensors_available():
        return "other"
    raise ConfigError("", f"its weights are quantised by {_COMPRESSED} with {reason}; {_READ}")


def _difference(settings: Mapping[str, Any]) -> str | None:
    """Return the difference of `settings` from W8A8 with dynamic activations, or None."""
    if settings.get("format") not in _FORMATS:
        return f"format {settings['format']!r}"
    groups = settings.get("config_groups") or {}
    if not groups:
        return "no config_groups"
    for group in groups.values():
        weights, activations = group.get("weights") or {}, group.get("input_activations") or {}
        if not _is_int8(weights, "channel") or weights.get("dynamic"):
            return f"weights of {_described(weights)}"
        if not _is_int8(activations, "token") or activations.get("dynamic") is not True:
            return f"activations of {_described(activations)}"
        if group.get("output_activations"):
            return f"output activations of {_described(group['output_activations'])}"
    return "a quantised KV cache" if settings.get("kv_cache_scheme") else None


def _is_int8(numbers: Mapping[str, Any], strategy: str) -> bool:
    wanted = {"num_bits": 8, "type": "int", "strategy": strategy, "symmetric": True}
    defaults = {"type": "int", "symmetric": True}
    return all(numbers.get(key, defaults.get(key)) == value for key, value in wanted.items())


def _described(numbers: Mapping[str, Any]) -> str:
    if not numbers:
        return "full precision"
    kind = "symmetric" if numbers.get("symmetric", True) else "asymmetric"
    when = "dynamic" if numbers.get("dynamic") else "static"
    bits, number = numbers.get("num_bits"), numbers.get("type", "int")
    return f"{bits} bits ({number}, {kind}, {when}, per {numbers.get('strategy')})"
