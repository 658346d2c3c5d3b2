"""Facts about a checkpoint and its memory, read from its headers without loading it.

The model's outline decides whether it can be served, and what it stores for each token, before any
weight file is opened. Parameters are counted from the safetensors headers, by their types.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from modelpool.attention.backend import Feature
from modelpool.checkpoint.architecture import chooses, expert_count, max_positions
from modelpool.checkpoint.dtypes import NAMED_DTYPES, WIDTHS
from modelpool.checkpoint.headers import (
    Header,
    StoredParameter,
    WeightBytes,
    headers_of,
    parameters_of,
    weight_bytes,
)
from modelpool.checkpoint.packed_weights import packed_weights, plain_header
from modelpool.checkpoint.quantization import (
    KEPT_PLAIN,
    Stored,
    packing_of,
    stored_as,
    unpacked_dtype,
)
from modelpool.checkpoint.text_part import text_part
from modelpool.config import Dtype, KeptWeights, KVDtype, Weights
from modelpool.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from modelpool.outline import ModelOutline

QUANTISED_WEIGHTS: tuple[Weights, ...] = ("int8", "int4")
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True, kw_only=True)
class ModelFootprint:
    """Demands of a model on the devices where it is placed.

    `state_bytes` are those of recurrent layers' states, of all rows and kept ones together;
    `outer_bytes` are those of the weights that are in no layer: embeddings, the head. `field` is
    its place in the configuration; `device` is the one asked for there ("auto", "cpu", "cuda",
    "cuda:1").
    """

    name: str
    weight_bytes: int
    kv_bytes_per_token: int = 0
    parameter_count: int = 0
    field: str = "pool"
    device: str = "auto"
    outer_bytes: int = 0
    state_bytes: int = 0

    def total_bytes(self, kv_tokens: int) -> int:
        """Return the bytes of the weights and of what is stored for rows."""
        return self.weight_bytes + self.row_bytes(kv_tokens)

    def row_bytes(self, kv_tokens: int) -> int:
        """Return the bytes of a KV store for `kv_tokens` tokens, and of recurrent states."""
        return self.kv_bytes_per_token * kv_tokens + self.state_bytes

    def part_bytes(self, weight_bytes: int, kv_tokens: int) -> int:
        """Return the most bytes that a part of the weights takes with the KV of its layers."""
        layers, kv = self._layers_and_kv(kv_tokens)
        return -(-weight_bytes * (layers + kv) // layers)

    def part_within(self, room_bytes: int, kv_tokens: int) -> int:
        """Return the most bytes of weights that `room_bytes` hold with the KV of their layers."""
        layers, kv = self._layers_and_kv(kv_tokens)
        return room_bytes * layers // (layers + kv)

    def _layers_and_kv(self, kv_tokens: int) -> tuple[int, int]:
        """Return the bytes of the layers, among which the KV is divided, and of the KV."""
        layers = max(self.weight_bytes - self.outer_bytes, 1)
        return layers, self.row_bytes(kv_tokens)


@dataclass(frozen=True)
class Kept:
    """Requested form of the linear layers' weights, and the kernels that the CPU has for it.

    `has_kernels`: the CPU has kernels for blocks of 4 and 8 bits; without them, weights are rounded
    to int8.
    """

    asked: Weights = "auto"
    has_int8: bool = True
    has_kernels: bool = True

    def weights(self, stored: Stored, parameters: Iterable[StoredParameter]) -> KeptWeights:
        """Return the form in which the linear layers of a checkpoint are kept."""
        if not (self.has_kernels or self.has_int8):
            return "plain"
        if self.asked in ("int4", "exact") and stored in KEPT_PLAIN:
            return "int4" if self.asked == "int4" or _has_small(parameters) else "int8"
        return "int8" if "int8" in (self.asked, stored) else "plain"

    def quantised_bytes(
        self,
        stored: Stored,
        parameters: Iterable[StoredParameter],
        experts: int | None = None,
        has_plain_experts: bool = False,
        has_plain_tables: bool = False,
    ) -> Callable[[StoredParameter], int | None]:
        """Return a function that gives the bytes of a quantised weight, and None for another one.

        `experts`: the number of experts in a mixture.
        """
        weights, has_small = self.weights(stored, parameters), _has_small(parameters)
        if weights == "plain":
            return lambda _: None
        every = self.asked != "auto"
        in_int4 = weights == "int4"

        def taken(one: StoredParameter) -> int | None:
            if one.is_table and one.is_in_blocks and self.asked == "exact" and self.has_kernels:
                return None if has_plain_tables else one.block_bytes
            if one.stays_plain or (one.dtype != "I8" and not (every and one.is_linear)):
                return None
            if one.is_expert and has_plain_experts:
                return None
            layer = one.name.removesuffix(".weight")
            if one.dtype != "I8" and chooses(layer, one.shape[0], experts) and not one.is_expert:
                return None
            if one.dtype == "I8" or not self.has_kernels:
                return one.int8_bytes
            if self.asked == "exact" and one.is_in_blocks:
                return one.block_bytes
            is_wide = one.is_head or (has_small and one.is_in_blocks and not one.is_small)
            return one.int4_bytes if in_int4 and not is_wide else one.rounded_bytes

        return taken


def _has_small(parameters: Iterable[StoredParameter]) -> bool:
    return any(one.is_small for one in parameters)


@dataclass(frozen=True, kw_only=True)
class CheckpointFacts:
    """Facts of a checkpoint's headers and configuration, for the dtype that it is loaded in."""

    parameter_count: int
    dtype: str  # dtype that it computes in
    stored: Stored
    weights: KeptWeights  # form of the linear layers' weights, once it is loaded
    weight_bytes: int
    outer_bytes: int  # bytes of the weights that are in no layer
    read_bytes: int | None  # weights read for one token: see `WeightBytes`
    int8_read_bytes: int | None  # the same with `weights: int8`, and with `weights: int4`
    int4_read_bytes: int | None
    kv_dtype: str  # dtype of keys and values
    kv_bytes_per_token: int
    state_bytes: int  # states of recurrent layers, for one row
    head_dims: frozenset[int]  # widths of the layers' keys
    features: frozenset[Feature]  # features that its layers need from attention
    has_blocks: bool  # some weights are in blocks of 4 bits
    has_plain_experts: bool  # some experts stay in `dtype` for any request
    max_positions: int
    vocab_rows: int  # rows of the embedding: the tokenizer's length, or more (padded)
    tied_elements: int  # elements of an embedding that is also the head and is not quantised
    eos_token_ids: frozenset[int]

    @property
    def is_quantized(self) -> bool:
        """True if the quantisation is left to `transformers`."""
        return self.stored == "other"

    @property
    def tied_bytes(self) -> int:
        return self.tied_elements * WIDTHS[self.dtype]

    def footprint(
        self, name: str, field: str, device: str, states: int = 0, copies_head: bool = False
    ) -> ModelFootprint:
        """Return these facts as a demand on a device.

        `states`: rows for which recurrent layers keep states; `copies_head`: a tied head is a copy
        beside its embedding.
        """
        copied = self.tied_bytes if copies_head else 0
        return ModelFootprint(
            name=name,
            weight_bytes=self.weight_bytes + copied,
            kv_bytes_per_token=self.kv_bytes_per_token,
            parameter_count=self.parameter_count,
            field=field,
            device=device,
            outer_bytes=self.outer_bytes + copied,
            state_bytes=self.state_bytes * states,
        )


