"""PerfModel: T(model, tokens, attended), and how slow the machine is just now.

Contract: every model has a curve of its own (`time_regression`), which what stays with one model or
one size moves slowly. What all models of a cycle show alike moves the one factor that they share,
quickly: a neighbour's burst of work leaves the ratios between models as they were. What of it lasts
moves all curves alike. A cycle in which only one model ran cannot tell the two apart; its curve
takes what the factor has not followed yet, and gives it back when the burst ends.

Pure: no clock, no tensors. Not thread-safe: the owner locks.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from specrouter.profile.evidence import AVERAGE, MEMORY, within
from specrouter.profile.staircase import Staircase, filled_size
from specrouter.profile.time_curve import ForwardTimes, TimeCurve
from specrouter.profile.time_regression import TimeRegression

_FAST = 0.5  # weight of a cycle in the slowdown
_QUIET = 0.05  # slowdown that is none, a logarithm; three times as much is wholly the machine's

_Forward = tuple[str, int, float, float]  # name, tokens, attended, ms


@dataclass(kw_only=True)
class PerfModel:
    """Of all models of one machine, and of the stages of its cycles, which are work around forwards
    and say nothing of the machine."""

    _models: dict[str, TimeRegression] = field(default_factory=dict)
    _stages: dict[str, TimeRegression] = field(default_factory=dict)
    _means: dict[str, float] = field(default_factory=dict)
    _sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _slowdown: float = 0.0  # a logarithm
    _forwards: list[_Forward] = field(default_factory=list)  # of this cycle
    _works: list[_Forward] = field(default_factory=list)

    @property
    def slowdown(self) -> float:
        """How many times as long as the curves say forwards take now."""
        return math.exp(self._slowdown)

    def learn(self, model: str, times: TimeRegression, sizes: tuple[int, ...] = ()) -> None:
        """Takes over what is known of a model that was loaded, here or elsewhere than before.

        `sizes`: that its forwards are filled up to (`Staircase`); none where they are not.
        """
        self._models[model] = times
        self._sizes[model] = sizes
        self._means.pop(model, None)
        curve = times.curve()
        if curve is not None:
            self._means[model] = curve.at(1)
        self._forwards = [forward for forward in self._forwards if forward[0] != model]

    def record(self, model: str, tokens: int, attended: float, ms: float) -> None:
        """A forward, which counts with the cycle's end. What is no positive time is ignored."""
        if 0.0 < ms < math.inf:
            size = int(filled_size(tokens, self._sizes.get(model, ())))
            self._forwards.append((model, size, attended, ms))

    def record_stage(self, stage: str, places: int, ms: float) -> None:
        """Work on so many places, alike."""
        if 0.0 < ms < math.inf:
            self._works.append((stage, places, 0.0, ms))

    def end_cycle(self, learns: bool = True, only_news: bool = False) -> None:
        """Learns from what the cycle recorded, or drops it.

        `only_news`: drops what is of sizes that are known; learning takes time too.

        Raises:
            ArithmeticError: what would be learned is not finite; that is not.
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
        """What lasts becomes all curves' own, so that no ratio changes."""
        usual = _without_noise(self._slowdown) / MEMORY
        if usual:
            for times in (*self._models.values(), *self._stages.values()):
                times.scale(math.exp(usual))
            self._slowdown -= usual

    def models(self) -> Mapping[str, ForwardTimes]:
        """Of those that are known; times `slowdown` for now."""
        return {
            name: Staircase(curve, self._sizes[name]) if self._sizes.get(name) else curve
            for name, curve in _curves(self._models).items()
        }

    def means_ms(self) -> Mapping[str, float]:
        """One scalar a model, whatever its forwards' sizes: `T_new = a T_measured + (1 - a) T_old`
        (SpecRouter, section 4.6)."""
        return dict(self._means)

    def stages(self) -> Mapping[str, TimeCurve]:
        return _curves(self._stages)

    def _common(self, forwards: Iterable[_Forward]) -> tuple[float, float]:
        """Logarithms beyond the slowdown: the least that all models of a cycle show, and how much
        of it is no model's own."""
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
    """Near none there is none: there the curves are anchored to real times, and cannot drift."""
    return slowdown * min(max(abs(slowdown) / _QUIET - 1.0, 0.0) / 2.0, 1.0)


def _curves(known: Mapping[str, TimeRegression]) -> dict[str, TimeCurve]:
    found = {name: times.curve() for name, times in known.items()}
    return {name: curve for name, curve in found.items() if curve is not None}
