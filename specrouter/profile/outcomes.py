"""How cycles came out against what was predicted of them, and what that says of other chains.

Contract: `OutcomeBook` learns of one cycle at a time, by chain, load and mode, and gives factors on
predicted times and tokens: `known` those of chains that ran, `usual` those of any other.
What a cycle is slower than predicted is put on the moment at first, which is the same for all
chains: else each neighbour's burst would make another chain look better than the one that happened
to run. What stays with a chain becomes its own, much more slowly. And a chain that has not run
brings no more of the tokens that were promised than those that did: who was chosen was chosen for
the best promise, which is rarely kept in full.

Pure: no clock. Not thread-safe: the owner locks.
"""

import math
from dataclasses import dataclass, field, replace
from typing import TypeVar

from specrouter.profile.evidence import AVERAGE, MEMORY, RECENT, age, forget_oldest, within
from specrouter.profile.snapshot import Mode, Outcome, OutcomeKey

_FIRST_WEIGHT = 0.3  # of a cycle's time in what is the chain's own, which falls to 1 / MEMORY
_PRIOR_TOKENS = 60.0  # that count as if they had come as usual

_Usual = tuple[int, Mode]  # load and mode


@dataclass(kw_only=True)
class _Outcome:
    log_time: float = 0.0
    cycles: int = 0  # that were timed
    expected: float = 0.0
    committed: float = 0.0
    last: int = 0  # cycle, of news of tokens,
    last_timed: int = 0  # and of times

    def age(self, cycle: int) -> None:
        """What is in use is corrected all the time; what is not must not be held for slow for ever
        because it once was. Not every cycle tells, so some without news are none."""
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
        """The factor, drawn to the usual one."""
        return (self.committed + _PRIOR_TOKENS * usual) / (self.expected + _PRIOR_TOKENS)


@dataclass
class OutcomeBook:
    _known: dict[OutcomeKey, _Outcome] = field(default_factory=dict)
    _usual: dict[_Usual, _Outcome] = field(default_factory=dict)  # their times are the moment's

    def record(
        self,
        key: OutcomeKey,
        cycle: int,
        log_error: float | None,
        expected: float,
        committed: float,
    ) -> None:
        """One cycle.

        Args:
            log_error: of its time over what was predicted without corrections; None where that is
                not known.
            expected, committed: tokens beyond the target's own.
        """
        if key not in self._known:
            forget_oldest(self._known, lambda outcome: outcome.last)
        known = _aged_in(self._known, key, cycle)
        usual = _aged_in(self._usual, key[1:], cycle)
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

    def known(self, cycle: int) -> dict[OutcomeKey, Outcome]:
        """Of chains that ran."""
        usual = {key: outcome.aged(cycle) for key, outcome in self._usual.items()}
        found = {}
        for key, outcome in self._known.items():
            own, others = outcome.aged(cycle), usual[key[1:]]
            tokens = own.tokens(others.tokens(1.0))
            found[key] = _bounded(own.log_time + others.log_time, tokens)
        return found

    def usual(self, cycle: int) -> dict[_Usual, Outcome]:
        """Of those that did not."""
        aged = {key: outcome.aged(cycle) for key, outcome in self._usual.items()}
        return {key: _bounded(one.log_time, one.tokens(1.0)) for key, one in aged.items()}


_Key = TypeVar("_Key")


def _aged_in(kept: dict[_Key, _Outcome], key: _Key, cycle: int) -> _Outcome:
    """The outcome of a key, from the beginning where there is none, or numbers are none any more:
    sums would never lose that."""
    found = kept.setdefault(key, _Outcome())
    found.age(cycle)
    if not math.isfinite(found.log_time + found.expected + found.committed):
        found = kept[key] = _Outcome(last=cycle - RECENT, last_timed=cycle - RECENT)
    return found


def _bounded(log_time: float, tokens: float) -> Outcome:
    return Outcome(math.exp(within(log_time)), math.exp(within(math.log(max(tokens, 1e-9)))))
