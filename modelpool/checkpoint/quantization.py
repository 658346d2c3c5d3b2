"""Which quantisation a checkpoint's configuration declares.

Contract: pure functions of a configuration. `stored_as` refuses, naming it, every quantisation that
neither this project nor `transformers` can read.
"""

from collections.abc import Mapping
from typing import Any, Literal

from transformers.utils.import_utils import is_compressed_tensors_available
from transformers.utils.quantization_config import QuantizationMethod

from modelpool.errors import ConfigError

# "int8": compressed-tensors with int8 weights, one scale for each output channel, for activations
# that are quantised row by row; "mxfp4": experts in 4 bits (gpt-oss), which are kept in the model's
# dtype; "other": one that is left to `transformers`.
Stored = Literal["plain", "int8", "mxfp4", "other"]
KEPT_PLAIN: tuple[Stored, ...] = ("plain", "mxfp4")

_COMPRESSED = "compressed-tensors"
_FORMATS = (None, "int-quantized", "naive-quantized", "dense")
_READ = "only int8 weights per channel with dynamic int8 activations per token (W8A8) are read"


def stored_as(config: Any) -> Stored:
    """`config` is a `transformers` configuration. Raises `ConfigError` without a field."""
    declared = getattr(config, "quantization_config", None)
    if declared is None:
        declared = getattr(config, "compression_config", None)
    if declared is None:
        return "plain"
    settings: Mapping[str, Any] = declared if isinstance(declared, dict) else declared.to_dict()
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


def _compressed(settings: Mapping[str, Any]) -> Stored:
    reason = _difference(settings)
    if reason is None:
        return "int8"
    if is_compressed_tensors_available():
        return "other"
    raise ConfigError("", f"its weights are quantised by {_COMPRESSED} with {reason}; {_READ}")


def _difference(settings: Mapping[str, Any]) -> str | None:
    """What of `settings` is not W8A8 with dynamic activations, or None."""
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
