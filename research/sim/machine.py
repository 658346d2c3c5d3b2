"""A machine for simulations: times of models, memory, acceptances; from a file or a pool."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator, model_validator

from modelpool.errors import ConfigError
from research.policies.adaserve import AdaServe
from research.sim.roofline import RooflineTime, Term
from specrouter.config.strict import Strict
from specrouter.config.yaml_file import read_mapping
from specrouter.profile.batch_time import MOST_TOKENS, BatchTime, CurveTime
from specrouter.profile.snapshot import Pair
from specrouter.profile.time_curve import TimeCurve

MACHINES = Path(__file__).resolve().parent.parent / "machines"  # whose times were published
_ARROW = ">"  # in a file, between who proposes and who verifies
_STEPS = 8  # of drafting, over which a step's share of a batch's time is taken
_DECODING = 32  # requests that decode then


class AdaserveBounds(Strict):
    """What was published of AdaServe's trees: `budget_tokens` of the verifier, and attributes of
    `research.policies.adaserve.AdaServeTrees`."""

    budget_tokens: int | None = Field(default=None, ge=1)
    drafter_tokens: int | None = Field(default=None, ge=1)
    max_depth: int | None = Field(default=None, ge=1)
    min_depth: int | None = Field(default=None, ge=1)
    max_width: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _trees_can_be_drafted(self) -> "AdaserveBounds":
        AdaServe(**self.of_trees)
        return self

    @property
    def of_trees(self) -> dict[str, Any]:
        """Those that are attributes of the trees."""
        return self.model_dump(exclude_none=True, exclude={"budget_tokens"})


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a simulation knows of models and memory.

    Attributes:
        target: the model whose text it is.
        times: of each model's forwards, by name.
        parameters: of each model.
        prefill_chunk: prompt tokens that the target reads in a cycle, and each drafter of texts.
        max_requests: rows.
        kv_tokens: that all running requests may hold together; None: without bound.
        acceptance: of a proposer's best token by a verifier, where it is known of a pair.
        stages: the engine's own times, see `PerformanceSnapshot`.
        free_drafter_prefill: drafters read what they lack in no time.
        batch: what a cycle takes by the target's tokens and the drafting steps, where that was
            published instead of times of forwards; `times`, which decisions are made with, are
            then as near as times of single forwards come.
        trees: budgets and bounds of AdaServe's trees that were published for the machine.
    """

    target: str
    times: Mapping[str, TimeCurve]
    parameters: Mapping[str, int]
    prefill_chunk: int
    max_requests: int
    kv_tokens: int | None = None
    acceptance: Mapping[Pair, float] = field(default_factory=dict)
    stages: Mapping[str, TimeCurve] = field(default_factory=dict)
    free_drafter_prefill: bool = False
    batch: RooflineTime | None = None
    trees: AdaserveBounds = field(default_factory=AdaserveBounds)

    @property
    def batch_times(self) -> BatchTime:
        """What admission plans with."""
        if self.batch is not None:
            return self.batch
        drafter = self.drafters[:1]
        step_ms = sum(self.times[name].at(self.max_requests) for name in drafter)
        return CurveTime(self.times[self.target], step_ms)

    @property
    def names(self) -> tuple[str, ...]:
        """Weakest first, the target last."""
        others = [name for name in self.times if name != self.target]
        return (*sorted(others, key=lambda name: self.parameters[name]), self.target)

    @property
    def drafters(self) -> tuple[str, ...]:
        return self.names[:-1]

    @property
    def quoters(self) -> Collection[str]:
        """Nobody quotes texts here."""
        return ()

    def slowed(self, factor: float) -> "Machine":
        """One whose forwards, batches and own work take `factor` times as long."""
        return replace(
            self,
            times={name: times.scaled(factor) for name, times in self.times.items()},
            stages={name: curve.scaled(factor) for name, curve in self.stages.items()},
            batch=None if self.batch is None else self.batch.scaled(factor),
        )

    def fit_together(self, names: Collection[str]) -> bool:
        """Whether these models can be in memory at once: all can."""
        return True


