"""What `serve` and `check` are given: a scenario, or a model with its drafters, and settings.

Contract: whatever is given becomes one strict `RouterConfig`, as a file would. A setting that is
wrong, also one that only the models' files show to be wrong, is an error of the argument that it
came from.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrouter.cli.arguments import default_config
from specrouter.scenarios import find_scenario, scenario_names

if TYPE_CHECKING:
    from specrouter.config import RouterConfig

# Arguments that are settings, by where they stand in the configuration.
_SETTINGS = {
    "max_model_len": "engine.max_model_len",
    "max_requests": "engine.max_requests",
    "fresh_times": "engine.fresh_times",
    "host": "server.host",
    "port": "server.port",
    "log_format": "server.log_format",
}
_SCHEMES = ("bundled:", "path:", "gguf:", "hub:", "quantised:")
_TWIN = "quantised"  # of the target, whatever that is called
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_PATH_PART = re.compile(r"[^.\[\]]+|\[\d+\]")
_DRAFT_WITHOUT_MODEL = "goes with a model: a folder, ORG/NAME on the hub, or a bundled model"


@dataclass(frozen=True)
class Asked:
    """`arguments`: by the setting that each of them became."""

    config: RouterConfig
    arguments: Mapping[str, str]


def add_target(parser: argparse.ArgumentParser) -> None:
    """TARGET or `--config`, and what may be said of either."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "target", nargs="?", metavar="TARGET",
        help="a folder with a checkpoint, a GGUF file, ORG/NAME on the hub, a bundled scenario "
        f"({', '.join(scenario_names())}) or model, or a YAML file (default: tiny)",
    )  # fmt: skip
    what.add_argument("--config", metavar="FILE", help="a YAML scenario, or a bundled one's name")
    parser.add_argument(
        "--draft", nargs="+", default=[], metavar="NAME",
        help="drafters for a TARGET that is a model, named like it, or ngram, which has no "
        "weights, or quantised, the target itself in int8 on the CPU (default: ngram)",
    )  # fmt: skip
    parser.add_argument(
        "--max-model-len", type=int, metavar="N", help="tokens of a request, prompt and output"
    )
    parser.add_argument(
        "--max-requests", type=int, metavar="N", help="requests that run at the same time"
    )
    parser.add_argument(
        "--set", action="append", default=[], dest="settings", metavar="KEY=VALUE",
        help="any setting of docs/configuration.md, such as engine.prefill_chunk=512; may be "
        "given several times",
    )  # fmt: skip


def add_fresh_times(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fresh-times", action="store_true", default=None,
        help="time the models anew instead of using times kept from an earlier start",
    )  # fmt: skip


def read_asked(arguments: argparse.Namespace) -> Asked:
    """The configuration that the arguments ask for. Raises `ConfigError`."""
    from specrouter.config import RouterConfig

    settings, names = _base(arguments)
    for name, path in _SETTINGS.items():
        value = getattr(arguments, name, None)
        if value is not None:
            names[path] = f"--{name.replace('_', '-')}"
            _put(settings, path, value, names[path])
    key = getattr(arguments, "api_key", None)
    if key is not None:
        names["server.api_keys"] = "--api-key"
        _put(settings, "server.api_keys", [key], "--api-key")
    for text in arguments.settings:
        path, value = _setting(text)
        names[path] = f"--set {path}"
        _put(settings, path, value, names[path])
    with naming(names):
        return Asked(RouterConfig.load(settings), names)


def _base(arguments: argparse.Namespace) -> tuple[dict[Any, Any], dict[str, str]]:
    """The settings of a file or of a pool, and the arguments that they came from."""
    from modelpool.errors import ConfigError
    from specrouter.config.yaml_file import read_mapping

    target = arguments.target
    if target is not None and not _is_scenario(target):
        return _pool(target, arguments.draft)
    if arguments.draft:
        raise ConfigError("--draft", _DRAFT_WITHOUT_MODEL)
    given = target or arguments.config
    return read_mapping(default_config() if given is None else find_scenario(given)), {}


def _is_scenario(target: str) -> bool:
    path = Path(target).expanduser()
    if path.suffix == ".gguf":
        return False
    is_named = target in scenario_names() or path.suffix in (".yaml", ".yml")
    return path.is_file() or (is_named and not path.is_dir())


