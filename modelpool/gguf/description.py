"""A GGUF file's configuration and tokenizer as `transformers` has them, in a folder of the cache.

Contract: what reads a checkpoint's folder reads this one; its weights stay in the file until they
are loaded (`modelpool.gguf.weights`). A fact or a tensor that the model would compute otherwise
with is refused with `ConfigError`, which names it.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from modelpool.checkpoint.block_values import BLOCK_BYTES
from modelpool.checkpoint.cache_dir import cache_dir
from modelpool.checkpoint.cached_folder import cached_folder
from modelpool.checkpoint.footprint import check_served
from modelpool.checkpoint.headers import ROUNDED, Header, StoredParameter
from modelpool.config import Weights
from modelpool.errors import ConfigError
from modelpool.gguf.header import GgufHeader, GgufTensor, open_header, read_header

NAME = "gguf.json"  # beside the configuration: the file, and by the model's names its tensors
_FORMAT = "4"  # changes when a file would be described otherwise
_GEMMAS = ("gemma", "gemma2", "gemma3")
_FAMILIES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma": "gemma", "gemma2": "gemma2",
    "gemma3": "gemma3_text", "qwen3moe": "qwen3_moe",
}  # fmt: skip
_LARGEST_GEMMAS = {"gemma2": 46, "gemma3": 62}  # layers of those that scale scores otherwise
_SOFTMAX = 1  # how experts are chosen
_LOCAL_THETA = 10_000.0  # of Gemma 3's layers with a window
_FREQUENCIES = "rope_freqs.weight"
_PLAIN_ROTATION = {
    "freq_base_swa": _LOCAL_THETA, "scaling.attn_factor": 1.0, "scaling.yarn_ext_factor": 1.0,
    "scaling.yarn_attn_factor": 1.0, "scaling.yarn_beta_fast": 32.0, "scaling.yarn_beta_slow": 1.0,
}  # fmt: skip
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_POSITIONS = 8192
# Tokens that end a text in llama.cpp by their spelling, whatever else the file names.
_TEXT_ENDS = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~[",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
))  # fmt: skip
_DTYPES = {"F32": "float32", "F16": "float16"}  # of the rest: bfloat16
PLAIN = ("F32", "F16", "BF16")
_INT4_TYPES = ("Q4_0", "Q4_1", "Q4_K", "IQ4_NL", "IQ4_XS", "MXFP4", "Q3_K", "Q2_K")


@dataclass(frozen=True)
class Described:
    """`weights`: as the file's types have them."""

    folder: Path
    header: GgufHeader
    placed: "Mapping[str, Placed]"

    @property
    def weights(self) -> Weights:
        kinds = _matrix_types(self.header)
        if kinds & set(BLOCK_BYTES):
            return "exact"
        return "int4" if kinds & set(_INT4_TYPES) else "auto" if kinds <= set(PLAIN) else "int8"

    @property
    def headers(self) -> tuple[Header, ...]:
        return (_header(self.header, self.placed),)


@dataclass(frozen=True)
class Placed:
    """A tensor of the file that is a parameter of the model.

    Attributes:
        heads: its rows are those of so many heads, whose rotated pairs stand side by side.
        added: what the file has added to each value.
        second: tensor whose rows follow those of the first, for each expert.
    """

    name: str
    heads: int = 0
    added: float = 0.0
    second: str = ""

    def tensors(self, header: GgufHeader) -> tuple[GgufTensor, ...]:
        return tuple(header.tensors[name] for name in (self.name, self.second) if name)

    def shape(self, header: GgufHeader) -> tuple[int, ...]:
        first, *others = self.tensors(header)
        rows = sum(one.shape[-2] for one in (first, *others)) if others else None
        return first.shape if rows is None else (*first.shape[:-2], rows, first.shape[-1])


def describe(source: str, field: str) -> Described:
    """Of `gguf:PATH`, or a path. Raises `ConfigError` for `{field}.source`."""
    try:
        header = open_header(source)
        folder = cached_folder(_folder(header), partial(_write, header, field))
        return Described(folder, header, placed_in(folder))
    except ConfigError as error:
        kind = type(error)
        raise kind(f"{field}.source", error.reason) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        reason = f"cannot read {source!r}: {type(error).__name__}: {error}"
        raise ConfigError(f"{field}.source", reason) from error


def placed_in(folder: Path) -> dict[str, Placed]:
    """By the model's names. Raises `OSError`, `ValueError`."""
    stored = json.loads((folder / NAME).read_text(encoding="utf-8"))
    return {name: Placed(**one) for name, one in stored["tensors"].items()}