class _Model(Strict):
    """`points`: tokens of a forward, rising, and its milliseconds, not falling. There are none
    where the machine has `batch_terms`."""

    name: str = Field(min_length=1)
    parameters: int = Field(ge=1)
    points: tuple[tuple[float, float], ...] | None = Field(default=None, min_length=1)
    slope_ms_per_million: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @field_validator("points")
    @classmethod
    def _rise(
        cls, points: tuple[tuple[float, float], ...] | None
    ) -> tuple[tuple[float, float], ...] | None:
        if points is None:
            return None
        if not all(tokens >= 1 and 0 < ms < float("inf") for tokens, ms in points):
            raise ValueError("tokens must be at least 1, and milliseconds above 0")
        if not all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(points)):
            raise ValueError("tokens must rise, and milliseconds must not fall")
        return points


class _MachineFile(Strict):
    """Attributes:
    drafter: the only one; `drafters`: several, smaller ones may draft for larger ones.
    batch_terms: k1, k2, b of SLOs-Serve's form, in milliseconds, in the place of all points.
    kv_tokens: memory, or else `kv_memory_gb`, 10^9 bytes beside the weights, over
        `kv_bytes_per_token`, of all models that keep keys and values together.
    adaserve: budget and bounds of AdaServe's trees.
    """

    target: _Model
    drafter: _Model | None = None
    drafters: tuple[_Model, ...] = ()
    batch_terms: tuple[Term, ...] = ()
    prefill_chunk: int = Field(ge=1)
    max_requests: int = Field(ge=1)
    kv_tokens: int | None = Field(default=None, ge=2)
    kv_bytes_per_token: int | None = Field(default=None, ge=1)
    kv_memory_gb: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    acceptance: dict[str, float] = Field(default_factory=dict)
    free_drafter_prefill: bool = False
    adaserve: AdaserveBounds = Field(default_factory=AdaserveBounds)

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

    @model_validator(mode="after")
    def _times_are_told_once(self) -> "_MachineFile":
        for name, model in (("target", self.target), *(("drafter", m) for m in self.all_drafters)):
            if (model.points is None) != bool(self.batch_terms):
                raise ConfigError(f"{name}.points", "give either points or batch_terms")
        if any(not 0.0 <= each < float("inf") for term in self.batch_terms for each in term):
            raise ConfigError("batch_terms", "must be finite, and none below 0")
        return self

    @model_validator(mode="after")
    def _memory_is_told_once(self) -> "_MachineFile":
        if (self.kv_bytes_per_token is None) != (self.kv_memory_gb is None):
            raise ConfigError("kv_memory_gb", "goes with kv_bytes_per_token")
        if self.kv_tokens is not None and self.kv_memory_gb is not None:
            raise ConfigError("kv_tokens", "give either kv_tokens or kv_memory_gb")
        return self

    @property
    def room_tokens(self) -> int | None:
        if self.kv_memory_gb is None or self.kv_bytes_per_token is None:
            return self.kv_tokens
        return int(self.kv_memory_gb * 1e9 // self.kv_bytes_per_token)

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
    batch = RooflineTime(found.batch_terms) if found.batch_terms else None
    return Machine(
        target=found.target.name,
        times={one.name: _times(one, found.target, batch) for one in models},
        parameters={one.name: one.parameters for one in models},
        prefill_chunk=found.prefill_chunk,
        max_requests=found.max_requests,
        kv_tokens=found.room_tokens,
        acceptance=acceptance,
        free_drafter_prefill=found.free_drafter_prefill or batch is not None,
        batch=batch,
        trees=found.adaserve,
    )


def _times(model: _Model, target: _Model, batch: RooflineTime | None) -> TimeCurve:
    """Of a batch's time a drafter has what a drafting step adds, and the target all else."""
    if batch is None:
        assert model.points is not None, "the file was checked"
        return TimeCurve(model.points, model.slope_ms_per_million)
    if model is not target:
        plain, drafted = (batch.ms(_DECODING * (steps + 1), steps) for steps in (0, _STEPS))
        wide = batch.ms(_DECODING * (_STEPS + 1)) - plain
        return TimeCurve(((1.0, max(0.0, (drafted - plain - wide) / _STEPS)),))
    return TimeCurve(tuple((tokens, batch.ms(tokens)) for tokens in _knees(batch.terms)))


def _knees(terms: Sequence[Term]) -> list[float]:
    """Tokens at which another term becomes the largest, and the ends."""
    found = {1.0, float(MOST_TOKENS)}
    for (k1, _, b), (l1, _, c) in combinations(terms, 2):
        if k1 != l1 and 1.0 < (c - b) / (k1 - l1) < MOST_TOKENS:
            found.add((c - b) / (k1 - l1))
    return sorted(found)
