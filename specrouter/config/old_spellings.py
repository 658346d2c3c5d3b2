"""Keys and values of earlier versions, which are still read.

Contract: pure. What it does not know is left as it is, for validation to judge.
"""

from collections.abc import Mapping
from typing import Any

# (section, key) -> what to do instead.
_WITHOUT_EFFECT: Mapping[tuple[str, str], str] = {
    ("scheduler", "inner_rounds"): "an intermediate model judges each draft once",
    ("scheduler", "groups"): "requests that decode together share one chain",
}
# (section, key) -> new value by old one.
_RENAMED_VALUES: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("scheduler", "policy"): {"ssd-tuned": "static"},
    ("trees", "selection"): {"costmodel": "goodput"},
    ("trees", "shape"): {"costmodel": "adaptive", "adaserve-v1": "adaserve"},
}


def in_new_spelling(settings: Mapping[Any, Any]) -> tuple[dict[Any, Any], tuple[str, ...]]:
    """The settings as this version spells them, and a line for each old spelling.

    A line names the key, and what replaces it.
    """
    result, lines = dict(settings), []
    for (section, key), instead in _WITHOUT_EFFECT.items():
        given = result.get(section)
        if isinstance(given, Mapping) and key in given:
            result[section] = {name: value for name, value in given.items() if name != key}
            lines.append(f"{section}.{key} has no effect any more, remove it: {instead}")
    for (section, key), names in _RENAMED_VALUES.items():
        given = result.get(section)
        old = given.get(key) if isinstance(given, Mapping) else None
        if isinstance(given, Mapping) and isinstance(old, str) and old in names:
            result[section] = {**given, key: names[old]}
            lines.append(f"{section}.{key}: {old} is now called {names[old]}")
    return result, tuple(lines)
