"""Faults that pydantic finds in a configuration, as `ConfigError` with the field's name.

Pure. For an unknown key the nearest known one is suggested; values of secret settings are not
shown.
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
    """Return the first fault of a pydantic error, under its dotted path below `field`.

    `model`, the validated class, gives the nearest known key for an unknown one, and the settings
    whose values are secret.
    """
    # Unknown keys come first: a misspelt key is often the reason why a required one is missing.
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
    if given is None:  # in YAML, a key without a value
        is_required = bool(settings) and settings[-1].is_required()
        remedy = "this setting is required" if is_required else "fill it in, or remove it"
        return ConfigError(path, f"is empty; {remedy}")
    is_secret = any(not setting.repr for setting in settings)
    return ConfigError(path, _reason(fault) + ("" if is_secret else f" (got {given!r})"))


def _reason(fault: Mapping[str, Any]) -> str:
    """Return the message of a fault, in terms of YAML where pydantic uses those of Python."""
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
    """Yield the settings on the way to a location, outermost first, without indices and entries."""
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
    """Return the model in a field's type: itself, or in tuple[...], dict[...] or `| None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _nested_model(argument)
        if found is not None:
            return found
    return None
