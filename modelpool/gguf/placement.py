"""Mapping from the tensors of a GGUF file to the parameters of its model.

Contract: each parameter has tensors of its shape, and no tensor is left over except those of layers
that are not read. A difference is refused with a `ConfigError` that names the tensor.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from modelpool.gguf.architectures import Architecture, architecture_of
from modelpool.gguf.header import GgufHeader, GgufTensor

Shape = tuple[int, ...]
Tensors = Mapping[str, GgufTensor]  # those of a file, by their names in it
# How a part of a parameter is made of the tensors' parts: their rows one after the other, each
# value less one, the logarithm of its negative; or, with inputs before outputs, the outputs of two
# tensors alternating, both, or the first tensor's rows as columns.
Form = Literal["", "less one", "log", "turned", "in turn", "in turn, turned", "first turned"]


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A parameter as a file has it.

    Attributes:
        names: tensors, each of which has a part of each of the `parts` (experts, heads).
        rows: the last rows are [groups, n, m, size] in the file, and [groups, m, n, size] in the
            model: these four numbers, or none if the order is the same. `columns`: the same.
    """

    names: tuple[str, ...]
    shape: Shape
    parts: int = 1
    form: Form = ""
    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> "Placed":
        """Return a parameter from its fields in JSON."""
        fields: dict[str, Any] = {
            name: tuple(one) if isinstance(one, list) else one for name, one in stored.items()
        }
        return cls(**fields)

    def tensors(self, stored: Tensors) -> tuple[GgufTensor, ...]:
        return tuple(stored[name] for name in self.names)

    def keeps_rows(self, stored: Tensors) -> bool:
        """Return whether its outputs are rows of the file."""
        is_one = len({one.type for one in self.tensors(stored)}) == 1
        keeps = is_one if self.form == "in turn, turned" else self.form in ("", "turned")
        return keeps and not self.columns and (is_one or self.parts > 1)


# Names that `gguf` does not have, by the ends of parameters' names; the first existing choice
# counts.
_PLACES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "experts.gate_up_proj": (
        ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
        ("ffn_gate_up_exps.weight",),
    ),
    "experts.gate_up_proj_bias": (("ffn_gate_exps.bias", "ffn_up_exps.bias"),),
    "experts.down_proj": (("ffn_down_exps.weight",),),
    "experts.down_proj_bias": (("ffn_down_exps.bias",),),
    "block_sparse_moe.router.weight": (("ffn_gate_inp.weight",),),
    "router.scale": (("ffn_gate_inp.scale",),),
    "router.per_expert_scale": (("ffn_down_exps.scale",),),
    "e_score_correction_bias": (("exp_probs_b.bias",),),
    "expert_bias": (("exp_probs_b.bias",),),
    "shared_mlp.input_linear.weight": (
        ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
        ("ffn_gate.weight", "ffn_up.weight"),
    ),
    "shared_mlp.output_linear.weight": (("ffn_down_shexp.weight",), ("ffn_down.weight",)),
    "kv_b_proj.weight": (("attn_k_b.weight", "attn_v_b.weight"), ("attn_kv_b.weight",)),
    "layer_scalar": (("layer_output_scale.weight",),),
    "sinks": (("attn_sinks.weight",),),
    "dt_bias": (("ssm_dt.bias",),),
}
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_SHARED = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
# Parameters of Gated DeltaNet with a row for each value, and for each head of values.
_VALUES = ("in_proj_qkv.weight", "in_proj_z.weight", "conv1d.weight")
_VALUE_HEADS = ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")


