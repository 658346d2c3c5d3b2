"""Loading of one checkpoint: safetensors only, onto its place, wrapped for packed attention.

Importing this module imports transformers' modelling code, which takes seconds; the pool imports it
when the first model is loaded, so that a bad configuration is refused at once.
"""

import copy
import logging
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import tqdm
from transformers.utils.quantization_config import Mxfp4Config

from modelpool.checkpoint.footprint import read_config
from modelpool.checkpoint.headers import NOT_PARAMETERS
from modelpool.checkpoint.int8_values import read_int8
from modelpool.checkpoint.quantization import stored_as
from modelpool.checkpoint.text_part import TextPart, text_part
from modelpool.checkpoint.unpacked import Unpacked, unpacked_checkpoint
from modelpool.config import ModelConfig
from modelpool.device_manager import Placement
from modelpool.errors import ConfigError, UnsupportedModelError
from modelpool.fast.agreement import Agreement, KeptAgreement
from modelpool.fast.bit_trial import MOST_TOKENS, THREADS, settle_bits
from modelpool.fast.cuda_forward import CudaForward, cuda_forward_of
from modelpool.fast.direct_forward import direct_forward_of
from modelpool.fast.experts import can_quantise
from modelpool.fast.graph_runner import CudaGraphs
from modelpool.fast.lean_forward import is_quantised, lean_forward_of
from modelpool.fast.panels import exact_kernels
from modelpool.fast.quantised import Stored, give_back_freed, quantise_embeddings
from modelpool.fast.rotation import OwnFrequencies
from modelpool.fast.thread_choice import ThreadChoice
from modelpool.fast.tuning import PLAIN, Tuning
from modelpool.gguf.description import NAME as GGUF
from modelpool.gguf.weights import GgufWeights, plain_checkpoint
from modelpool.packed_model import PackedModel, quantise

logger = logging.getLogger(__name__)

_PAGE_BYTES = 4096


def load_model(
    config: ModelConfig,
    directory: Path,
    placement: Placement,
    vocab_size: int,
    field: str,
    tuning: Tuning = PLAIN,
) -> PackedModel:
    """Load the model of `directory` onto its place.

    Not reentrant: transformers sets process-wide state while it loads. `field` is the member's
    place in the configuration. Raises `UnsupportedModelError`, `ConfigError` for weights that
    cannot be read, and `torch.OutOfMemoryError`.
    """
    started = time.perf_counter()
    keeps_blocks = _keeps_blocks(config, directory, placement, tuning)
    try:
        # Models with plain weights compute all in torch, like transformers, including frequencies.
        with nullcontext() if tuning.weights == "plain" else OwnFrequencies():
            if keeps_blocks:
                read = _read_blocks(config, directory, tuning)
            else:
                read = _read_plain(config, directory, placement)
    except torch.OutOfMemoryError:
        raise  # a RuntimeError too, which also reports weights of other shapes
    except (OSError, ValueError, KeyError, ImportError, SafetensorError, RuntimeError) as error:
        raise ConfigError(f"{field}.source", f"cannot load {str(directory)!r}: {error}") from error
    if read.missing:  # transformers would continue with random numbers
        reason = f"{str(directory)!r} lacks {len(read.missing)} weights, such as {read.missing[0]}"
        raise ConfigError(f"{field}.source", reason)
    _check_devices(read.model, placement)
    if not keeps_blocks:
        _read_in(read.model)
    read.model.requires_grad_(False)
    moving: str | None = None
    is_kept_plain, key = tuning.weights == "plain", "source"
    kept = KeptAgreement(config, directory, tuning) if keeps_blocks else None
    known = None if kept is None else kept.load()
    try:
        if is_kept_plain:
            wrap = _wrap_drafter if tuning.lean else _wrap
            packed = wrap(config.name, read.model, vocab_size, tuning)
        else:
            packed = _wrap_plain(config.name, read.model, vocab_size, tuning, known is None)
            key = "weights"
            if not keeps_blocks:
                only_stored = config.weights == "auto"
                packed.quantise_weights(read.stored, only_stored, tuning.weights, read.in_int8)
            found = _shorten(packed, tuning, known)
            if kept is not None and known is None:
                kept.store(found)
        if tuning.kv_dtype is not None:
            packed.keep_kv_in(getattr(torch, tuning.kv_dtype))
        if tuning.is_target and placement.is_on_cpu:
            may_pack = is_kept_plain and tuning.pack_weights
            moving = settle_bits(packed, directory, may_pack)
            packed.bits_depend_on = None if moving == THREADS else moving
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{field}.{key}", error.reason) from error
    except OSError as error:  # blocks are read here
        raise ConfigError(f"{field}.source", f"cannot load {str(directory)!r}: {error}") from error
    packed.thread_choice = _thread_choice(packed, tuning, moving)
    give_back_freed()
    _log(packed, placement, time.perf_counter() - started)
    return packed


