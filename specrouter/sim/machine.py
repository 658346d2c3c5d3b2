"""A machine for simulations: tables of forward times, from a file or from a loaded pool."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pydantic import Field, ValidationError, field_validator

from modelpool.errors import ConfigError
from specrouter.config.strict import Strict
from specrouter.config.yaml_file import read_mapping
from specrouter.profile.time_curve import TimeCurve
from specrouter.request.params import Chain


@dataclass(frozen=True)
class Machine:
    """What a simulation knows of models and memory.

    Attributes:
        times: of the drafter and the target, by name.
        prefill_chunk: prompt tokens that are read in a cycle.
        slots: KV slots that attention reads for a request.
    """

    drafter: str
    target: str
    times: Mapping[str, TimeCurve]
    parameters: Mapping[str, int]
    prefill_chunk: int
    max_requests: int
    slots: int = 128

    @property
    def chain(self) -> Chain:
        return self.drafter, self.target


class _Model(Strict):
    """`points`: tokens of a forward, rising, and its milliseconds, not falling."""

    name: str
    parameters: int = Field(ge=1)
    points: tuple[tuple[float, float], ...] = Field(min_length=1)
    slope_ms_per_million: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @field_validator("points")
    @classmethod
    def _rise(cls, points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        if not all(tokens >= 1 and 0 < ms < float("inf") for tokens, ms in points):
            raise ValueError("tokens must be at least 1, and milliseconds above 0")
        if not all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(points)):
            raise ValueError("tokens must rise, and milliseconds must not fall")
        return points


class _MachineFile(Strict):
    drafter: _Model
    target: _Model
    prefill_chunk: int = Field(ge=1)
    max_requests: int = Field(ge=1)
    slots: int = Field(default=128, ge=1)


def load_machine(file: Path) -> Machine:
    """Raises `ConfigError` for `--machine`, with the field that is wrong."""
    try:
        found = _MachineFile.model_validate(read_mapping(file))
    except ConfigError as error:
        raise ConfigError("--machine", str(error)) from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise ConfigError("--machine", f"{file}: {field}: {first['msg']}") from error
    if found.drafter.name == found.target.name:
        raise ConfigError("--machine", f"{file}: target.name: is the drafter's too")
    models = (found.drafter, found.target)
    return Machine(
        found.drafter.name,
        found.target.name,
        {one.name: TimeCurve(one.points, one.slope_ms_per_million) for one in models},
        {one.name: one.parameters for one in models},
        found.prefill_chunk,
        found.max_requests,
        found.slots,
    )
