"""Quarantine: models that failed rest, each time for twice as long (`BackOff`)."""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from specrouter.cycle import ModelFailure

logger = logging.getLogger(__name__)

_FIRST_CYCLES, _MOST_CYCLES = 4, 1024


@dataclass(frozen=True)
class BackOff:
    """A rest of `cycles`, which ends before the cycle `until_cycle`. The first is none."""

    until_cycle: int = 0
    cycles: int = 0

    def lasts(self, cycle: int) -> bool:
        return cycle < self.until_cycle

    def longer(self, cycle: int) -> "BackOff":
        """The next one, which begins now."""
        cycles = min(2 * self.cycles or _FIRST_CYCLES, _MOST_CYCLES)
        return BackOff(cycle + cycles, cycles)


_NONE = BackOff()


class Quarantine:
    """`counts`: how often each model was put to rest."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._rests: dict[str, BackOff] = {}

    def __contains__(self, name: str) -> bool:
        """Whether its last forwards failed, and none was good since."""
        return name in self._rests

    def available(self, names: Iterable[str], cycle: int) -> frozenset[str]:
        """Models that may be used: one that rested may be tried again after its time."""
        rests = self._rests
        return frozenset(name for name in names if not rests.get(name, _NONE).lasts(cycle))

    def add_all(self, failures: Iterable[ModelFailure], cycle: int) -> set[str]:
        """Once per model, however many groups it failed in this cycle. Returns the names."""
        by_model = {failure.model: failure for failure in failures}
        for failure in by_model.values():
            self.add(failure, cycle)
        return set(by_model)

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

    def forgive(self, names: Iterable[str]) -> None:
        """They did well: what was before is forgotten."""
        for name in names:
            self._rests.pop(name, None)
