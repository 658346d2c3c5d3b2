"""A machine for simulations: times of models, memory, acceptances; from a file or a pool."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from pydantic import Field, ValidationError, field_validator, model_validator

from modelpool.errors import ConfigError
from specrouter.config.strict import Strict
from specrouter.config.yaml_file import read_mapping
from specrouter.profile.snapshot import Pair
from specrouter.profile.time_curve import ForwardTimes, TimeCurve

_ARROW = ">"  # in a file, between who proposes and who verifies


@dataclass(frozen=True)
class Machine:
    """What a simulation knows of models and memory.

    Attributes:
        target: the model whose text it is.
        times: of each model's forwards, by name.
        parameters: of each model.
        prefill_chunk: prompt tokens that the target reads in a cycle, and each drafter of texts.
        max_requests: rows.
        kv_tokens: that all running requests may reserve together; None: without bound.
        acceptance: of a proposer's best token by a verifier, where it is known of a pair.
        stages: the engine's own times, see `PerformanceSnapshot`.
        free_drafter_prefill: drafters read what they lack in no time.
    """

    target: str
    times: Mapping[str, ForwardTimes]
    parameters: Mapping[str, int]
    prefill_chunk: int
    max_requests: int
    kv_tokens: int | None = None
    acceptance: Mapping[Pair, float] = field(default_factory=dict)
    stages: Mapping[str, TimeCurve] = field(default_factory=dict)
    free_drafter_prefill: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Weakest first, the target last."""
        others = [name for name in self.times if name != self.target]
        return (*sorted(others, key=lambda name: self.parameters[name]), self.target)

    @property
    def drafters(self) -> tuple[str, ...]:
        return self.names[:-1]

    def fit_together(self, names: Collection[str]) -> bool:
        """Whether these models can be in memory at once: all can."""
        return True


class _Model(Strict):
    """`points`: tokens of a forward, rising, and its milliseconds, not falling."""

    name: str = Field(min_length=1)
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
    """`drafter`: the only one; `drafters`: several, smaller ones may draft for larger ones."""

    target: _Model
    drafter: _Model | None = None
    drafters: tuple[_Model, ...] = ()
    prefill_chunk: int = Field(ge=1)
    max_requests: int = Field(ge=1)
    kv_tokens: int | None = Field(default=None, ge=2)
    acceptance: dict[str, float] = Field(default_factory=dict)
    free_drafter_prefill: bool = False

    @model_validator(mode="after")
    def _models_are_told_once(self) -> "_MachineFile":
        if self.drafter is not None and self.drafters:
            raise ConfigError("drafters", "give either drafter or drafters")
        names = [one.name for one in self.all_drafters]
        if self.target.name in names:
            raise ConfigError("target.name", f"{self.target.name!r} is a drafter's too")
        if len(set(names)) < len(names):
            raise ConfigError("drafters", "two have the same name")
        return self

    @property
    def all_drafters(self) -> tuple[_Model, ...]:
        return self.drafters if self.drafter is None else (self.drafter,)

    def pairs(self) -> dict[Pair, float]:
        """Raises `ConfigError` for a pair that cannot be, or a share that is none."""
        sizes = {one.name: one.parameters for one in self.all_drafters}
        verifiers = {**sizes, self.target.name: 0}
        found = {}
        for text, share in self.acceptance.items():
            field_name = f"acceptance.{text}"
            proposer, arrow, verifier = text.partition(_ARROW)
            if not arrow or proposer not in sizes or verifier not in verifiers:
                raise ConfigError(field_name, "must name a drafter and a model, as in small>big")
            if verifier != self.target.name and sizes[proposer] >= sizes[verifier]:
                raise ConfigError(field_name, "the verifier must have more parameters")
            if not 0 < share < 1:
                raise ConfigError(field_name, f"must be between 0 and 1, not {share}")
            found[proposer, verifier] = share
        return found


def load_machine(file: Path) -> Machine:
    """Raises `ConfigError` for `--machine`, with the field that is wrong."""
    try:
        found = _MachineFile.model_validate(read_mapping(file))
        acceptance = found.pairs()
    except ConfigError as error:
        raise ConfigError("--machine", f"{file}: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise ConfigError("--machine", f"{file}: {name}: {first['msg']}") from error
    models = (*found.all_drafters, found.target)
    return Machine(
        found.target.name,
        {one.name: TimeCurve(one.points, one.slope_ms_per_million) for one in models},
        {one.name: one.parameters for one in models},
        found.prefill_chunk,
        found.max_requests,
        found.kv_tokens,
        acceptance,
        free_drafter_prefill=found.free_drafter_prefill,
    )
