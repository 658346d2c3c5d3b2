"""Command-line arguments for what to load: those of `specrouter.target`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from specrouter.cli.arguments import default_config
from specrouter.scenarios import scenario_names
from specrouter.target import (
    DEFAULT,
    FRESH_TIMES,
    OPTIONS,
    AskedTarget,
    Given,
    TargetOption,
    asked_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

# Options of the service only, with their settings.
_SERVICE = {"host": "server.host", "port": "server.port", "log_format": "server.log_format"}
_SPELLED = {"target": "TARGET"}


def add_target(parser: argparse.ArgumentParser, default: str = DEFAULT) -> None:
    """Add TARGET or `--config`, and the options of either.

    `default` is the scenario without either.
    """
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "target", nargs="?", metavar="TARGET",
        help="a folder with a checkpoint, a GGUF file, ORG/NAME on the hub, ORG/NAME:QUANT for a "
        "GGUF file there (ORG/NAME:Q4_K_M), a bundled scenario "
        f"({', '.join(scenario_names())}) or model, or a YAML file (default: {default})",
    )  # fmt: skip
    what.add_argument("--config", metavar="FILE", help="a YAML scenario, or a bundled one's name")
    parser.add_argument(
        "--draft", nargs="+", default=[], metavar="NAME",
        help="drafters for a TARGET that is a model, named like it, or quantised, the target "
        "itself in int8 on the CPU, or auto, the one on this machine that `specrouter pairs "
        "TARGET` names; ngram, which has no weights, is added unless it or suffix is named",
    )  # fmt: skip
    for option in OPTIONS:
        _add(parser, option)
    parser.add_argument(
        "--set", action="append", default=[], dest="settings", metavar="KEY=VALUE",
        help="any setting of docs/configuration.md, such as engine.prefill_chunk=512; may be "
        "given several times",
    )  # fmt: skip


def add_fresh_times(parser: argparse.ArgumentParser) -> None:
    _add(parser, FRESH_TIMES)


def read_asked(arguments: argparse.Namespace, default: str = DEFAULT) -> AskedTarget:
    """Return the configuration for the arguments; `default` as in `add_target`.

    Raises `ConfigError`.
    """
    names = _SPELLED if arguments.config is None else {"target": "--config"}
    given = Given(
        target=arguments.target or arguments.config or str(default_config(f"{default}.yaml")),
        draft=arguments.draft,
        options={
            path: (name, value) for name, path, value in _options(arguments) if value is not None
        },
        settings=[_setting(text) for text in arguments.settings],
        spelled=lambda name: names.get(name) or _flag(name),
    )
    return asked_of(given)


def _add(parser: argparse.ArgumentParser, option: TargetOption) -> None:
    flag, described = _flag(option.name), option.described
    if option.kind is bool:
        parser.add_argument(flag, action="store_true", default=None, help=described)
    else:
        parser.add_argument(flag, type=option.kind, metavar=option.metavar, help=described)


def _options(arguments: argparse.Namespace) -> Iterator[tuple[str, str, Any]]:
    """Yield names, the settings that they set, and values."""
    places = {option.name: option.setting for option in OPTIONS} | _SERVICE
    for name, path in places.items():
        yield name, path, getattr(arguments, name, None)
    key = getattr(arguments, "api_key", None)
    yield "api_key", "server.api_keys", None if key is None else [key]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _setting(text: str) -> tuple[str, Any]:
    """Return key and value of `KEY=VALUE`, with the value read as YAML."""
    from modelpool.errors import ConfigError
    from specrouter.config.yaml_file import read_value

    path, separator, value = text.partition("=")
    if not separator or not path.strip():
        raise ConfigError("--set", f"{text!r} is not KEY=VALUE, such as engine.max_requests=8")
    return path.strip(), read_value(value, f"--set {path.strip()}")
