"""The declaration of a pool, and how a validation error becomes a `ConfigError`.

Keys are strict: an unknown one is an error that names it. What depends on the machine or on
files (sources, devices, tokenizers) is checked by `ModelPool`, not here.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self, TypeVar, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from modelpool.attention.choice import AttentionName
from modelpool.errors import ConfigError

Dtype = Literal["auto", "bfloat16", "float16", "float32", "float64"]

NGRAM = "ngram"  # the source of a member that drafts from the text itself
_OF_WEIGHTS = (
    "dtype", "device", "threads", "attention", "tensor_parallel", "inflate_to", "revision",
    "trust_remote_code",
)  # fmt: skip

_Model = TypeVar("_Model", bound=BaseModel)


def _form(pattern: str, reason: str) -> AfterValidator:
    """A text is of this form, or refused for `reason`: a pattern tells a reader little."""

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
        name: to ask for it by, in chains; without spaces, ">" and ",".
        source: `bundled:NAME`, `path:DIR` (or a path that begins with "/", "." or "~"),
            `hub:ORG/NAME`, or `ngram`: no model, it drafts from the request's own text.
        dtype: "auto" is the checkpoint's, except for a half-precision member that runs on the CPU
            and is faster in float32: if it has fewer than 8M parameters and is not the target, or
            if the CPU has no kernels for its dtype (bfloat16 wants AVX-512 or better, float16 more
            than that) and there is memory for twice the bytes. A drafter's dtype never changes
            the output.
        device: "auto" (by free memory, the largest model first), "cpu", "cuda" or "cuda:N".
        threads: CPU threads of its forwards. By default 1 for a member of fewer than 4M
            parameters that is not the target and runs on the CPU, else torch's setting when the
            pool is made.
        attention: as `pool.attention`, for this member.
        tensor_parallel: devices that share each layer: 1, and more are refused. A model that is too
            large for one device is spread over several by whole layers (`device: auto` or `cuda`).
        inflate_to: at least so many parameters. The member is then the source, a Llama, inflated:
            the same function at a real model's cost (`modelpool.inflate`), kept in the cache.
        pinned: never evicted when idle.
        revision: of a hub repository: a branch, a tag or a commit.
        trust_remote_code: runs the repository's own Python code: only for sources that you trust.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(min_length=1), _NAME]
    source: Annotated[str, Field(min_length=1)]
    dtype: Dtype = "auto"
    device: Annotated[str, _DEVICE] = "auto"
    threads: Annotated[int, Field(ge=1)] | None = None
    attention: AttentionName | None = None
    tensor_parallel: Annotated[int, Field(ge=1), AfterValidator(_one_process)] = 1
    inflate_to: Annotated[int, Field(ge=1_000_000)] | None = None
    pinned: bool = False
    revision: str | None = None
    trust_remote_code: bool = False

    @property
    def is_weightless(self) -> bool:
        """The member has no model: no files, no device, no memory."""
        return self.source == NGRAM

    @model_validator(mode="after")
    def _check_weightless(self) -> Self:
        for field in _OF_WEIGHTS:
            value = getattr(self, field)
            if self.is_weightless and value != type(self).model_fields[field].default:
                raise ConfigError(
                    field, f"{value!r} has no meaning for source: {NGRAM}, which has no weights"
                )
        return self


class PoolConfig(BaseModel):
    """The models that may draft and verify, and the one whose output is served.

    Attributes:
        target: the name of the model whose output is served.
        models: the target, and the models that may draft for it, all with the same tokenizer.
        max_loaded_models: past it, idle models are evicted, the least recently used first.
        memory_limit_mb: the same for weights and KV of the loaded models, all devices together.
        pack_weights: lays out linear weights once where that is faster: on the CPU, bfloat16 with
            the same bits, and large float32 layers, whose last bit may change but no longer depends
            on what is computed beside it.
        attention: the kernels that attend: `sdpa` (PyTorch's, on any device), `path` (plain PyTorch
            on any device, slow: what `triton` is held against), or on CUDA, where none has run yet,
            `triton` (each node of a tree has the bits of the same token decoded alone, and tokens
            are chosen by kernels, too) or `flashinfer` (flashinfer-python; bfloat16 and float16,
            heads of 64, 128 or 256 numbers; the last bits depend on what is computed beside a row;
            128 MiB a model beside what is accounted). `auto` is `sdpa`.
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
                first = names.index(name)
                raise ConfigError(
                    f"models[{index}].name", f"{name!r} is the name of models[{first}] already"
                )
        if self.target not in names:
            raise ConfigError(
                "target", f"{self.target!r} is not among the models: {', '.join(names)}"
            )
        return self

    @model_validator(mode="after")
    def _check_weightless(self) -> Self:
        weightless = [index for index, model in enumerate(self.models) if model.is_weightless]
        if len(weightless) > 1:
            first, second = weightless[:2]
            raise ConfigError(
                f"models[{second}].source",
                f"{NGRAM} is the source of models[{first}] already; two would draft the same",
            )
        if weightless and self.models[weightless[0]].name == self.target:
            raise ConfigError(
                "target", f"{self.target!r} has source: {NGRAM}, which drafts but cannot verify"
            )
        return self

    @model_validator(mode="after")
    def _check_limit(self) -> Self:
        kept = sum(
            model.name == self.target or (model.pinned and not model.is_weightless)
            for model in self.models
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
    """`data` as a validated `model`.

    `field` is where `data` stands in the whole configuration ("pool", or "" for its root).
    Raises `ConfigError` for the first thing that is wrong.
    """
    if isinstance(data, model):
        return data
    if not isinstance(data, Mapping):
        raise ConfigError(field, f"expected a mapping of settings, got {type(data).__name__}")
    try:
        return model.model_validate(dict(data))
    except ValidationError as error:
        raise config_error(error, field, model) from error


def config_error(
    error: ValidationError, field: str = "", model: type[BaseModel] | None = None
) -> ConfigError:
    """The first fault of a pydantic error, under its dotted path below `field`.

    `model`, the validated class, lets an unknown key be answered with the nearest known one, and
    tells which values are secret.
    """
    # An unknown key first: a misspelt one is why a required one is missing.
    faults = sorted(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
    fault = faults[0]
    path = _dotted(field, fault["loc"])
    if fault["type"] == "extra_forbidden":
        return ConfigError(path, "unknown key" + _nearest_key(model, fault["loc"]))
    if fault["type"] == "missing":
        return ConfigError(path, "missing; this setting is required")
    cause = fault.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):  # raised by a validator, its path relative to the model
        return type(cause)(_dotted(path, (cause.field,) if cause.field else ()), cause.reason)
    settings = list(_settings(model, fault["loc"]))
    given = fault["input"]
    if given is None:  # in YAML, a key with nothing after it
        is_required = bool(settings) and settings[-1].is_required()
        remedy = "this setting is required" if is_required else "fill it in, or remove it"
        return ConfigError(path, f"is empty; {remedy}")
    is_secret = any(not setting.repr for setting in settings)
    return ConfigError(path, _reason(fault) + ("" if is_secret else f" (got {given!r})"))


def _reason(fault: Mapping[str, Any]) -> str:
    """In the words of a YAML file, where pydantic's are Python's."""
    if fault["type"] in ("tuple_type", "list_type"):
        return "must be a list, such as [a, b]"
    if fault["type"] in ("model_type", "dict_type"):
        return "must be a mapping of settings"
    message: str = fault["msg"]
    return message[:1].lower() + message[1:]


def _dotted(field: str, location: tuple[int | str, ...]) -> str:
    path = field
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path


def _nearest_key(model: type[BaseModel] | None, location: tuple[int | str, ...]) -> str:
    known = _known_keys(model, location[:-1])
    if not known:
        return ""
    near = difflib.get_close_matches(str(location[-1]), known, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; the known keys are {', '.join(known)}"


def _known_keys(model: type[BaseModel] | None, location: tuple[int | str, ...]) -> list[str]:
    for setting in _settings(model, location):
        model = _nested_model(setting.annotation)
    return [] if model is None else list(model.model_fields)


def _settings(
    model: type[BaseModel] | None, location: tuple[int | str, ...]
) -> Iterator[FieldInfo]:
    """What a location leads through, outermost first; indices and names of entries are skipped."""
    is_entry = False
    for part in location:
        if is_entry or isinstance(part, int):
            is_entry = False
            continue
        setting = None if model is None else model.model_fields.get(part)
        if setting is None:
            return
        yield setting
        is_entry = get_origin(setting.annotation) is dict
        model = _nested_model(setting.annotation)


def _nested_model(annotation: Any) -> type[BaseModel] | None:
    """The model that a field's type holds: itself, or inside tuple[...], dict[...] or `| None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _nested_model(argument)
        if found is not None:
            return found
    return None
