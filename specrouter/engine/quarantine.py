"""The quarantine of models that failed: each rest is twice as long as the last (`BackOff`).

Models that are not loaded yet are not available either.
"""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from specrouter.cycle import CycleResult, ModelFailure

logger = logging.getLogger(__name__)

_FIRST_CYCLES, _MOST_CYCLES = 4, 1024


@dataclass(frozen=True)
class BackOff:
    """A rest of `cycles`, which ends before the cycle `until_cycle`; by default, no rest."""

    until_cycle: int = 0
    cycles: int = 0

    def lasts(self, cycle: int) -> bool:
        return cycle < self.until_cycle

    def longer(self, cycle: int) -> "BackOff":
        """Return the next rest, which begins now."""
        cycles = min(2 * self.cycles or _FIRST_CYCLES, _MOST_CYCLES)
        return BackOff(cycle + cycles, cycles)


_NONE = BackOff()


class Quarantine:
    """Models that rest after failures.

    Attributes:
        counts: how often each model was put in quarantine.
        awaited: models that are not loaded yet, in the order of loading.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.awaited: tuple[str, ...] = ()
        self._rests: dict[str, BackOff] = {}

    def __contains__(self, name: str) -> bool:
        """Return whether a model has failed, and has not succeeded since."""
        return name in self._rests

    def available(self, names: Iterable[str], cycle: int) -> frozenset[str]:
        """Return the models that neither rest nor await their first load."""
        return frozenset(names) - self.resting(names, cycle) - frozenset(self.awaited)

    def resting(self, names: Iterable[str], cycle: int) -> frozenset[str]:
        rests = self._rests
        return frozenset(name for name in names if rests.get(name, _NONE).lasts(cycle))

    def learn(self, result: CycleResult, cycle: int) -> None:
        """Let models that failed in a cycle rest; forget earlier failures of those that succeeded.

        A model that failed in several groups of the cycle rests once.
        """
        by_model = {failure.model: failure for failure in result.failures}
        for failure in by_model.values():
            self.add(failure, cycle)
        well = {name for commit in result.commits for name in commit.chain[:-1]}
        for name in well - by_model.keys():
            self._rests.pop(name, None)

    def add(self, failure: ModelFailure, cycle: int) -> None:
        rest = self._rests.get(failure.model, _NONE).longer(cycle)
        self._rests[failure.model] = rest
        self.counts[failure.model] += 1
        logger.warning(
            "%s failed and rests for %d cycles: %s: %s",
            failure.model,
            rest.cycles,
            type(failure.error).__name__,
            failure.error,
        )