def header_in(folder: Path) -> GgufHeader:
    """Of the file that a folder describes. Raises `ValueError` where that has changed since."""
    stored = json.loads((folder / NAME).read_text(encoding="utf-8"))
    header = read_header(Path(stored["file"]))
    if _folder(header).name != folder.name:
        raise ValueError("the file has changed since the pool was made")
    return header


def _matrix_types(header: GgufHeader) -> set[str]:
    return {one.type for one in header.tensors.values() if len(one.shape) > 1}


def int8_weights(header: GgufHeader, placed: Mapping[str, Placed]) -> frozenset[str]:
    """Names of the weights that are in int8 where other ones are in int4: of linear layers that
    the file has in more bits. None where it has none in 4 bits."""
    if not _matrix_types(header) & set(_INT4_TYPES):
        return frozenset()
    return frozenset(
        name
        for name, one in placed.items()
        if _is_linear(name, one, header)
        and any(each.type not in _INT4_TYPES for each in one.tensors(header))
    )


def weights_in_blocks(header: GgufHeader, placed: Mapping[str, Placed]) -> frozenset[str]:
    """Names of the weights of linear layers and embeddings of which the file has some in blocks
    that are kept."""

    def is_kept(name: str, one: Placed) -> bool:
        told = StoredParameter(name, "", one.shape(header))
        return told.is_linear or told.is_table

    return frozenset(
        name
        for name, one in placed.items()
        if is_kept(name, one) and any(each.type in BLOCK_BYTES for each in one.tensors(header))
    )


def _is_linear(name: str, placed: Placed, header: GgufHeader) -> bool:
    return StoredParameter(name, "", placed.shape(header)).is_linear


def _folder(header: GgufHeader) -> Path:
    digest = hashlib.sha256(f"{_FORMAT} {transformers.__version__} ".encode())
    for file in sorted({header.file, *(one.file for one in header.tensors.values())}):
        facts = file.stat()
        digest.update(f"{file} {facts.st_size} {facts.st_mtime_ns} ".encode())
    return cache_dir() / "gguf" / f"{header.file.stem}-{digest.hexdigest()[:16]}"


def _header(header: GgufHeader, placed: Mapping[str, Placed]) -> Header:
    """As safetensors has it, of what may be kept of each tensor."""
    in_int8, in_blocks = int8_weights(header, placed), weights_in_blocks(header, placed)

    def dtype(name: str, one: Placed) -> str:
        types = {each.type for each in one.tensors(header)}
        if name in in_blocks:
            return max(types & BLOCK_BYTES.keys())  # the one of more bits, as they are named
        if name in in_int8:
            return ROUNDED
        if _is_linear(name, one, header) and types <= set(_INT4_TYPES):
            return max(types)
        kept = {each if each in PLAIN else "BF16" for each in types}
        return kept.pop() if len(kept) == 1 else "F32"  # has the values of any two

    return {
        name: {"dtype": dtype(name, one), "shape": one.shape(header)}
        for name, one in placed.items()
    }


def _write(header: GgufHeader, field: str, folder: Path) -> None:
    from modelpool.gguf.tokenizer import tokenizer_of

    config = _config(header)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    ends = {"eos_token_id": _ends(header)}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    check_served(folder, field)
    placed = {name: asdict(one) for name, one in _placed(header, config).items()}
    tokenizer_of(header, _ends(header)).save_pretrained(folder)
    described = {"file": str(header.file), "tensors": placed}
    (folder / NAME).write_text(json.dumps(described, indent=1), encoding="utf-8")