def _pool(target: str, drafters: list[str]) -> tuple[dict[Any, Any], dict[str, str]]:
    """A pool of the target, the first of its models, and its drafters."""
    from modelpool.config import NGRAM, QUANTISED

    if not drafters and target != NGRAM:
        drafters = [NGRAM]  # costs nothing, and the router uses it where it pays
    models = list[dict[str, Any]]()
    arguments = {"pool.target": "TARGET"}
    for number, given in enumerate([target, *drafters]):
        argument = f"--draft {given}" if number else "TARGET"
        is_twin = number > 0 and given == _TWIN
        source = QUANTISED + models[0]["name"] if is_twin else _source(given, argument)
        name = _name(source, [model["name"] for model in models])
        models.append({"name": name, "source": source})
        arguments[f"pool.models[{number}]"] = argument
    return {"pool": {"target": models[0]["name"], "models": models}}, arguments


def _source(given: str, argument: str) -> str:
    """As a pool's `source` has it. Raises `ConfigError` for what is none."""
    from modelpool.checkpoint.bundled import bundled_names
    from modelpool.config import TEXT_SOURCES
    from modelpool.errors import ConfigError

    if given in TEXT_SOURCES or given.startswith(_SCHEMES):
        return given
    if given.endswith(".gguf"):
        return f"gguf:{given}"
    if given.startswith(("/", ".", "~")) or Path(given).is_dir():
        return f"path:{given}"
    if given in bundled_names():
        return f"bundled:{given}"
    if _REPOSITORY.fullmatch(given):
        return f"hub:{given}"
    raise ConfigError(
        argument,
        f"{given!r} is no folder, no ORG/NAME on the hub, and nothing bundled; bundled are the "
        f"scenarios {', '.join(scenario_names())} and the models {', '.join(bundled_names())}",
    )


def _name(source: str, taken: list[str]) -> str:
    """The hub's own, or the folder's; another one where it is taken."""
    scheme, separator, rest = source.partition(":")
    name = rest if separator else scheme
    if scheme == "gguf":
        name = Path(rest).stem
    elif scheme == "path":
        name = Path(rest).expanduser().resolve().name
    elif scheme == _TWIN:
        name = f"{rest}-int8"
    name = re.sub(r"[\s>,]+", "-", name) or "model"
    number = 2
    unique = name
    while unique in taken:
        unique, number = f"{name}-{number}", number + 1
    return unique


def _setting(text: str) -> tuple[str, Any]:
    """`KEY=VALUE`, the value as YAML has it."""
    from modelpool.errors import ConfigError
    from specrouter.config.yaml_file import read_value

    path, separator, value = text.partition("=")
    if not separator or not path.strip():
        raise ConfigError("--set", f"{text!r} is not KEY=VALUE, such as engine.max_requests=8")
    return path.strip(), read_value(value, f"--set {path.strip()}")


def _put(settings: dict[Any, Any], path: str, value: Any, argument: str) -> None:
    """Sets `pool.models[0].dtype`, say. A section that is not there comes into being."""
    from modelpool.errors import ConfigError

    place: Any = settings
    *sections, last = _PATH_PART.findall(path) or [path]
    for part in sections:
        if part.startswith("["):
            number = int(part[1:-1])
            if not isinstance(place, list) or number >= len(place):
                raise ConfigError(argument, f"there is no {part} there")
            place = place[number]
            continue
        if not isinstance(place, dict):
            raise ConfigError(argument, f"{part!r} cannot stand there")
        if place.get(part) is None:
            place[part] = {}
        place = place[part]
    if not isinstance(place, dict) or last.startswith("["):
        raise ConfigError(argument, "cannot be set: it is no key of a section")
    place[last] = value


@contextmanager
def naming(arguments: Mapping[str, str]) -> Iterator[None]:
    """Within it, a `ConfigError` of a setting names the argument that it came from."""
    from modelpool.errors import ConfigError

    try:
        yield
    except ConfigError as error:
        matches = [
            path for path in arguments if re.match(rf"{re.escape(path)}($|[.\[])", error.field)
        ]
        if not matches:
            raise
        raise type(error)(arguments[max(matches, key=len)], error.reason) from error
