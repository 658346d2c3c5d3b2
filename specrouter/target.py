"""Target of a command: a scenario, or a model with its drafters, and settings for either.

Contract: all arguments become one strict `RouterConfig`, as a file would. The command line and
`LLM` share one table of options, each with its own spelling. An error in a setting names the
argument that set it, also if only the models' files show the error. Slow imports wait until a file
is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrouter.scenarios import find_scenario, scenario_folder, scenario_names

if TYPE_CHECKING:
    from specrouter.config import RouterConfig

DEFAULT = "tiny"
_SCHEMES = ("bundled:", "path:", "gguf:", "hub:", "quantised:", "released:")
AUTO = "auto"  # the drafter that `specrouter pairs` finds
_TWIN = "quantised"  # the target in int8
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
_PATH_PART = re.compile(r"[^.\[\]]+|\[\d+\]")
_DRAFT_WITHOUT_MODEL = (
    "goes with a model, a folder, ORG/NAME on the hub, or a bundled one, which is named before it"
)


@dataclass(frozen=True, kw_only=True)
class TargetOption:
    """A setting with a name of its own: `max_model_len` of `LLM`, `--max-model-len`.

    `kind` is the type of its value; a `bool` is a flag.
    """

    name: str
    setting: str
    kind: type
    described: str
    metavar: str | None = None


FRESH_TIMES = TargetOption(
    name="fresh_times",
    setting="engine.fresh_times",
    kind=bool,
    described="time the models anew instead of using times kept from an earlier start",
)
OPTIONS = (
    TargetOption(
        name="max_model_len",
        setting="engine.max_model_len",
        kind=int,
        metavar="N",
        described="tokens of a request, prompt and output",
    ),
    TargetOption(
        name="max_requests",
        setting="engine.max_requests",
        kind=int,
        metavar="N",
        described="requests that run at the same time",
    ),
    TargetOption(
        name="generation_defaults",
        setting="engine.generation_defaults",
        kind=str,
        metavar="neutral|model",
        described="model: sampling parameters that a request leaves out are those of the "
        "checkpoint's generation_config.json",
    ),
    FRESH_TIMES,
)


@dataclass(frozen=True, kw_only=True)
class Given:
    """The arguments, as the command line or `LLM` took them.

    Attributes:
        target: a scenario or its file, or a model; None: the bundled scenario.
        draft: drafters for a target that is a model.
        options: name and value by the setting that each option sets.
        settings: any other settings, by their paths.
        spelled: how an argument is spelled in error messages.
    """

    target: str | None = None
    draft: Sequence[str] = ()
    options: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    settings: Sequence[tuple[str, Any]] = ()
    spelled: Callable[[str], str] = str


@dataclass(frozen=True)
class AskedTarget:
    """The configuration, and `arguments`: by setting, the argument that set it."""

    config: RouterConfig
    arguments: Mapping[str, str]

    def check_sources(self) -> None:
        """Check that the models' files exist and are of the right kind, before PyTorch is imported.

        Raises `ConfigError`, which names the argument.
        """
        from modelpool.source_check import check_sources

        cluster = self.config.cluster
        if cluster is None or cluster.address == "local":  # else the files are on other machines
            with naming(self.arguments):
                check_sources(self.config.pool)


def asked_of(given: Given) -> AskedTarget:
    """Return the configuration for the given arguments. Raises `ConfigError`."""
    from specrouter.config import RouterConfig

    spelled = given.spelled
    with naming({"config": spelled("target")}):
        settings, names = _base(given)
    each = [(path, spelled(name), value) for path, (name, value) in given.options.items()]
    each += [(path, f"{spelled('set')} {path}", value) for path, value in given.settings]
    for path, argument, value in each:
        names[path] = argument
        _put(settings, path, value, argument)
    with naming(names):
        return AskedTarget(RouterConfig.load(settings), names)


def _base(given: Given) -> tuple[dict[Any, Any], dict[str, str]]:
    """Return the settings of a file or of a pool, and the arguments that they came from."""
    from modelpool.errors import ConfigError
    from specrouter.config.yaml_file import read_mapping

    target = given.target
    if target is not None and not _is_scenario(target):
        return _pool(target, given.draft, given.spelled)
    if given.draft:
        raise ConfigError(given.spelled("draft"), _DRAFT_WITHOUT_MODEL)
    if target is None:
        return read_mapping(scenario_folder() / f"{DEFAULT}.yaml"), {}
    return read_mapping(find_scenario(target)), {}


def _is_scenario(target: str) -> bool:
    from modelpool.checkpoint.cache_dir import expanded

    path = expanded(target)
    if path.suffix == ".gguf":
        return False
    is_named = target in scenario_names() or path.suffix in (".yaml", ".yml")
    return path.is_file() or (is_named and not path.is_dir())


def _pool(
    target: str, drafters: Sequence[str], spelled: Callable[[str], str]
) -> tuple[dict[Any, Any], dict[str, str]]:
    """Return a pool of the target, its first model, and its drafters."""
    from modelpool.config import NGRAM, QUANTISED, TEXT_SOURCES

    if AUTO in drafters:
        found = _found(checked_source(target, spelled("target")), spelled("target"))
        drafters = list(dict.fromkeys(found if one == AUTO else one for one in drafters))
    if not {*TEXT_SOURCES} & {*drafters, target}:
        drafters = [*drafters, NGRAM]  # no model, and used only where it is faster
    models = list[dict[str, Any]]()
    arguments = {"pool.target": spelled("target")}
    for number, given in enumerate([target, *drafters]):
        argument = f"{spelled('draft')} {given}" if number else spelled("target")
        is_twin = number > 0 and given == _TWIN
        source = QUANTISED + models[0]["name"] if is_twin else source_of(given, argument)
        name = _name(source, [model["name"] for model in models])
        models.append({"name": name, "source": source})
        arguments[f"pool.models[{number}]"] = argument
    return {"pool": {"target": models[0]["name"], "models": models}}, arguments


def _found(target: str, argument: str) -> str:
    """Return a drafter on this machine, or `ngram` if there is none."""
    from modelpool.config import NGRAM
    from modelpool.drafters import candidates, find_target, picked
    from specrouter.progress import Progress, ShownLoad

    with Progress() as progress:  # gigabytes may have to be downloaded
        taken = picked(candidates(find_target(target, argument, ShownLoad(progress))))
    return NGRAM if taken is None else taken.source


def checked_source(given: str, argument: str, may_fetch: bool = True) -> str:
    """Return `source_of`, checked as far as possible before PyTorch is imported.

    With `may_fetch`, the hub is asked about a repository that is not in the local cache. Raises
    `ConfigError`.
    """
    from modelpool.source_check import check_source

    source = source_of(given, argument)
    if may_fetch or not source.startswith("hub:"):
        with naming({"target": argument}):
            check_source(source, field="target")
    return source


def source_of(given: str, argument: str) -> str:
    """Return a model's name in the form of a pool's `source`. Raises `ConfigError`."""
    from modelpool.checkpoint.bundled import bundled_names
    from modelpool.config import TEXT_SOURCES
    from modelpool.errors import ConfigError

    if given in TEXT_SOURCES or given.startswith(_SCHEMES):
        return given
    if given.endswith(".gguf"):
        return f"gguf:{given}"
    if given.startswith(("/", ".", "~")) or Path(given).exists():
        return f"path:{given}"
    if given in bundled_names():
        return f"bundled:{given}"
    if _REPOSITORY.fullmatch(given):
        return f"hub:{given}"
    if given in scenario_names():
        raise ConfigError(argument, f"{given!r} is a scenario, and a model is needed here")
    raise ConfigError(
        argument,
        f"{given!r} is no folder, no ORG/NAME on the hub, and nothing bundled; bundled are the "
        f"scenarios {', '.join(scenario_names())} and the models {', '.join(bundled_names())}",
    )


def names_model(given: str) -> bool:
    """Return True if the text names a model or a scenario."""
    from modelpool.checkpoint.bundled import bundled_names

    if given in (*scenario_names(), *bundled_names()) or given.endswith(".gguf"):
        return True
    is_tagged = ":" in given and _REPOSITORY.fullmatch(given) is not None
    return is_tagged or os.path.exists(os.path.expanduser(given))  # False for a long text


def _name(source: str, taken: list[str]) -> str:
    """Return the hub's or the folder's name for the model, made unique among `taken`."""
    from modelpool.checkpoint.cache_dir import cached_name, expanded

    scheme, separator, rest = source.partition(":")
    name = rest if separator else scheme
    if scheme == "gguf":
        name = Path(rest).stem
    elif scheme == "path":
        folder = expanded(rest).resolve()
        name = cached_name(folder) or folder.name
    elif scheme == _TWIN:
        name = f"{rest}-int8"
    name = re.sub(r"[\s>,]+", "-", name) or "model"
    number = 2
    unique = name
    while unique in taken:
        unique, number = f"{name}-{number}", number + 1
    return unique


def _put(settings: dict[Any, Any], path: str, value: Any, argument: str) -> None:
    """Set a key such as `pool.models[0].dtype`; missing sections are created."""
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
    """Make a `ConfigError` of a setting name the argument that set it, within the `with` block."""
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
