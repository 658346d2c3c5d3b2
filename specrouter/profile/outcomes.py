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
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from specrouter.profile.snapshot import Mode, Outcome, OutcomeKey

_T = TypeVar("_T")

_MOMENT_WEIGHT = 0.05  # of a cycle's time against its prediction
_OWN_WEIGHT = 0.0025  # of the same, in what is the chain's own,
_FIRST_WEIGHT = 0.3  # but at first
_PRIOR_TOKENS = 60.0  # that count as if they had come as usual
_FADED_TOKENS = 600.0  # after which older tokens have faded
_HALF_LIFE = 256.0  # cycles without news, after which it is half forgotten
_IN_USE = 16  # cycles without news of a chain that is in use, since not every cycle tells
_MOST_ERROR = 0.4  # logarithm, of one cycle
_LEAST, _MOST = 0.67, 1.5  # factors
_MOST_KEYS = 256  # chains and their ways to run

_Usual = tuple[int, Mode]  # load and mode


@dataclass
class _Outcome:
    log_time: float = 0.0
    cycles: int = 0  # that were timed
    expected: float = 0.0
    committed: float = 0.0
    last: int = 0  # cycle, of news of tokens,
    last_timed: int = 0  # and of times

    def age(self, cycle: int) -> None:
        """What is in use is corrected all the time; what is not must not be held for slow for ever
        because it once was."""
        self.log_time *= _age(cycle - self.last_timed)
        self.expected *= _age(cycle - self.last)
        self.committed *= _age(cycle - self.last)
        self.last_timed = max(self.last_timed, cycle - _IN_USE)
        self.last = cycle

    def aged(self, cycle: int) -> "_Outcome":
        now = replace(self)
        now.age(cycle)
        return now

    def count(self, expected: float, committed: float) -> None:
        fade = max(0.0, 1.0 - committed / _FADED_TOKENS)
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
            forget_oldest(self._known, _MOST_KEYS, lambda outcome: outcome.last)
        known = self._known.setdefault(key, _Outcome())
        usual = self._usual.setdefault(key[1:], _Outcome())
        for one in (known, usual):
            one.age(cycle)
            one.count(expected, committed)
        if log_error is not None:
            known.cycles += 1
            known.last_timed = usual.last_timed = cycle
            surprise = log_error - known.log_time - usual.log_time
            found = known.log_time + usual.log_time + max(-_MOST_ERROR, min(surprise, _MOST_ERROR))
            weight = max(_OWN_WEIGHT, _FIRST_WEIGHT / known.cycles)
            known.log_time += weight * (found - known.log_time)
            usual.log_time += _MOMENT_WEIGHT * (found - known.log_time - usual.log_time)

    def known(self, cycle: int) -> dict[OutcomeKey, Outcome]:
        """Of chains that ran."""
        usual = {key: outcome.aged(cycle) for key, outcome in self._usual.items()}
        found = {}
        for key, outcome in self._known.items():
            own, others = outcome.aged(cycle), usual[key[1:]]
            time = math.exp(own.log_time + others.log_time)
            found[key] = Outcome(_within(time), _within(own.tokens(others.tokens(1.0))))
        return found

    def usual(self, cycle: int) -> dict[_Usual, Outcome]:
        """Of those that did not."""
        found = {}
        for key, outcome in self._usual.items():
            now = outcome.aged(cycle)
            found[key] = Outcome(_within(math.exp(now.log_time)), _within(now.tokens(1.0)))
        return found


def forget_oldest(known: dict[Any, _T], most: int, last: Callable[[_T], int]) -> None:
    """Makes room for one more: callers may ask for any chains that they can name."""
    if len(known) >= most:
        del known[min(known, key=lambda key: last(known[key]))]


def _age(cycles: int) -> float:
    return math.exp2(-max(0, cycles - _IN_USE) / _HALF_LIFE)


def _within(factor: float) -> float:
    return min(max(factor, _LEAST), _MOST)