def _thread_choice(packed: PackedModel, tuning: Tuning, moving: str | None) -> ThreadChoice | None:
    """Return the thread choice of a model, or None.

    `moving`: what changes the bits of a target, including the use of one thread.
    """
    if tuning.others is None or packed.threads == 1:
        return None
    if not tuning.is_target:
        return ThreadChoice(packed.name, packed.threads, tuning.others)
    if moving is None:
        # A pass that is wholly in C has the same bits with any number of threads.
        most = math.inf if packed.computed_by == "C library" else MOST_TOKENS
        return ThreadChoice(packed.name, packed.threads, tuning.others, most_tokens=most)
    logger.info("%s: other bits with one thread, so it always has all", packed.name)
    return None


def _log(packed: PackedModel, placement: Placement, seconds: float) -> None:
    logger.info(
        "loaded %s: %.1fM parameters, %s, on %s, %.1f s",
        packed.name,
        packed.parameter_count / 1e6,
        str(packed.dtype).removeprefix("torch."),
        ", ".join(placement.devices),
        seconds,
    )


def _wrap_plain(
    name: str, model: PreTrainedModel, vocab_size: int, tuning: Tuning, compare: bool = True
) -> PackedModel:
    """Wrap a model without packing its plain weights."""
    return PackedModel.wrap(name, model, vocab_size, replace(tuning, pack_weights=False), compare)


def _shorten(packed: PackedModel, tuning: Tuning, known: Agreement | None) -> Agreement:
    """Set the shortcut of a model with quantised layers; pack the other layers if asked.

    `known`: the forwards that agreed at an earlier start, so that nothing is compared.
    """
    compare = known is None
    if tuning.pack_weights:
        packed.pack_weights(compare=compare)
    direct = lean = None
    if known is None or known.direct:
        direct = direct_forward_of(packed, compare)  # it verifies the model's shape
    packed.shortcut = direct
    if is_quantised(packed.model) and (known is None or known.lean):
        lean = lean_forward_of(packed, compare)
    packed.shortcut = lean or direct
    return Agreement(direct is not None, lean is not None)


def _wrap(name: str, model: PreTrainedModel, vocab_size: int, tuning: Tuning) -> PackedModel:
    packed = PackedModel.wrap(name, model, vocab_size, tuning)
    if packed.attention.is_fused:
        packed.sized = _graphed(packed)
    else:
        packed.shortcut = direct_forward_of(packed)
    return packed


def _graphed(packed: PackedModel) -> CudaForward | None:
    """Return the forward of a member on Triton kernels, which are imported here."""
    from modelpool.fast.layer_kernels import triton_kernels

    return cuda_forward_of(packed, triton_kernels(), CudaGraphs(packed.device))


def _wrap_drafter(
    name: str, model: PreTrainedModel, vocab_size: int, tuning: Tuning
) -> PackedModel:
    """Wrap a drafter with the lean forward if possible.

    It packs weights itself; otherwise they would be in memory twice.
    """
    packed = _wrap_plain(name, model, vocab_size, tuning)
    lean = lean_forward_of(packed)
    if lean is not None:
        lean.release()
        packed.shortcut = lean
    elif tuning.pack_weights:
        packed.pack_weights()
    return packed


