"""What pydantic finds wrong with a configuration, as a `ConfigError` with the field's name.

Pure. An unknown key is answered with the nearest known one; values of secret settings are not told.
"""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from modelpool.errors import ConfigError


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