def read_checkpoint(
    directory: Path,
    *,
    field: str,
    dtype: Dtype = "auto",
    kv_dtype: KVDtype = "auto",
    kept: Kept | None = None,
    trust_remote_code: bool = False,
    headers: Iterable[Header] | None = None,
) -> CheckpointFacts:
    """Return the facts of a checkpoint as loaded in `dtype`.

    Raises `ConfigError` for `{field}.source`. `kept`: form of the weights, by default the
    checkpoint's. `headers`: headers of weights that are not in the directory.
    """
    with _naming(field, directory):
        return _read(directory, dtype, kv_dtype, kept or Kept(), trust_remote_code, headers)


def kv_dtype_of(asked: KVDtype, weights: KeptWeights, dtype: str) -> str:
    """Return the dtype of keys and values.

    It depends on the file and on the request, not on the CPU.
    """
    if asked != "auto":
        return asked
    return dtype if weights == "plain" or dtype == "float64" else "float16"


def check_served(directory: Path, field: str, trust_remote_code: bool = False) -> None:
    """Check by its configuration alone that a model can be served.

    Raises `UnsupportedModelError` for `{field}.source`, or `ConfigError` if the configuration
    cannot be read.
    """
    with _naming(field, directory):
        _outline(read_config(directory, trust_remote_code), trust_remote_code)


@contextmanager
def _naming(field: str, directory: Path) -> Iterator[None]:
    """Add a checkpoint's place in the configuration to errors that are raised within."""
    try:
        yield
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{field}.source", error.reason) from error
    except ConfigError as error:
        raise ConfigError(f"{field}.source", error.reason) from error
    except (*_UNREADABLE, StrictDataclassError) as error:
        reason = f"cannot read the checkpoint in {str(directory)!r}: {' '.join(str(error).split())}"
        raise ConfigError(f"{field}.source", reason) from error


