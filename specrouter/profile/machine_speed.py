"""How slow the machine is just now, and the curves of all its models as of a quiet one.

Contract: `MachineSpeed` tells it from the forwards of all models, and `MachineTimes` joins it to
their curves: what slows all models alike moves a common factor and no curve, so that a neighbour's
burst of work leaves the ratios of models as they were.

Pure: no clock, no tensors. Not thread-safe: the owner locks.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from specrouter.profile.time_curve import TimeCurve, TimeEstimator, bucket_of

_REACH = 12  # forwards before and after one that say how slow the machine was
_ALIKE = 0.1  # logarithms of slowness that differ by less have one cause
_QUIET, _BURST = 0.05, 0.15  # slowness off the level that is none, or wholly the machine's
_CHANGED = 0.1  # lasting slowness off the level that moves it
_LEVEL_FALL, _LEVEL_RISE = 0.02, 0.0005  # a faster machine is believed sooner than a slower one


@dataclass(frozen=True)
class Forward:
    """A forward of a model whose curve is known."""

    model: str
    tokens: int
    attended: float
    elapsed_ms: float
    slowness: float  # log of elapsed over expected
    votes: bool  # the curve is no guess at this size


class MachineSpeed:
    """How slow the machine is, from the last forwards of all models.

    Common is what all kinds of forward show, a kind being a model and a size: as much as the least
    slowed ones, or, where all are faster than they were, the least quickened. What others show
    beyond is their own. One forward is judged by those before and those after it, so it is given
    back some forwards later, and a burst that sets in or ends between two forwards is put down to
    neither of them.

    `level` is the slowness of the machine when it is quiet, against the time when the curves were
    taken. It falls sooner than it rises. Near it, nothing is held to be a burst: there the
    curves are anchored to real times, and cannot all drift together.
    """

    def __init__(self) -> None:
        self.level = 0.0  # a logarithm, as all below
        self._now = 0.0
        self._window: deque[Forward] = deque(maxlen=_REACH + 1)
        self._before: deque[float] = deque(maxlen=_REACH + 1)  # `_now` at each of these

    @property
    def factor(self) -> float:
        """How many times as long as on the quiet machine forwards take now."""
        return math.exp(self._now - self.level)

    def observe(self, forward: Forward) -> tuple[Forward, float] | None:
        """Notes a forward. Gives an earlier one back, with the factor that was not its own."""
        self._window.append(forward)
        common = _common([known for known in self._window if known.votes], self.level)
        self._now = self._now if common is None else common
        self._before.append(self._now)
        self._move_level()
        if len(self._window) <= _REACH:
            return None
        judged, before = self._window[0], self._before[0]
        near = min((before, self._now), key=lambda slow: abs(judged.slowness - slow))
        return judged, math.exp(self._without_noise(near))

    def forget(self, model: str) -> None:
        """Lets go of a model's forwards, whose times say nothing of it any more."""
        kept = [
            (forward, slow)
            for forward, slow in zip(self._window, self._before, strict=True)
            if forward.model != model
        ]
        self._window.clear()
        self._before.clear()
        for forward, slow in kept:
            self._window.append(forward)
            self._before.append(slow)

    def current(self) -> float:
        """The factor of a forward that is over just now."""
        return math.exp(self._without_noise(self._now))

    def _without_noise(self, slowness: float) -> float:
        away = slowness - self.level
        share = (abs(away) - _QUIET) / (_BURST - _QUIET)
        return self.level + away * min(max(share, 0.0), 1.0)

    def _move_level(self) -> None:
        away = min((slow - self.level for slow in self._before), key=abs)
        if abs(away) > _CHANGED:
            self.level += away * (_LEVEL_FALL if away < 0 else _LEVEL_RISE)


def _common(forwards: Iterable[Forward], level: float) -> float | None:
    """The slowness off `level` that all kinds of forward share; None where none is known."""
    kinds: dict[tuple[str, int], list[float]] = {}
    for forward in forwards:
        kind = forward.model, bucket_of(forward.tokens)
        kinds.setdefault(kind, []).append(forward.slowness)
    if not kinds:
        return None
    medians = sorted((median(values), values) for values in kinds.values())
    few = (len(medians) - 1) // 4  # of many kinds, the quartiles for the least and the most
    least, most = medians[few][0] - level, medians[-1 - few][0] - level
    if least <= 0.0 <= most:
        return level
    common = level + (least if least > 0.0 else most)
    alike = [x for middle, values in medians if abs(middle - common) <= _ALIKE for x in values]
    return median(alike)


@dataclass
class MachineTimes:
    """The curves of all models of one machine."""

    estimators: dict[str, TimeEstimator] = field(default_factory=dict)
    speed: MachineSpeed = field(default_factory=MachineSpeed)

    def learn(self, model: str, times: TimeEstimator) -> None:
        """Takes over what is known of a model that was loaded, here or elsewhere than before."""
        self.estimators[model] = times
        self.speed.forget(model)

    def record(self, model: str, tokens: int, attended: float, elapsed_ms: float) -> None:
        """Learns from a forward, some forwards later. See `TimeEstimator.record`."""
        times = self.estimators.setdefault(model, TimeEstimator())
        curve = times.curve()
        if curve is None or times.is_cold or not 0.0 < elapsed_ms < math.inf:
            times.record(tokens, attended, elapsed_ms / self.speed.current())
            return
        slowness = math.log(elapsed_ms / curve.at(tokens, attended))
        votes = times.knows(tokens)
        judged = self.speed.observe(Forward(model, tokens, attended, elapsed_ms, slowness, votes))
        if judged is not None:
            past, factor = judged
            known = self.estimators[past.model]
            known.record(past.tokens, past.attended, past.elapsed_ms / factor)

    def curves(self) -> Mapping[str, TimeCurve]:
        """Of the models that are known, as of the quiet machine; times `speed.factor` for now."""
        scale = math.exp(self.speed.level)
        found = {name: times.curve() for name, times in self.estimators.items()}
        return {name: curve.scaled(scale) for name, curve in found.items() if curve is not None}
