"""The declaration of a pool, and its validation from a mapping.

Keys are strict: an unknown one is an error that names it. Settings that depend on the machine or on
files (sources, devices, tokenizers) are checked by `ModelPool`, not here.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from modelpool.attention.backend import AttentionName
from modelpool.config_faults import config_error
from modelpool.errors import ConfigError

Dtype = Literal["auto", "bfloat16", "float16", "float32", "float64"]
KVDtype = Literal["auto", "bfloat16", "float16", "float32"]
Weights = Literal["auto", "int8", "int4", "exact"]
KeptWeights = Literal["plain", "int8", "int4"]  # form of the linear layers of a loaded model

# Sources of text drafters.
NGRAM = "ngram"
SUFFIX = "suffix"
TEXT_SOURCES = (NGRAM, SUFFIX)
OWN_DRAFTER = "drafter:"  # before `package.module:NAME`, a user's own kind of drafter
QUANTISED = "quantised:"  # before the target's name: its twin in int8 or int4
_OF_WEIGHTS = (
    "dtype", "kv_dtype", "weights", "device", "threads", "attention", "tensor_parallel",
    "inflate_to", "revision", "trust_remote_code",
)  # fmt: skip

# Settings that a twin may have for itself.
_OF_A_TWIN = ("dtype", "kv_dtype", "weights", "device", "threads", "attention")

_Model = TypeVar("_Model", bound=BaseModel)


def _form(pattern: str, reason: str) -> AfterValidator:
    """Return a validator that refuses texts of another form, with a readable `reason`."""

    def check(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise ConfigError("", f"{reason} (got {text!r})")
        return text

    return AfterValidator(check)


def _one_process(count: int) -> int:
    if count > 1:
        raise ConfigError(
            "",
            f"must be 1 (got {count}): transformers' tp_plan divides each layer among processes "
            "that run every forward together, and one process runs the models here, with a forward "
            "and a KV store of its own; device: auto spreads a model that is too large for one "
            "device over several, whole layers on each",
        )
    return count


_NAME = _form(r"[^\s>,]+", "must have no spaces, '>' or ','")  # the two separate names in chains
_DEVICE = _form(r"auto|cpu|cuda(:[0-9]+)?", "must be auto, cpu, cuda or cuda:N")


class ModelConfig(BaseModel):
    """One member of the pool.

    Attributes:
        name: the name in chains, and of the target for clients; without spaces, ">" and ",".
        source: `hub:ORG/NAME`, `hub:ORG/NAME:QUANT` (a GGUF file of the repository by the end of
            its name, such as Q4_K_M; without QUANT, if there are only GGUF files: Q4_K_M, else
            another Q4, else the first), `path:DIR` (or a path that begins with "/", "." or "~"),
            `gguf:FILE` (or a path that ends in ".gguf"), `bundled:NAME`, `released:smollm2`
            (SmolLM2-135M-Instruct, downloaded once); `quantised:TARGET`: the target with int8
            weights, or int4 if `weights` says so, on the CPU. Without a model: `suffix` drafts from
            the request's text and its tenant's earlier outputs, `ngram` only from the request's
            text, `drafter:package.module:NAME` is a subclass of
            `specrouter.execution.drafter.Drafter`.
        dtype: `auto` is the checkpoint's, but on the CPU float32 for drafters of fewer than 8M
            parameters and where the CPU has no kernels for a half precision (bfloat16 needs
            AVX-512), if there is memory. Packed weights (AWQ, GPTQ) of float16 become bfloat16.
        kv_dtype: dtype of keys and values. `auto` is float16 where weights are quantised, which
            attend in float32, else the model's dtype. On a GPU it is the model's dtype.
        weights: form of the linear layers' weights. `auto` is the checkpoint's (also
            compressed-tensors W8A8; AWQ, GPTQ and W4A16 become plain; a GGUF file's are `exact` on
            the CPU where dtype is auto, else plain); `int8` and `int4` (groups of 32, the head in
            int8) quantise at load, which changes the text; `exact` keeps them as the checkpoint has
            them (blocks of a GGUF file, groups of AWQ, GPTQ and W4A16) and rounds the rest (q2_K
            and q3_K to int4). CPU only; a CPU that has no kernels for them keeps plain weights,
            with a warning.
        device: `auto` (by free memory, the target first, then the largest), `cpu`, `cuda` or
            `cuda:N`.
        threads: CPU threads of its forwards. By default 1 for a drafter of fewer than 4M
            parameters, else torch's setting.
        attention: `pool.attention` for this member.
        tensor_parallel: must be 1. A model too large for one device is spread by whole layers
            (`device: auto` or `cuda`).
        inflate_to: minimum number of parameters: the source, a Llama, is inflated to the same
            function at a larger model's cost.
        pinned: never evicted when idle.
        revision: branch, tag or commit of a hub repository.
        trust_remote_code: runs the repository's own Python code: only for sources that you trust.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(min_length=1), _NAME]
    source: Annotated[str, Field(min_length=1)]
    dtype: Dtype = "auto"
    kv_dtype: KVDtype = "auto"
    weights: Weights = "auto"
    device: Annotated[str, _DEVICE] = "auto"
    threads: Annotated[int, Field(ge=1)] | None = None
    attention: AttentionName | None = None
    tensor_parallel: Annotated[int, Field(ge=1), AfterValidator(_one_process)] = 1
    inflate_to: Annotated[int, Field(ge=1_000_000)] | None = None
    pinned: bool = False
    revision: str | None = None
    trust_remote_code: bool = False

    @property
    def has_model(self) -> bool:
        """False if it only drafts, and has no files, no device and no memory of the pool."""
        return not (self.reads_texts or self.source.startswith(OWN_DRAFTER))

    @property
    def reads_texts(self) -> bool:
        return self.source in TEXT_SOURCES

    @property
    def quotes_outputs(self) -> bool:
        """True if it also drafts from the tenant's earlier outputs."""
        return self.source == SUFFIX

    @property
    def own_drafter(self) -> str:
        return self.source.removeprefix(OWN_DRAFTER)

    @property
    def is_placed(self) -> bool:
        """True if its device may be chosen: not without weights, and a twin is on the CPU."""
        return self.has_model and self.twin_of is None

    @property
    def twin_of(self) -> str | None:
        """The name of the target, if this member has its weights in int8 or int4."""
        return self.source.removeprefix(QUANTISED) if self.source.startswith(QUANTISED) else None

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        """Refuse settings that have no meaning for the source."""
        for field in _OF_WEIGHTS:
            value = getattr(self, field)
            if value == type(self).model_fields[field].default:
                continue
            stranger = None
            if not self.has_model:
                stranger = f"source: {self.source}, which has no weights"
            elif self.twin_of is not None and (field not in _OF_A_TWIN or value == "exact"):
                stranger = f"a twin, which has that of {self.twin_of}"
            if stranger is not None:
                raise ConfigError(field, f"{value!r} has no meaning for {stranger}")
        return self


