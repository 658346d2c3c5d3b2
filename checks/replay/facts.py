"""What a recording is made of: facts of a run, as numbers, names and small arrays.

Facts are rounded before the recorded engine learns them: what the file holds is exactly what that
engine knew, so whoever learns it again decides from the same knowledge to the last bit.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Fact:
    """One thing that was told, or asked; `SCHEMA` says what each kind holds."""

    kind: str
    values: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


class Column(Protocol):
    """How the values of a field are rounded and stored."""

    def rounded(self, value: Any) -> Any: ...
    def pack(self, values: Sequence[Any]) -> Arrays: ...
    def unpack(self, arrays: Mapping[str, NDArray[Any]]) -> list[Any]: ...


@dataclass(frozen=True)
class Number:
    dtype: str

    def rounded(self, value: Any) -> Any:
        kind = np.dtype(self.dtype)
        if kind.kind == "f":
            most = float(np.finfo(kind).max)
            return kind.type(min(max(float(value), -most), most)).item()
        assert kind.kind == "b" or 0 <= int(value) <= np.iinfo(kind).max, value
        return kind.type(value).item()

    def pack(self, values: Sequence[Any]) -> Arrays:
        return {"": np.array(values, dtype=self.dtype)}

    def unpack(self, arrays: Mapping[str, NDArray[Any]]) -> list[Any]:
        return list(arrays[""].tolist())


class Name:
    """Any JSON value of which there are few: each is stored once."""

    def rounded(self, value: Any) -> Any:
        return json.loads(json.dumps(value))

    def pack(self, values: Sequence[Any]) -> Arrays:
        texts = [json.dumps(value) for value in values]
        known = {text: index for index, text in enumerate(dict.fromkeys(texts))}
        table = f"[{','.join(known)}]".encode()
        return {
            "": np.array([known[text] for text in texts], dtype="u2"),
            ".names": np.frombuffer(table, dtype="u1"),
        }

    def unpack(self, arrays: Mapping[str, NDArray[Any]]) -> list[Any]:
        names = json.loads(arrays[".names"].tobytes())
        return [names[index] for index in arrays[""].tolist()]


@dataclass(frozen=True)
class Array:
    """Arrays of `ndim` dimensions and various lengths."""

    dtype: str
    ndim: int = 1

    def rounded(self, value: Any) -> NDArray[Any]:
        return self._back(self._stored(np.asarray(value)))

    def pack(self, values: Sequence[Any]) -> Arrays:
        arrays = [np.asarray(value) for value in values]
        flat = [self._stored(array).ravel() for array in arrays]
        shapes = np.array([array.shape for array in arrays], dtype="u2")
        empty = np.zeros(0, dtype=self.dtype)
        return {
            "": np.concatenate([empty, *flat]),
            ".shapes": shapes.reshape(len(arrays), self.ndim),
        }

    def unpack(self, arrays: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        shapes = arrays[".shapes"].astype(np.int64)
        ends = np.cumsum(shapes.prod(axis=1)).tolist()
        starts = [0, *ends[:-1]]
        return [
            self._back(arrays[""][start:end]).reshape(shape)
            for start, end, shape in zip(starts, ends, shapes.tolist(), strict=True)
        ]

    def _stored(self, values: NDArray[Any]) -> NDArray[Any]:
        return values.astype(self.dtype)

    def _back(self, stored: NDArray[Any]) -> NDArray[Any]:
        wide = {"f": np.float64, "i": np.int64, "u": np.int64, "b": np.bool_}
        return stored.astype(wide[stored.dtype.kind])


_STEPS = 32  # of a logarithm: probabilities to about 1.6%
_NONE = 2**16 - 1


@dataclass(frozen=True)
class LogProbs(Array):
    """Logarithms of probabilities in steps; -inf, which is padding, stays."""

    dtype: str = "u2"
    ndim: int = 2

    def _stored(self, values: NDArray[Any]) -> NDArray[Any]:
        steps = np.rint(-_STEPS * np.where(np.isfinite(values), values, 0.0)).clip(0, _NONE - 1)
        return np.where(np.isfinite(values), steps, _NONE).astype(self.dtype)

    def _back(self, stored: NDArray[Any]) -> NDArray[Any]:
        return np.where(stored == _NONE, -np.inf, stored / -float(_STEPS))


_ROUTE: dict[str, Column] = {
    "chain": Name(),
    "depth": Number("u1"),
    "width": Number("u1"),
    "nodes": Number("u2"),  # 0: whole trees
    "rounds": Number("u1"),
}
SCHEMA: Mapping[str, Mapping[str, Column]] = {
    # A model's curve as it is known when it is loaded, as `TimeEstimator.to_json` says it.
    "curve": {"model": Name(), "times": Name()},
    "begin": {},  # of a cycle
    "forward": {
        "model": Name(),
        "tokens": Number("u4"),
        "attended": Number("f4"),  # pairs of query and slot
        "ms": Number("f2"),  # the mean of `times` forwards
        "times": Number("u1"),
    },
    # The engine's own work around forwards, `times` times in `ms`.
    "stage": {"stage": Name(), "places": Number("u4"), "ms": Number("f2"), "times": Number("u1")},
    # The end of a cycle; `stage` is null where its own time says nothing.
    "cycle": {
        "ms": Number("f2"),
        "committed": Number("u2"),
        "requests": Number("u2"),
        "stage": Name(),
    },
    "similarity": {"pair": Name(), "variation": Number("f2")},  # total variation
    # Drafted trees [B, n] and what their verifier said. `key`: proposers, inner rounds, verifier,
    # whether tokens are sampled. `exact`: the only shape that is taught, or null.
    "trees": {
        "key": Name(),
        "exact": Name(),
        "width": Number("u1"),
        "heights": Array("u1"),
        "parents": Array("i1", 2),
        "depths": Array("u1", 2),
        "log_probs": LogProbs(),
        "judged": Array("?", 2),
        "accepted": Array("?", 2),
    },
    # What proposers would have drafted along committed text, [n, w].
    "choices": {"key": Name(), "stated": Array("f2", 2), "accepted": Array("?", 2)},
    # A cycle of a chain against what was predicted of it when it was recorded.
    "outcome": {
        "chain": Name(),
        "requests": Number("u2"),
        "predicted_ms": Number("f4"),
        "ms": Number("f2"),
        "expected": Number("f4"),  # tokens beyond the target's own
        "committed": Number("u2"),
        "sampled": Number("?"),
    },
    "probe": {"ms": Number("f2")},  # what exploration has cost
    # What is known at this point is looked at: decisions name the view that they are made from,
    # counted from 0.
    "view": {},
    # A question to the scheduler and the recorded answer. `asked`: depth, width and inner rounds
    # that requests ask for; `first`: nothing was in use for these before. `who`: index into the
    # recording's schedulers; `phase`: into its phases.
    "decision": {
        "view": Number("u4"),
        "who": Number("u1"),
        "phase": Number("u2"),
        "asked": Name(),
        "first": Number("?"),
        "requests": Number("u2"),
        "slots": Number("u2"),
        "remaining": Number("f4"),
        "lagging": Name(),
        "lags": Array("f4"),
        "sampled": Number("?"),
        "others": Number("u2"),
        "available": Name(),
        "held": Name(),
        "wanted": Name(),
        **_ROUTE,
        "reason": Name(),
    },
}


def rounded(kind: str, **values: Any) -> Fact:
    """A fact as the file will hold it."""
    columns = SCHEMA[kind]
    assert values.keys() == columns.keys(), (kind, values.keys() ^ columns.keys())
    return Fact(kind, {name: columns[name].rounded(value) for name, value in values.items()})
