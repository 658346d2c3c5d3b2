"""PerfModel: T(model, tokens, attended), and the current slowdown of the machine.

Contract: every model has its own curve (`time_regression`), which errors of one model or one size
move slowly. The common error of all models of a cycle moves the one factor that they share,
quickly: a burst of other load leaves the ratios between models as they were. A lasting part of it
moves all curves alike. A cycle in which only one model ran cannot separate the two; its curve takes
the part that the factor has not followed yet, and gives it back when the burst ends.

Pure: no clock, no tensors. Not thread-safe: the owner locks.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from specrouter.profile.evidence import AVERAGE, MEMORY, within
from specrouter.profile.time_curve import TimeCurve, filled_size
from specrouter.profile.time_regression import TimeRegression

_FAST = 0.5  # weight of a cycle in the slowdown
_QUIET = 0.05  # logarithm: a slowdown up to this is noise; from three times it on, none is

_Forward = tuple[str, int, float, float]  # name, tokens, attended, ms


@dataclass(kw_only=True)
class PerfModel:
    """The times of all models of one machine, and of the stages of its cycles.

    Stages are work around passes, and do not influence the slowdown.
    """

    _models: dict[str, TimeRegression] = field(default_factory=dict)
    _stages: dict[str, TimeRegression] = field(default_factory=dict)
    _means: dict[str, float] = field(default_factory=dict)
    _sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _slowdown: float = 0.0  # a logarithm
    _forwards: list[_Forward] = field(default_factory=list)  # passes of this cycle
    _works: list[_Forward] = field(default_factory=list)

    @property
    def slowdown(self) -> float:
        """The factor of the current times of passes over those of the curves."""
        return math.exp(self._slowdown)

    def learn(self, model: str, times: TimeRegression, sizes: tuple[int, ...] = ()) -> None:
        """Take over the times of a model that was loaded, from here or from elsewhere.

        `sizes`: sizes that its passes are filled up to (`TimeCurve`); empty if they are not.
        """
        self._models[model] = times
        self._sizes[model] = sizes
        self._means.pop(model, None)
        curve = times.curve()
        if curve is not None:
            self._means[model] = curve.at(1)
        self._forwards = [forward for forward in self._forwards if forward[0] != model]

    def record(self, model: str, tokens: int, attended: float, ms: float) -> None:
        """Record a pass, which counts at the cycle's end. Ignore a time that is not positive."""
        if 0.0 < ms < math.inf:
            size = int(filled_size(tokens, self._sizes.get(model, ())))
            self._forwards.append((model, size, attended, ms))

    def record_stage(self, stage: str, places: int, ms: float) -> None:
        """Record work on so many places in the same way."""
        if 0.0 < ms < math.inf:
            self._works.append((stage, places, 0.0, ms))

    def end_cycle(self, learns: bool = True, only_news: bool = False) -> None:
        """Learn from what the cycle recorded, or drop it.

        `only_news`: drops records of known sizes, since learning takes time too.

        Raises:
            ArithmeticError: the result would not be finite; such a result is not kept.
        """
        forwards, works, self._forwards, self._works = self._forwards, self._works, [], []
        for name, _, _, ms in forwards if learns else ():
            known_ms = self._means.get(name, ms)
            mean_ms = known_ms if math.isfinite(known_ms) else ms
            self._means[name] = mean_ms + AVERAGE * (ms - mean_ms)
        if only_news:
            forwards = [each for each in forwards if not _is_known(self._models, each)]
            works = [each for each in works if not _is_known(self._stages, each)]
        if not learns or not (forwards or works):
            return
        seen, shared = self._common(forwards)
        factor = math.exp(_without_noise(self._slowdown + shared))
        if not math.isfinite(factor + seen):
            raise ArithmeticError(f"a slowdown of {factor}")
        for known, records in ((self._models, forwards), (self._stages, works)):
            for name, tokens, attended, ms in records:
                known.setdefault(name, TimeRegression()).record(tokens, attended, ms / factor)
        self._slowdown += _FAST * seen
        self._settle()

    def _settle(self) -> None:
        """Move a lasting slowdown into all curves alike, so that no ratio changes."""
        usual = _without_noise(self._slowdown) / MEMORY
        if usual:
            for times in (*self._models.values(), *self._stages.values()):
                times.scale(math.exp(usual))
            self._slowdown -= usual

    def models(self) -> Mapping[str, TimeCurve]:
        """Return the curves of the known models; multiply by `slowdown` for current times."""
        return {
            name: replace(curve, sizes=self._sizes[name]) if self._sizes.get(name) else curve
            for name, curve in _curves(self._models).items()
        }

    def means_ms(self) -> Mapping[str, float]:
        """Return one scalar per model for passes of all sizes.

        `T_new = a T_measured + (1 - a) T_old` (SpecRouter, section 4.6).
        """
        return dict(self._means)

    def stages(self) -> Mapping[str, TimeCurve]:
        return _curves(self._stages)

    def _common(self, forwards: Iterable[_Forward]) -> tuple[float, float]:
        """Return two logarithms beyond the slowdown.

        They are the least error that all models of a cycle share, and the part of it that is no
        model's own.
        """
        errors: dict[str, list[float]] = {}
        for name, tokens, attended, ms in forwards:
            times = self._models.get(name)
            if times is not None and times.knows(tokens):
                expected = times.expected_ms(tokens, attended)
                assert expected is not None
                errors.setdefault(name, []).append(math.log(ms / expected) - self._slowdown)
        means = [sum(each) / len(each) for each in errors.values()]
        if len(means) < 2:
            alone = means[0] if means else 0.0
            seen = within(alone)
            return seen, _FAST * seen
        shared = max(min(means), 0.0) + min(max(means), 0.0)  # 0 where they differ in sign
        return within(shared), shared


def _is_known(known: Mapping[str, TimeRegression], forward: _Forward) -> bool:
    name, tokens, *_ = forward
    return name in known and known[name].knows(tokens)


def _without_noise(slowdown: float) -> float:
    """Return the slowdown, reduced to 0 where it is small.

    There the curves are anchored to real times, and cannot drift.
    """
    return slowdown * min(max(abs(slowdown) / _QUIET - 1.0, 0.0) / 2.0, 1.0)


def _curves(known: Mapping[str, TimeRegression]) -> dict[str, TimeCurve]:
    found = {name: times.curve() for name, times in known.items()}
    return {name: curve for name, curve in found.items() if curve is not None}