def _config(header: GgufHeader) -> dict[str, Any]:
    """The configuration, checked against the tensors' shapes."""
    family = header.fact("general.architecture", str)
    if family not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise header.error(f"general.architecture is {family!r}, which is not read; read: {known}")

    def size(name: str, default: int | None = None) -> int:
        found = header.fact(f"{family}.{name}", int, default)
        if not 0 < found < 2**31:
            raise header.error(f"{family}.{name} is {found}")
        return found

    if "token_embd.weight" not in header.tensors:
        raise header.error("has no tensor 'token_embd.weight'")
    rows, width = header.tensors["token_embd.weight"].shape
    layers, hidden, heads = size("block_count"), size("embedding_length"), size(_HEADS)
    tokens = len(header.fact("tokenizer.ggml.tokens", list))
    for name, said, found in (
        (f"{family}.embedding_length", hidden, width),
        (f"{family}.vocab_size", size("vocab_size", rows), rows),
        ("the length of tokenizer.ggml.tokens", tokens, rows),
    ):
        if said != found:
            raise header.error(f"{name} is {said}, and 'token_embd.weight' is [{rows}, {width}]")
    if layers > len(header.tensors):
        raise header.error(f"{family}.block_count is {layers}: more than there are tensors")
    head = size("attention.key_length", max(hidden // heads, 1))
    config: dict[str, Any] = {
        "model_type": _FAMILIES[family],
        "dtype": _dtype(header.tensors.values()),
        "vocab_size": rows,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": size("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": size("attention.head_count_kv", heads),
        "head_dim": head,
        "max_position_embeddings": size("context_length"),
        "rms_norm_eps": header.fact(f"{family}.attention.layer_norm_rms_epsilon", float),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": _rope(header, family, head),
        "eos_token_id": _ends(header),
        "bos_token_id": header.facts.get("tokenizer.ggml.bos_token_id"),
    }
    if size("attention.value_length", head) != head or size(_ROTATED, head) != head:
        raise header.error(f"{_ROTATED} or attention.value_length is not attention.key_length")
    if family in _GEMMAS:
        return config | _of_gemma(header, family, config, size)
    return config | _of_mixture(header, family, size)


# What files have of all experts' weights.
_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_HEADS, _ROTATED = "attention.head_count", "rope.dimension_count"


def _of_mixture(header: GgufHeader, family: str, size: Callable[[str], int]) -> dict[str, Any]:
    """Mixtral's files are of the family `llama`."""
    if family != "qwen3moe" and not header.fact(f"{family}.expert_count", int, 0):
        return {}
    for name, served in (("gating_func", _SOFTMAX), ("shared_count", 0), ("group_count", 0)):
        found = header.fact(f"{family}.expert_{name}", int, served)
        if found not in (served, 0):
            raise header.error(f"{family}.expert_{name} is {found}, which is not read")
    count, used = size("expert_count"), size("expert_used_count")
    if used > count:
        raise header.error(f"{family}.expert_used_count is {used}, of {count} experts")
    if family == "llama":
        kind = {"model_type": "mixtral", "num_local_experts": count}
        return {**kind, "num_experts_per_tok": used}
    return {
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": size("expert_feed_forward_length"),
        "norm_topk_prob": True,  # as llama.cpp computes all of them
    }


def _of_gemma(
    header: GgufHeader, family: str, config: Mapping[str, Any], size: Callable[[str, int], int]
) -> dict[str, Any]:
    head, heads = config["head_dim"], config["num_attention_heads"]
    if config["num_hidden_layers"] == _LARGEST_GEMMAS.get(family):
        head = config["hidden_size"] // heads
    if family == "gemma":
        return {}
    found: dict[str, Any] = {"query_pre_attn_scalar": head}
    if family == "gemma2":
        found["sliding_window"] = size("attention.sliding_window", 4096)
        for name, default in (("attn", 50.0), ("final", 30.0)):
            said = header.fact(f"gemma2.{name}_logit_softcapping", float, default)
            found[f"{name}_logit_softcapping"] = said
        return found
    window = header.fact("gemma3.attention.sliding_window", int, 0)
    period = size("attention.sliding_window_pattern", 6) if window else 1
    kinds = ("full_attention", "sliding_attention")
    found["layer_types"] = [
        kinds[(layer + 1) % period != 0] for layer in range(config["num_hidden_layers"])
    ]
    found |= {"sliding_window": window} if window else {}
    cap = header.fact("gemma3.final_logit_softcapping", float, 0.0)
    found["final_logit_softcapping"] = cap or None
    local = {"rope_type": "default", "rope_theta": _LOCAL_THETA}
    both = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    return found | {"rope_parameters": both}


def _rope(header: GgufHeader, family: str, head_dim: int) -> dict[str, Any]:
    theta = header.fact(
        f"{family}.rope.freq_base", float, 1e6 if family == "gemma3" else _LOCAL_THETA
    )
    base: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    scaling = f"{family}.rope.scaling"
    old = header.fact(f"{family}.rope.scale_linear", float, 0.0)  # the name in version 2
    factor = header.fact(f"{scaling}.factor", float, old)
    is_scaled = factor not in (0.0, 1.0)
    kind = header.fact(f"{scaling}.type", str, "linear" if is_scaled else "none")
    for name, plain in _PLAIN_ROTATION.items():
        if (found := header.fact(f"{family}.rope.{name}", float, plain)) != plain:
            raise header.error(f"{family}.rope.{name} is {found}, and is read as {plain} alone")
    if kind not in ("none", "linear", "yarn"):
        raise header.error(f"{scaling}.type is {kind!r}, not none, linear or yarn")
    is_plain = kind == "none" or (kind == "linear" and not is_scaled)
    if _FREQUENCIES in header.tensors:
        if not is_plain:
            raise header.error(f"{scaling}.type is {kind!r}, beside a tensor {_FREQUENCIES!r}")
        return base | _llama3(header, theta, head_dim)
    if is_plain:
        return base
    base |= {"rope_type": kind, "factor": header.fact(f"{scaling}.factor", float, old or None)}
    if kind == "yarn":
        original = header.fact(f"{scaling}.original_context_length", int)
        base["original_max_position_embeddings"] = original
    return base


def _llama3(header: GgufHeader, theta: float, head_dim: int) -> dict[str, Any]:
    """Of the frequencies' factors, where they are those of Llama 3."""
    tensor = header.tensors[_FREQUENCIES]
    stored = np.fromfile(tensor.file, "<f4", head_dim // 2, offset=tensor.start)
    factor = float(stored.max(initial=0.0))
    found = {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    found["original_max_position_embeddings"] = _LLAMA3_POSITIONS
    is_whole = tensor.type == "F32" and tensor.shape == (head_dim // 2,) and 1 <= factor < 1e6
    wanted = frequency_factors(found | {"rope_theta": theta}, head_dim) if is_whole else None
    if wanted is None or not torch.allclose(torch.from_numpy(stored), wanted, rtol=1e-4):
        raise header.error(f"tensor {_FREQUENCIES!r} has not the factors of Llama 3's rotation")
    return found


def frequency_factors(parameters: Mapping[str, Any], head_dim: int) -> Tensor | None:
    """[d / 2] what llama.cpp divides each frequency by, of Llama 3's rotation; None of others.

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


def _dtype(tensors: Iterable[GgufTensor]) -> str:
    """That most bytes are meant for."""
    sizes = dict[str, int]()
    for one in tensors:
        name = _DTYPES.get(one.type, "bfloat16")
        sizes[name] = sizes.get(name, 0) + one.size_bytes
    return max(sizes, key=lambda name: sizes[name])


def _ends(header: GgufHeader) -> list[int]:
    names = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    ends = {header.fact(name, int) for name in names if name in header.facts}
    tokens = header.fact("tokenizer.ggml.tokens", list)
    return sorted(ends | {place for place, token in enumerate(tokens) if token in _TEXT_ENDS})


def _placed(header: GgufHeader, config: Mapping[str, Any]) -> dict[str, Placed]:
    """Which tensor is which parameter: each has one of its shape, and none is left over."""
    import gguf  # optional, and slow to import

    family = header.fact("general.architecture", str)
    kind = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    placed, left = dict[str, Placed](), set(header.tensors) - {_FREQUENCIES}
    for parameter, shape in _shapes(config).items():
        if parameter == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        stem, _, ending = parameter.rpartition(".")
        stems = _EXPERTS.get(ending)
        name, *others = (
            [f"{names.get_name(stem)}.{ending}"]
            if stems is None
            else [f"{names.get_name(f'{stem}.{one}')}.weight" for one in stems]
        )
        for each in (name, *others):
            if each not in header.tensors:
                raise header.error(f"has no tensor {each!r}")
        turned = heads.get(stem.rpartition(".")[2], 0) if family == "llama" else 0
        is_raised = family in _GEMMAS and name.endswith("norm.weight")
        one = Placed(name, turned, 1.0 if is_raised else 0.0, *others)
        rows = (*shape[:-2], shape[-2] // 2, shape[-1]) if others else shape  # of each
        for tensor in one.tensors(header):
            if tensor.shape != rows:
                found = f"{list(tensor.shape)}, and not {list(rows)}"
                raise header.error(f"tensor {tensor.name!r} is {found}")
        left -= {name, *others}
        placed[parameter] = one
    if left:
        raise header.error(f"tensor {min(left)!r} has no place in a model of {family!r}")
    return placed


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    settings = AutoConfig.for_model(**config)
    loader: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = loader.from_config(settings)
    return {name: tuple(one.shape) for name, one in model.state_dict().items()}
