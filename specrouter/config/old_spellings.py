"""Keys and values of earlier versions, which are still accepted.

Contract: pure. Unknown keys and values stay as they are, for validation to check.
"""

from collections.abc import Mapping
from typing import Any

_ADASERVE = "AdaServe's trees are research.policies.adaserve:AdaServe, which has such attributes"
_TREE_KEYS = (
    *("shape", "n_max_share", "latency_margin", "root_credit", "order"),
    *("max_depth", "min_depth", "max_width", "drafter_tokens", "c1", "c2"),
)

# Path of a key -> advice or replacement.
_WITHOUT_EFFECT: Mapping[tuple[str, ...], str] = {
    ("scheduler", "inner_rounds"): "an intermediate model judges each draft once",
    ("scheduler", "groups"): "requests that decode together share one chain",
    **{("trees", key): _ADASERVE for key in _TREE_KEYS},
    ("cluster", "resume", "endangered"): "only replicas that are lost or emptied are left",
    ("engine", "overlap_drafting"): "drafters draft before the target verifies, on any devices",
    ("engine", "verification"): "shared noise follows the target's distribution, for every chain",
    ("slo",): "the implied TTFT is fixed; give a request or its class a ttft_ms for another one",
    ("cluster", "routing", "weights"): "FlowGuard scores by the published weights",
    ("cluster", "routing", "overload"): "FlowGuard leaves replicas out by the published bound",
    ("cluster", "routing", "stale_s"): "replicas are not chosen after cluster.resume.silence_s",
    ("cluster", "routing", "hops"): "four replicas are asked whether they attain an objective",
    ("engine", "output_store_file"): "earlier outputs are quoted until the service ends",
    ("cluster", "transport"): "keys and values of a pair move through Ray's object store",
}
# Path of a key -> old value -> new value.
_RENAMED_VALUES: Mapping[tuple[str, ...], Mapping[str, str]] = {
    ("scheduler", "policy"): {
        "ssd-tuned": "static",
        "ssd-smallest": "smallest",
        "paper": "research.policies:PAPER",
        "specustream": "research.policies:SPECUSTREAM",
        "specustream-fixed": "research.policies:SPECUSTREAM_FIXED",
    },
    ("trees", "selection"): {
        "costmodel": "goodput",
        "slo": "research.policies:ADASERVE",
        "slo-phase": "research.policies:ADASERVE_SLO_PHASE",
        "equal-greedy": "research.policies:EQUAL_GREEDY",
    },
    ("pool", "attention"): {"sdpa": "path"},
    ("engine", "admission"): {"slos-serve": "research.policies:SLOS_SERVE"},
    ("cluster", "routing", "policy"): {
        "flowguard-printed": "research.policies:FLOWGUARD_PRINTED",
    },
}


def in_new_spelling(settings: Mapping[Any, Any]) -> tuple[dict[Any, Any], tuple[str, ...]]:
    """Return the settings as this version spells them, and a line for each old spelling.

    A line names the key and its replacement.
    """
    result, lines = dict(settings), []
    for path, instead in _WITHOUT_EFFECT.items():
        section = _value_at(result, path[:-1])
        if isinstance(section, Mapping) and path[-1] in section:
            left = {name: value for name, value in section.items() if name != path[-1]}
            result = _with_value(result, path[:-1], left) if path[:-1] else left
            lines.append(f"{'.'.join(path)} has no effect any more, remove it: {instead}")
    for path, names in _RENAMED_VALUES.items():
        old = _value_at(result, path)
        if isinstance(old, str) and old in names:
            result = _with_value(result, path, names[old])
            lines.append(f"{'.'.join(path)}: {old} is now called {names[old]}")
    return result, tuple(lines)


def _value_at(settings: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        settings = settings.get(key) if isinstance(settings, Mapping) else None
    return settings


def _with_value(settings: Mapping[Any, Any], path: tuple[str, ...], value: Any) -> dict[Any, Any]:
    first, *rest = path
    inner = _with_value(settings[first], tuple(rest), value) if rest else value
    return {**settings, first: inner}
