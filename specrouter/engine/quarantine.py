"""Quarantine: models that failed rest, each time for twice as long."""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from specrouter.cycle import ModelFailure

logger = logging.getLogger(__name__)

_FIRST_CYCLES, _MOST_CYCLES = 4, 1024


@dataclass(frozen=True)
class _Rest:
    until_cycle: int
    cycles: int


class Quarantine:
    """`counts`: how often each model was put to rest."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._rests: dict[str, _Rest] = {}

    def __contains__(self, name: str) -> bool:
        """Whether its last forwards failed, and none was good since."""
        return name in self._rests

    def available(self, names: Iterable[str], cycle: int) -> frozenset[str]:
        """Models that may be used: one that rested may be tried again after its time."""
        return frozenset(
            name
            for name in names
            if (rest := self._rests.get(name)) is None or rest.until_cycle <= cycle
        )

    def add_all(self, failures: Iterable[ModelFailure], cycle: int) -> set[str]:
        """Once per model, however many groups it failed in this cycle. Returns the names."""
        by_model = {failure.model: failure for failure in failures}
        for failure in by_model.values():
            self.add(failure, cycle)
        return set(by_model)

    def add(self, failure: ModelFailure, cycle: int) -> None:
        before = self._rests.get(failure.model)
        cycles = min(_FIRST_CYCLES if before is None else 2 * before.cycles, _MOST_CYCLES)
        self._rests[failure.model] = _Rest(cycle + cycles, cycles)
        self.counts[failure.model] += 1
        logger.warning(
            "%s failed and rests for %d cycles: %s: %s",
            failure.model,
            cycles,
            type(failure.error).__name__,
            failure.error,
        )

    def forgive(self, names: Iterable[str]) -> None:
        """They did well: what was before is forgotten."""
        for name in names:
            self._rests.pop(name, None)