def placed_of(header: GgufHeader, config: Mapping[str, Any]) -> dict[str, Placed]:
    """Return where the parameters of a model of `config` are; may raise `ConfigError`."""
    import gguf  # optional, and slow to import

    name, architecture = architecture_of(header)
    kind = next(one for one, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    table = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    placed = dict[str, Placed]()
    left = set(header.tensors) - set(architecture.rotating) - _unread(header, name, config)
    for parameter, shape in _shapes(config).items():
        if parameter == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        choices = _choices(parameter) or (
            (table.get_name(parameter, try_suffixes=(".weight", ".bias")),),
        )
        known = (names for names in choices if left.issuperset(names))
        names = next(known, choices[0])
        for each in names:
            if each not in header.tensors:
                raise header.error(f"has no tensor {each or f'for {parameter}'!r}")
        one = _placed(parameter, shape, names, architecture, config)
        for tensor, wanted in zip(one.tensors(header.tensors), _wanted(one, config), strict=True):
            if not _are_alike(tensor.shape, wanted):
                found = f"{list(tensor.shape)}, and not {list(wanted)}"
                raise header.error(f"tensor {tensor.name!r} is {found}")
        left -= set(names)
        placed[parameter] = one
    if left:
        raise header.error(f"tensor {min(left)!r} has no place in a model of {name!r}")
    return placed


def _choices(parameter: str) -> tuple[tuple[str, ...], ...]:
    layer = _LAYER.search(parameter)
    found = (each for end, each in _PLACES.items() if parameter.endswith(f".{end}"))
    choices = next(found, ()) if layer is not None else ()
    return tuple(tuple(f"blk.{layer[1]}.{end}" for end in ends) for ends in choices)  # type: ignore[index]


def _unread(header: GgufHeader, name: str, config: Mapping[str, Any]) -> set[str]:
    """Return tensors of layers that predict further tokens, and of keys that layers share."""
    layers, shared = config["num_hidden_layers"], config.get("num_kv_shared_layers", 0)
    blocks = header.fact(f"{name}.block_count", int)
    guessing = tuple(f"blk.{layer}." for layer in range(layers, blocks))
    keys = {f"blk.{layer}.{end}" for layer in range(layers - shared, layers) for end in _SHARED}
    return {one for one in header.tensors if one.startswith(guessing) or one in keys}


def _placed(
    parameter: str,
    shape: Shape,
    names: tuple[str, ...],
    architecture: Architecture,
    config: Mapping[str, Any],
) -> Placed:
    form: Form = ""
    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    parts = shape[0] if ".experts." in parameter else 1
    if parts > 1 and architecture.has_experts_in_turn:
        of_matrix: tuple[Form, ...] = ("turned", "in turn, turned")
        of_bias: tuple[Form, ...] = ("", "in turn")
        form = (of_matrix if len(shape) == 3 else of_bias)[len(names) - 1]
    elif parameter.endswith("kv_b_proj.weight") and len(names) == 2:
        form, parts = "first turned", config["num_attention_heads"]
    elif parameter.endswith("A_log"):
        form = "log"
    elif architecture.raised and re.search(architecture.raised, parameter):
        form = "less one"
    rotated = re.search(r"\.([qk])_proj\.", parameter)
    if rotated is not None and architecture.has_pairs:
        heads = config["num_attention_heads" if rotated[1] == "q" else "num_key_value_heads"]
        rows = (heads, shape[0] // heads // 2, 2, 1)
    if ".linear_attn." in parameter and "linear_num_value_heads" in config:
        keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        size = 1 if parameter.endswith(_VALUE_HEADS) else config["linear_value_head_dim"]
        order = (1, heads // keys, keys, size) if heads != keys else ()
        rows = order if parameter.endswith((*_VALUES, *_VALUE_HEADS)) else ()
        columns = order if parameter.endswith("out_proj.weight") else ()
    return Placed(names=names, shape=shape, parts=parts, form=form, rows=rows, columns=columns)


def _wanted(one: Placed, config: Mapping[str, Any]) -> Sequence[Shape]:
    """Return the shapes that the tensors must have."""
    *first, rows, width = (1, *one.shape)
    count = len(one.names)
    if one.form == "first turned":
        heads, keys = one.parts, config["qk_nope_head_dim"]
        return [(heads, width, keys), (heads, rows // heads - keys, width)]
    if one.form in ("turned", "in turn, turned"):
        return [(*first, width // count, rows)] * count
    if one.form == "in turn":
        return [(*first, rows, width // count)] * count
    return [(*first, rows // count, width)] * count


def _are_alike(found: Shape, wanted: Shape) -> bool:
    """Return whether shapes are equal but for dimensions of one and a vector that is in rows."""
    plain, asked = ([size for size in shape if size > 1] for shape in (found, wanted))
    return plain == asked or (len(asked) <= 1 and math.prod(found) == math.prod(wanted))


def _shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    settings = AutoConfig.for_model(**config)
    loader: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = loader.from_config(settings)
    return {name: tuple(one.shape) for name, one in model.state_dict().items()}
