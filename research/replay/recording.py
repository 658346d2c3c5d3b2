"""Recordings: facts in their order, and what they are of. One compact file each.

Format: `numpy.savez` under LZMA; one array for each field of each kind of fact, numbers split into
planes of their bytes, which packs better. `header` is a JSON document.
"""

import io
import itertools
import json
import lzma
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from research.replay.facts import SCHEMA, Fact

FOLDER = Path(__file__).parent / "recordings"
SUFFIX = ".npz.xz"
_KINDS = tuple(SCHEMA)


@dataclass(frozen=True)
class Phase:
    """A part of a run. `chain`: of a policy that does not choose; `batch` None: it varies."""

    policy: str
    chain: tuple[str, ...] | None = None
    batch: int | None = None
    kind: str = "mixed"  # of text


@dataclass(frozen=True)
class Round:
    """What a phase with a fixed chain has measured."""

    phase: int
    tokens: int
    ms: float


@dataclass(kw_only=True)
class Recording:
    """`about`: names and parameters of the models, the target, the command, and where it ran.

    `schedulers`: settings of each that was asked; see `research.replay.adapter`.
    """

    name: str
    about: dict[str, Any] = field(default_factory=dict)
    schedulers: list[dict[str, Any]] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)

    @property
    def decisions(self) -> int:
        return sum(fact.kind == "decision" for fact in self.facts)

    @classmethod
    def load(cls, path: Path) -> "Recording":
        with np.load(io.BytesIO(lzma.decompress(path.read_bytes())), allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        header = json.loads(arrays.pop("header").tobytes())
        order = arrays.pop("order").tolist()
        plain = dict(_joined(name, array) for name, array in arrays.items())
        facts = {kind: iter(_facts(kind, plain)) for kind in SCHEMA}
        phases = [
            Phase(**{**each, "chain": each["chain"] and tuple(each["chain"])})
            for each in header["phases"]
        ]
        return cls(
            name=path.name.removesuffix(SUFFIX),
            about=header["about"],
            schedulers=header["schedulers"],
            phases=phases,
            rounds=[Round(**each) for each in header["rounds"]],
            facts=[next(facts[_KINDS[index]]) for index in order],
        )


def _facts(kind: str, arrays: Mapping[str, NDArray[Any]]) -> Iterable[Fact]:
    """Endless for a kind that has no fields."""
    if not SCHEMA[kind]:
        return itertools.repeat(Fact(kind, {}))
    fields: dict[str, list[Any]] = {}
    for name, column in SCHEMA[kind].items():
        prefix = f"{kind}.{name}"
        parts = {
            key.removeprefix(prefix): array
            for key, array in arrays.items()
            if key == prefix or key.startswith(f"{prefix}.")
        }
        if not parts:
            return []
        fields[name] = column(parts)
    return [
        Fact(kind, dict(zip(fields, values, strict=True)))
        for values in zip(*fields.values(), strict=True)
    ]


def _joined(name: str, planes: NDArray[Any]) -> tuple[str, NDArray[Any]]:
    plain, _, dtype = name.rpartition(":")
    together = np.ascontiguousarray(np.moveaxis(planes, 0, -1))
    return plain, together.view(dtype).reshape(together.shape[:-1])