@dataclass(frozen=True, eq=False)
class _Read:
    """A model, and facts about its weights.

    `missing`: weights that the checkpoint lacks. `stored`: weights that it has in int8 or 4 bits,
    by layer. `in_int8`: layers that must not be in int4.
    """

    model: PreTrainedModel
    missing: Sequence[str]
    stored: Mapping[str, Stored] = field(default_factory=dict)
    in_int8: Collection[str] = ()


def _keeps_blocks(
    config: ModelConfig, directory: Path, placement: Placement, tuning: Tuning
) -> bool:
    """Return whether blocks go from the file to the kernels; in float64 weights become plain."""
    is_kept = config.weights == "exact" and tuning.weights != "plain" and placement.is_on_cpu
    is_kept = is_kept and config.dtype != "float64"
    return is_kept and (directory / GGUF).is_file() and exact_kernels() is not None


def _read_blocks(config: ModelConfig, directory: Path, tuning: Tuning) -> "_Read":
    """Read a model whose weights in blocks are read when their layers are quantised."""
    weights = GgufWeights.of(directory, config.dtype)
    settings: Any = read_config(directory, trust_remote_code=False)
    dtype = settings.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    loader: Any = AutoModelForCausalLM
    # This affects the whole process while it lasts, but no other thread creates modules.
    with init_empty_weights(include_buffers=False):
        model = loader.from_config(settings, dtype=dtype)
    blocks = {name: weights.blocks[name] for name in _quantisable(model) & weights.blocks.keys()}
    own, named = model.state_dict(), dict(model.named_modules())
    tables = {
        name: stored
        for name, stored in weights.blocks.items()
        if isinstance(named.get(name), nn.Embedding)
    }
    in_blocks = {name for name in own if name.removesuffix(".weight") in blocks | tables}
    plain = {
        name: weights.plain(name).to(own[name].dtype) for name in weights.placed.keys() - in_blocks
    }
    model.load_state_dict(plain, strict=False, assign=True)
    model.tie_weights()
    left = {name for name, one in model.named_parameters() if one.is_meta}
    tied = {name: one for name, one in tables.items() if one is blocks.get("lm_head")}
    others = {name: one for name, one in tables.items() if name not in tied}
    is_inference = torch.is_inference_mode_enabled()

    def read_others() -> None:
        with torch.inference_mode(is_inference), torch.no_grad():
            quantise_embeddings(model, others)

    with torch.no_grad(), ThreadPoolExecutor(1) as beside:
        reading = beside.submit(read_others)
        quantise(config.name, model, blocks, weights=tuning.weights, in_int8=weights.in_int8)
        reading.result()
        quantise_embeddings(model, tied)
    return _Read(model, sorted(left - in_blocks))


def _quantisable(model: PreTrainedModel) -> set[str]:
    """Return the names of linear layers, and of the weights of experts."""
    found = set[str]()
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            found.add(name)
        elif can_quantise(module):
            found |= {f"{name}.{own}" for own, _ in module.named_parameters(recurse=False)}
    return found


def _read_plain(config: ModelConfig, directory: Path, placement: Placement) -> _Read:
    with (
        plain_checkpoint(directory, config.dtype) as plain,
        unpacked_checkpoint(plain.folder, config.dtype, config.trust_remote_code) as unpacked,
    ):
        read = replace(_read(config, unpacked, placement), in_int8=plain.in_int8)
        if config.weights == "exact" and plain.blocks:
            read = replace(read, stored=plain.blocks)
        return read


def _read(config: ModelConfig, found: Unpacked, placement: Placement) -> _Read:
    part = text_part(read_config(found.folder, config.trust_remote_code))
    if stored_as(part.config) == "int8":
        return _from_int8(config, part, found.folder)
    return _from_pretrained(config, part, found, placement)


