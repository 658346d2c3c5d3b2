"""What a recording is made of: facts of a run, as numbers, names and small arrays.

Facts were rounded before the recorded engine learnt them: what the file holds is exactly what that
engine knew, so whoever learns it again decides from the same knowledge to the last bit.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Parts = Mapping[str, NDArray[Any]]  # of one field's stored arrays


@dataclass(frozen=True, eq=False)
class Fact:
    """One thing that was told, or asked; `SCHEMA` says what each kind holds."""

    kind: str
    values: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


def number(parts: Parts) -> list[Any]:
    return list(parts[""].tolist())


def name(parts: Parts) -> list[Any]:
    """Any JSON value of which there are few: each is stored once."""
    names = json.loads(parts[".names"].tobytes())
    return [names[index] for index in parts[""].tolist()]


def array(parts: Parts) -> list[NDArray[Any]]:
    """Of various lengths."""
    wide = {"f": np.float64, "i": np.int64, "u": np.int64, "b": np.bool_}
    values: NDArray[Any] = parts[""].astype(wide[parts[""].dtype.kind])
    shapes = parts[".shapes"].astype(np.int64)
    pieces = np.split(values, np.cumsum(shapes.prod(axis=1))[:-1]) if len(shapes) else []
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes.tolist(), strict=True)]


_STEPS = 32  # of a logarithm: probabilities to about 1.6%
_NONE = 2**16 - 1


def log_probs(parts: Parts) -> list[NDArray[Any]]:
    """Logarithms of probabilities in steps; -inf, which is padding, stays."""
    stored = array(parts)
    return [np.where(one == _NONE, -np.inf, one / -float(_STEPS)) for one in stored]


Column = Callable[[Parts], list[Any]]  # how the values of a field are read

_ROUTE: dict[str, Column] = {
    "chain": name,
    "depth": number,
    "width": number,
    "nodes": number,  # 0: whole trees
    "rounds": number,
}
SCHEMA: Mapping[str, Mapping[str, Column]] = {
    # A model's curve as it is known when it is loaded, as `TimeEstimator.to_json` says it.
    "curve": {"model": name, "times": name},
    "begin": {},  # of a cycle
    "forward": {
        "model": name,
        "tokens": number,
        "attended": number,  # pairs of query and slot
        "ms": number,  # the mean of `times` forwards
        "times": number,
    },
    # The engine's own work around forwards, `times` times in `ms`.
    "stage": {"stage": name, "places": number, "ms": number, "times": number},
    # The end of a cycle; `stage` is null where its own time says nothing.
    "cycle": {"ms": number, "committed": number, "requests": number, "stage": name},
    "similarity": {"pair": name, "variation": number},  # total variation
    # Drafted trees [B, n] and what their verifier said. `key`: proposers, inner rounds, verifier,
    # whether tokens are sampled. `exact`: the only shape that is taught, or null.
    "trees": {
        "key": name,
        "exact": name,
        "width": number,
        "heights": array,
        "parents": array,
        "depths": array,
        "log_probs": log_probs,
        "judged": array,
        "accepted": array,
    },
    # What proposers would have drafted along committed text, [n, w].
    "choices": {"key": name, "stated": array, "accepted": array},
    # A cycle of a chain against what was predicted of it when it was recorded.
    "outcome": {
        "chain": name,
        "requests": number,
        "predicted_ms": number,
        "ms": number,
        "expected": number,  # tokens beyond the target's own
        "committed": number,
        "sampled": number,
    },
    "probe": {"ms": number},  # what exploration has cost
    # What is known at this point is looked at: decisions name the view that they are made from,
    # counted from 0.
    "view": {},
    # A question to the scheduler and the recorded answer. `asked`: depth, width and inner rounds
    # that requests ask for; `first`: nothing was in use for these before. `who`: index into the
    # recording's schedulers; `phase`: into its phases.
    "decision": {
        "view": number,
        "who": number,
        "phase": number,
        "asked": name,
        "first": number,
        "requests": number,
        "slots": number,
        "remaining": number,
        "lagging": name,
        "lags": array,
        "sampled": number,
        "others": number,
        "available": name,
        "held": name,
        "wanted": name,
        **_ROUTE,
        "reason": name,
    },
}