def _outline(config: PreTrainedConfig, trust_remote_code: bool) -> "ModelOutline":
    # Imported late, because it imports the models' own code: errors in the configuration come
    # first.
    from modelpool.outline import UnservedModel, outline_of

    try:
        return outline_of(config, trust_remote_code)
    except UnservedModel as error:
        raise UnsupportedModelError("", str(error)) from error


def read_config(directory: Path, trust_remote_code: bool) -> PreTrainedConfig:
    """Read the configuration of a local checkpoint."""
    config: PreTrainedConfig = AutoConfig.from_pretrained(
        str(directory), trust_remote_code=trust_remote_code, local_files_only=True
    )
    return config


def _read(
    directory: Path,
    dtype: Dtype,
    kv_dtype: KVDtype,
    kept: Kept,
    trust_remote_code: bool,
    headers: Iterable[Header] | None,
) -> CheckpointFacts:
    config = read_config(directory, trust_remote_code)
    outline = _outline(config, trust_remote_code)
    part = text_part(config)
    text = part.config.get_text_config(decoder=True)
    stored = stored_as(config)
    is_tied = bool(getattr(part.config, "tie_word_embeddings", False))
    found = headers_of(directory) if headers is None else headers
    packing = packing_of(config)
    if packing is not None:
        every = {name: entry for header in found for name, entry in header.items()}
        found = [plain_header(every, packed_weights(every, packing))]
    read = parameters_of(found, is_tied=is_tied, stored=stored)
    parameters = [one for one in read if part.has(one.name)]
    count = sum(one.count for one in parameters)
    lacking = outline.parameter_count - count
    if lacking > 0 and stored != "other":  # transformers would fill them with random numbers
        raise ConfigError("", f"lacks {lacking:,} of its {outline.parameter_count:,} parameters")
    own = _own_dtype(config, text, parameters)
    own = own if packing is None else unpacked_dtype(own)
    loaded = own if dtype == "auto" else dtype
    width: float = WIDTHS[loaded]
    if stored == "other":
        width = sum(one.stored_bytes for one in parameters) / max(count, 1)
    bytes_of = partial(
        weight_bytes, parameters, width, tied_rows=int(text.vocab_size) if is_tied else None
    )

    def taken_by(kept: Kept) -> WeightBytes:
        facts = expert_count(text), outline.has_plain_experts, loaded == "float64"
        return bytes_of(quantised_bytes=kept.quantised_bytes(stored, parameters, *facts))

    taken = taken_by(kept)
    read_bytes = {  # other forms are counted as if the CPU had their kernels
        asked: taken_by(kept if asked == kept.asked else Kept(asked)).read
        for asked in QUANTISED_WEIGHTS
    }
    weights = kept.weights(stored, parameters)
    stored_kv = kv_dtype_of(kv_dtype, weights, loaded)
    return CheckpointFacts(
        parameter_count=count,
        dtype=loaded,
        stored=stored,
        weights=weights,
        weight_bytes=taken.total,
        outer_bytes=taken.outer,
        read_bytes=taken.read,
        int8_read_bytes=read_bytes["int8"],
        int4_read_bytes=read_bytes["int4"],
        kv_dtype=stored_kv,
        kv_bytes_per_token=outline.kv_elements_per_token * WIDTHS[stored_kv],
        state_bytes=outline.state_bytes(loaded),
        head_dims=outline.head_dims,
        features=outline.features,
        has_blocks=any(one.is_in_blocks for one in parameters),
        has_plain_experts=outline.has_plain_experts,
        max_positions=max_positions(text),
        vocab_rows=int(text.vocab_size),
        tied_elements=taken.tied_elements,
        eos_token_ids=_eos_token_ids(directory, text),
    )


def _own_dtype(
    config: PreTrainedConfig, text: PreTrainedConfig, tensors: Iterable[StoredParameter]
) -> str:
    """Return the dtype that `auto` is in transformers: the configuration's, else the weights'."""
    declared = getattr(config, "dtype", None) or getattr(text, "dtype", None)
    name = str(declared).removeprefix("torch.")
    if name in WIDTHS:
        return name
    parameters: Counter[str] = Counter()
    for tensor in tensors:
        dtype = str(NAMED_DTYPES.get(tensor.dtype)).removeprefix("torch.")
        if dtype in WIDTHS:
            parameters[dtype] += tensor.count
    return parameters.most_common(1)[0][0] if parameters else "float32"


def _eos_token_ids(directory: Path, config: PreTrainedConfig) -> frozenset[int]:
    """Return the ids that end a text: the generation config's, else the config's."""
    file = directory / "generation_config.json"
    content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if not isinstance(content, dict):
        raise ValueError(f"{file.name} is no JSON object")
    stored: Any = content.get("eos_token_id")
    if stored is None:
        stored = getattr(config, "eos_token_id", None)
    if stored is None:
        return frozenset()
    return frozenset(stored if isinstance(stored, list) else [stored])