def _from_int8(config: ModelConfig, part: TextPart, directory: Path) -> _Read:
    """Read int8 weights, also in floating point, from which transformers makes a model."""
    weights, stored = read_int8(directory)
    weights = {part.rename(name): one for name, one in weights.items() if part.has(name)}
    stored = part.layers(stored)
    settings = copy.deepcopy(part.config)
    for declared in ("quantization_config", "compression_config"):
        if hasattr(settings, declared):
            delattr(settings, declared)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]
    model, report = kind.from_pretrained(
        None,
        config=settings,
        state_dict=weights,
        dtype="auto" if config.dtype == "auto" else getattr(torch, config.dtype),
        output_loading_info=True,
    )
    known = dict(model.named_modules())
    strange = [name for name in stored if name not in known]
    if strange:
        raise ValueError(f"int8 weights of {strange[0]}, which the model does not have")
    _check_unexpected(model, report["unexpected_keys"])
    return _Read(model, sorted(report["missing_keys"]), stored)


def _from_pretrained(
    config: ModelConfig, part: TextPart, found: Unpacked, placement: Placement
) -> _Read:
    options: dict[str, Any] = {}
    if part.is_changed:
        options |= {"config": part.config, "key_mapping": dict(part.renamed)}
    if stored_as(part.config) == "mxfp4":
        options["quantization_config"] = Mxfp4Config(dequantize=True)
    if config.dtype == "float64":  # experts have no other kernels for it
        options["experts_implementation"] = "eager"
    if placement.max_memory:
        options["device_map"] = "sequential"  # as accounted; "auto" balances the parts
        options["max_memory"] = {_accelerate_key(name): n for name, n in placement.max_memory}
    elif not placement.is_on_cpu:
        options["device_map"] = {"": placement.device}  # directly, not through the CPU
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        str(found.folder),
        dtype="auto" if config.dtype == "auto" else getattr(torch, config.dtype),
        use_safetensors=True,
        trust_remote_code=config.trust_remote_code,
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused below
        **options,
    )
    model, report = loaded
    for name, stored, wanted in sorted(report["mismatched_keys"]):
        raise ValueError(f"{name} is {list(stored)}, and not {list(wanted)}")
    zeros = {part.rename(name) for name in found.zero_biases}
    own = [name for name in report["unexpected_keys"] if part.has(name) and name not in zeros]
    _check_unexpected(model, own)
    blocks = found.blocks if config.weights == "exact" else {}
    return _Read(model, sorted(report["missing_keys"]), part.layers(blocks))


def _check_unexpected(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Raise `ValueError` for weights that its class lacks: it computes something else."""
    strange = sorted(name for name in names if not name.endswith(NOT_PARAMETERS))
    if strange:
        raise ValueError(f"{type(model).__name__} has no {strange[0]}")


def _check_devices(model: PreTrainedModel, placement: Placement) -> None:
    """Raise `torch.OutOfMemoryError` if a part of a model is not where it was placed.

    accelerate divides no layer, and keeps room for the largest one on the first device: if it runs
    out of devices for that reason, it continues with the disk.
    """
    where: dict[str, Any] = getattr(model, "hf_device_map", None) or {}
    elsewhere = sorted(part for part, device in where.items() if device in ("cpu", "disk", "meta"))
    if placement.max_memory and elsewhere:
        reason = f"whole layers leave {len(elsewhere)} parts without a place, such as "
        raise torch.OutOfMemoryError(f"{reason}{elsewhere[0]}")


def _accelerate_key(device: str) -> int | str:
    """Return accelerate's name for a device: an index for an accelerator."""
    return int(device.partition(":")[2]) if ":" in device else device


def _read_in(model: PreTrainedModel) -> None:
    """Read weights on the CPU, which are only mapped: else the first forward would wait for all."""
    for parameter in tqdm(list(model.parameters()), disable=True):
        if parameter.device.type == "cpu":
            parameter.detach().flatten().view(torch.uint8)[::_PAGE_BYTES].sum()
