"""Outcomes of cycles compared with their predictions, and factors for other chains from them.

Contract: `OutcomeBook` learns from one cycle at a time, by chain, load and mode, and gives factors
on predicted times and tokens: `known` for chains that ran, `usual` for any other.
A time above the prediction is first attributed to the moment, which is the same for all chains:
otherwise each burst of load on the machine would make another chain look better than the one that
happened to run. A lasting error becomes the chain's own, much more slowly. A chain that has not run
is expected to miss its predicted tokens as much as those that did: the chosen chain has the best
prediction, which is usually too good.

Pure: no clock. Not thread-safe: the owner locks.
"""

import math
from dataclasses import dataclass, field, replace
from typing import TypeVar

from specrouter.profile.evidence import AVERAGE, MEMORY, RECENT, age, forget_oldest, within
from specrouter.profile.snapshot import ChainOutcome, Mode, OutcomeKey

_FIRST_WEIGHT = 0.3  # of a cycle in the chain's own error; falls to 1 / MEMORY
_PRIOR_TOKENS = 60.0  # weight of the usual outcome, in tokens

_Usual = tuple[int, Mode]  # load and mode


@dataclass(kw_only=True)
class _Outcome:
    log_time: float = 0.0
    cycles: int = 0  # timed cycles
    expected: float = 0.0
    committed: float = 0.0
    last: int = 0  # cycle of the last news of tokens,
    last_timed: int = 0  # and of the last timing

    def age(self, cycle: int) -> None:
        """Fade what was learned by the cycles without news, except the last `RECENT` ones.

        A chain in use is corrected all the time. An idle one must not count as slow for ever
        because it was slow once. Not every cycle is measured, so a few without news do not count.
        """
        self.log_time *= age(cycle - self.last_timed - RECENT)
        self.expected *= age(cycle - self.last - RECENT)
        self.committed *= age(cycle - self.last - RECENT)
        self.last_timed = max(self.last_timed, cycle - RECENT)
        self.last = cycle

    def aged(self, cycle: int) -> "_Outcome":
        now = replace(self)
        now.age(cycle)
        return now

    def count(self, expected: float, committed: float) -> None:
        fade = max(0.0, 1.0 - committed / MEMORY)
        self.expected = self.expected * fade + expected
        self.committed = self.committed * fade + committed

    def tokens(self, usual: float) -> float:
        """Return the factor on tokens, blended with the usual one."""
        return (self.committed + _PRIOR_TOKENS * usual) / (self.expected + _PRIOR_TOKENS)


@dataclass
class OutcomeBook:
    _known: dict[OutcomeKey, _Outcome] = field(default_factory=dict)
    _usual: dict[_Usual, _Outcome] = field(default_factory=dict)  # times of the moment

    def record(
        self,
        key: OutcomeKey,
        cycle: int,
        log_error: float | None,
        expected: float,
        committed: float,
    ) -> None:
        """Learn from one cycle.

        Args:
            key: its chain, load and mode.
            cycle: its number.
            log_error: logarithm of its time over the uncorrected prediction; None if not known.
            expected: predicted tokens beyond the target's own.
            committed: committed tokens beyond the target's own.
        """
        if key not in self._known:
            forget_oldest(self._known, lambda outcome: outcome.last)
        # In this order: if the first fails, no chain is known whose usual outcome is not.
        usual = _aged_in(self._usual, key[1:], cycle)
        known = _aged_in(self._known, key, cycle)
        for one in (known, usual):
            one.count(expected, committed)
        if log_error is not None:
            known.cycles += 1
            known.last_timed = usual.last_timed = cycle
            before = known.log_time + usual.log_time
            found = before + within(log_error - before)
            weight = max(1.0 / MEMORY, _FIRST_WEIGHT / known.cycles)
            known.log_time += weight * (found - known.log_time)
            usual.log_time += AVERAGE * (found - known.log_time - usual.log_time)

    def known(self, cycle: int) -> dict[OutcomeKey, ChainOutcome]:
        """Return the factors of chains that ran."""
        usual = {key: outcome.aged(cycle) for key, outcome in self._usual.items()}
        found = {}
        for key, outcome in self._known.items():
            own, others = outcome.aged(cycle), usual[key[1:]]
            tokens = own.tokens(others.tokens(1.0))
            found[key] = _bounded(own.log_time + others.log_time, tokens)
        return found

    def usual(self, cycle: int) -> dict[_Usual, ChainOutcome]:
        """Return the factors of chains that did not run, by load and mode."""
        aged = {key: outcome.aged(cycle) for key, outcome in self._usual.items()}
        return {key: _bounded(one.log_time, one.tokens(1.0)) for key, one in aged.items()}


_Key = TypeVar("_Key")


def _aged_in(kept: dict[_Key, _Outcome], key: _Key, cycle: int) -> _Outcome:
    """Return the outcome of a key, a new one if there is none or its numbers are not finite.

    Sums would keep a value that is not finite for ever.
    """
    found = kept.setdefault(key, _Outcome())
    found.age(cycle)
    if not math.isfinite(found.log_time + found.expected + found.committed):
        found = kept[key] = _Outcome(last=cycle - RECENT, last_timed=cycle - RECENT)
    return found


def _bounded(log_time: float, tokens: float) -> ChainOutcome:
    return ChainOutcome(math.exp(within(log_time)), math.exp(within(math.log(max(tokens, 1e-9)))))
