"""What is served: a scenario, or a model with its drafters, and settings of either.

Contract: whatever is given becomes one strict `RouterConfig`, as a file would. The command line and
`LLM` have the same options, by one table, and each its own spelling of them. A setting that is
wrong, also one that only the models' files show to be wrong, is an error of the argument that it
came from. Imports nothing that takes long before something is read.
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
AUTO = "auto"  # what `specrouter pairs` finds
_TWIN = "quantised"  # of the target, whatever that is called
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
_PATH_PART = re.compile(r"[^.\[\]]+|\[\d+\]")
_DRAFT_WITHOUT_MODEL = (
    "goes with a model, a folder, ORG/NAME on the hub, or a bundled one, which is named before it"
)


@dataclass(frozen=True, kw_only=True)
class Option:
    """A setting with a name of its own: `max_model_len` of `LLM`, `--max-model-len`.

    `kind`: of its value; a `bool` is a flag.
    """

    name: str
    setting: str
    kind: type
    described: str
    metavar: str | None = None


FRESH_TIMES = Option(
    name="fresh_times",
    setting="engine.fresh_times",
    kind=bool,
    described="time the models anew instead of using times kept from an earlier start",
)
OPTIONS = (
    Option(
        name="max_model_len",
        setting="engine.max_model_len",
        kind=int,
        metavar="N",
        described="tokens of a request, prompt and output",
    ),
    Option(
        name="max_requests",
        setting="engine.max_requests",
        kind=int,
        metavar="N",
        described="requests that run at the same time",
    ),
    Option(
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
    """
    Attributes:
        target: a scenario or its file, or a model; None: the bundled scenario.
        draft: drafters for a target that is a model.
        options: by the setting that each becomes, its name and its value.
        settings: any others, by their paths.
        spelled: how an argument is called, in errors.
    """

    target: str | None = None
    draft: Sequence[str] = ()
    options: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    settings: Sequence[tuple[str, Any]] = ()
    spelled: Callable[[str], str] = str


@dataclass(frozen=True)
class Asked:
    """`arguments`: by the setting that each of them became."""

    config: RouterConfig
    arguments: Mapping[str, str]

    def check_sources(self) -> None:
        """What is not there, or of another kind, is told before PyTorch is imported.

        Raises `ConfigError`, which names the argument.
        """
        from modelpool.source_check import check_sources

        cluster = self.config.cluster
        if cluster is None or cluster.address == "local":  # else files lie on other machines
            with naming(self.arguments):
                check_sources(self.config.pool)


def asked_of(given: Given) -> Asked:
    """The configuration that is asked for. Raises `ConfigError`."""
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
        return Asked(RouterConfig.load(settings), names)


def _base(given: Given) -> tuple[dict[Any, Any], dict[str, str]]:
    """The settings of a file or of a pool, and the arguments that they came from."""
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
    """A pool of the target, the first of its models, and its drafters."""
    from modelpool.config import NGRAM, QUANTISED

    if not drafters and target != NGRAM:
        drafters = [NGRAM]  # costs nothing, and the router uses it where it pays
    if AUTO in drafters:
        found = _found(checked_source(target, spelled("target")), spelled("target"))
        drafters = list(dict.fromkeys(found if one == AUTO else one for one in drafters))
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
    """A drafter on this machine, or the one without weights."""
    from modelpool.config import NGRAM
    from modelpool.drafters import candidates, find_target, picked
    from specrouter.progress import Progress, ShownLoad

    with Progress() as progress:  # gigabytes may have to be downloaded
        taken = picked(candidates(find_target(target, argument, ShownLoad(progress))))
    return NGRAM if taken is None else taken.source


def checked_source(given: str, argument: str, may_fetch: bool = True) -> str:
    """`source_of`, of a model that is there as far as can be told before PyTorch is imported.

    Of a repository that the local cache does not have the hub is asked if one `may_fetch`.
    Raises `ConfigError`.
    """
    from modelpool.source_check import check_source

    source = source_of(given, argument)
    if may_fetch or not source.startswith("hub:"):
        with naming({"target": argument}):
            check_source(source, field="target")
    return source


def source_of(given: str, argument: str) -> str:
    """As a pool's `source` has it. Raises `ConfigError` for what is none."""
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
    raise ConfigError(
        argument,
        f"{given!r} is no folder, no ORG/NAME on the hub, and nothing bundled; bundled are the "
        f"scenarios {', '.join(scenario_names())} and the models {', '.join(bundled_names())}",
    )


def names_model(given: str) -> bool:
    """Is it a model or a scenario, rather than a text?"""
    from modelpool.checkpoint.bundled import bundled_names

    if given in (*scenario_names(), *bundled_names()) or given.endswith(".gguf"):
        return True
    is_tagged = ":" in given and _REPOSITORY.fullmatch(given) is not None
    return is_tagged or os.path.exists(os.path.expanduser(given))  # False for a long text


def _name(source: str, taken: list[str]) -> str:
    """The hub's own, or the folder's; another one where it is taken."""
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
