"""Reader for a configuration's YAML file, which neither drops nor reinterprets any of its text.

Contract: safe, like `yaml.safe_load`. A duplicate key of a mapping is an error, where PyYAML would
keep the last one; keys from a merge (`<<`) may be overridden. Dates stay text: no setting is a
date, and a revision may look like one.
"""

from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from modelpool.errors import ConfigError
from specrouter.scenarios import scenario_names

_MERGE = "tag:yaml.org,2002:merge"
_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_MOST_BYTES = 2**22
# Files given as a scenario by mistake, and what to give instead.
_OTHER_KINDS = {
    ".gguf": "is a GGUF file, and no YAML file: a model is given as TARGET",
    ".safetensors": "holds weights, and is no YAML file: give the folder of the checkpoint",
}


def read_mapping(file: str | Path) -> dict[Any, Any]:
    """Return the file's top-level mapping. Raises `ConfigError` for `config`, with the file."""
    _check_kind(Path(file))
    try:
        found = yaml.load(Path(file).read_text(encoding="utf-8"), Loader=_Loader)
    except FileNotFoundError as error:
        names = ", ".join(scenario_names())
        reason = f"cannot read {file}: {error.strerror}; the bundled scenarios are {names}"
        raise ConfigError("config", reason) from error
    except OSError as error:
        raise ConfigError("config", f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError("config", f"{file} is not UTF-8 text: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError("config", f"{file} is not YAML: {error}") from error
    except RecursionError as error:
        raise ConfigError("config", f"{file} is nested too deeply") from error
    if not isinstance(found, dict):
        raise ConfigError("config", f"{file} holds no mapping at its top level")
    return found


def _check_kind(file: Path) -> None:
    """Refuse files of weights before they are read: they may have gigabytes."""
    instead = _OTHER_KINDS.get(file.suffix.lower())
    if file.is_file() and instead is not None:
        raise ConfigError("config", f"{file} {instead}")
    if file.is_file() and file.stat().st_size > _MOST_BYTES:
        size = f"{file.stat().st_size / 1e6:.1f} MB"
        raise ConfigError("config", f"{file} has {size}, and is no YAML file of a scenario")


def read_value(text: str, field: str) -> Any:
    """Return a single value, such as `[a, b]`. Raises `ConfigError` for `field`."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(field, f"{text!r} is not YAML") from error


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Refuse duplicate keys; merges are not resolved yet, so all keys are the mapping's own."""
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            line, name = key.start_mark.line + 1, (key.tag, key.value)
            if name in lines:
                reason = f"line {line} has the key {key.value!r}, and so has line {lines[name]}"
                raise ConstructorError(None, None, reason)
            lines[name] = line
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Turn Python's own errors, which PyYAML lets through, into errors of the file.

        They come from text that only begins like a number, for example.
        """
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:
            kind, line = node.tag.rpartition(":")[2], node.start_mark.line + 1
            raise ConstructorError(None, None, f"line {line} has no {kind} there") from error


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