class PoolConfig(BaseModel):
    """The models that may draft and verify, and the one whose output is served.

    Attributes:
        target: the name of the model whose output is served.
        models: the target and its drafters, all with the same tokenizer.
        max_loaded_models: above it, idle models are evicted, the least recently used first.
        memory_limit_mb: the same, for weights and KV of the loaded models on all devices.
        pack_weights: lays out linear weights where that is faster on the CPU; the last bit of large
            float32 layers may change.
        attention: kernels. `auto` is `triton` on CUDA where it is possible, else `path`: on a CPU
            in C, on a GPU in plain PyTorch, which is slow. `flashinfer`, on CUDA, has never run
            (half precision, head sizes 64, 128, 256).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str
    models: Annotated[tuple[ModelConfig, ...], Field(min_length=1)]
    max_loaded_models: Annotated[int, Field(ge=1)] | None = None
    memory_limit_mb: Annotated[int, Field(ge=1)] | None = None
    pack_weights: bool = True
    attention: AttentionName = "auto"

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [model.name for model in self.models]
        for index, name in enumerate(names):
            if name in names[:index]:
                reason = f"{name!r} is the name of models[{names.index(name)}] already"
                raise ConfigError(f"models[{index}].name", reason)
        if self.target not in names:
            reason = f"{self.target!r} is not among the models: {', '.join(names)}"
            raise ConfigError("target", reason)
        return self

    @model_validator(mode="after")
    def _check_draft_only(self) -> Self:
        texts = [index for index, model in enumerate(self.models) if model.reads_texts]
        if len(texts) > 1:
            first, second = texts[:2]
            reason = f"models[{first}] drafts from texts already; two would draft the same"
            raise ConfigError(f"models[{second}].source", reason)
        if not self._target.has_model:
            source = self._target.source
            reason = f"{self.target!r} has source: {source}, which drafts but cannot verify"
            raise ConfigError("target", reason)
        return self

    @model_validator(mode="after")
    def _check_twins(self) -> Self:
        """Check that there is at most one twin, in fewer bits than the target's weights."""
        twins = [index for index, model in enumerate(self.models) if model.twin_of is not None]
        if not twins:
            return self
        field, twin = f"models[{twins[0]}].source", self.models[twins[0]]
        if twin.name == self.target:
            reason = f"{self.target!r} has source: {twin.source}, which only drafts"
            raise ConfigError("target", reason)
        if twin.twin_of != self.target:
            reason = f"{twin.twin_of!r} is not the target {self.target!r}, of which alone there is"
            raise ConfigError(field, f"{reason} a twin; a drafter itself takes weights: int8")
        if len(twins) > 1:
            reason = f"{twin.source} is the source of models[{twins[0]}] already"
            raise ConfigError(f"models[{twins[1]}].source", reason)
        weights, own = self._target.weights, twin.weights
        if weights in ("int4", "exact") or (weights == "int8" and own != "int4"):
            reason = f"{self.target!r} is in {weights} itself, by weights: {weights}"
            raise ConfigError(field, reason)
        return self

    def described(self, model: ModelConfig) -> ModelConfig:
        """Return `model`; a twin gets the target's settings, with fewer bits on the CPU."""
        if model.twin_of is None:
            return model
        own = {field: getattr(model, field) for field in ("name", "threads", "attention", "pinned")}
        own["dtype"] = self._target.dtype if model.dtype == "auto" else model.dtype
        own["device"] = "cpu" if model.device == "auto" else model.device
        own["weights"] = "int8" if model.weights == "auto" else model.weights
        return self._target.model_copy(update=own)

    @property
    def quoting(self) -> str | None:
        """The name of the member that drafts from earlier outputs, if there is one."""
        return next((model.name for model in self.models if model.quotes_outputs), None)

    @property
    def twin(self) -> str | None:
        """The name of the target's twin, if there is one."""
        return next((model.name for model in self.models if model.twin_of is not None), None)

    @property
    def _target(self) -> ModelConfig:
        return next(model for model in self.models if model.name == self.target)

    @model_validator(mode="after")
    def _check_limit(self) -> Self:
        kept = sum(
            model.name == self.target or (model.pinned and model.has_model) for model in self.models
        )
        if self.max_loaded_models is not None and self.max_loaded_models < kept:
            raise ConfigError(
                "max_loaded_models",
                f"{self.max_loaded_models} is less than the {kept} models that are never evicted "
                "(the target and the pinned ones)",
            )
        return self


def validate_config(
    model: type[_Model], data: _Model | Mapping[str, Any], field: str = ""
) -> _Model:
    """Return `data` as a validated `model`.

    `field` is the place of `data` in the whole configuration ("pool", or "" for its root). Raises
    `ConfigError` for the first fault.
    """
    if isinstance(data, model):
        return data
    if not isinstance(data, Mapping):
        raise ConfigError(field, f"expected a mapping of settings, got {type(data).__name__}")
    try:
        return model.model_validate(dict(data))
    except ValidationError as error:
        raise config_error(error, field, model) from error
