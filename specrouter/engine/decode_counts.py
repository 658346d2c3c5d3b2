"""DecodeCounts: what decoding has brought since the start, by chain, by position, against the plan.

Contract: told once a cycle, in a few operations per row, and bounded whatever callers ask for: 64
chains, `MAX_DEPTH` positions, fixed bounds of times. Thread-safe: the engine tells, anybody asks.
"""

import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from specrouter.request.params import MAX_DEPTH, Chain

OTHER_CHAINS: Chain = ("(other)",)  # all that come after so many:
_CHAINS = 64
# Seconds, of a cycle or between tokens.
TIME_BOUNDS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0),
)


@dataclass(frozen=True)
class Gain:
    """What one request gained in a cycle.

    Attributes:
        drafted: tokens that the target verified for it.
        committed: tokens that the target's walk brought, its own choice included.
        produced: those of them that belong to the text, which may have ended before.
        since_s: since its last tokens; None for its first.
    """

    chain: Chain
    drafted: int
    committed: int
    produced: int
    since_s: float | None = None


@dataclass(frozen=True)
class ChainCounts:
    """`cycles` are those of each request, so that all chains' add up to the target's passes.

    `between_s`: from each request's tokens before to those of the chain, `timed_tokens` of its
    text: what a token took, as the request saw it.
    """

    cycles: int
    tokens: int
    between_s: float = 0.0
    timed_tokens: int = 0


@dataclass(frozen=True)
class TimeFigures:
    """`counts`: how many times did not exceed each of `TIME_BOUNDS_S`, and all of them."""

    counts: tuple[int, ...]
    sum_s: float


@dataclass(frozen=True, kw_only=True)
class DecodeFigures:
    """Totals since the start.

    Attributes:
        prompt_tokens: of requests that were given a row.
        produced_tokens: of all texts.
        drafts: cycles of requests in which the target verified drafted tokens.
        drafted_tokens, accepted_tokens: that it verified, and that were on its walk.
        accepted_at: by position in the draft, how often a token there was accepted.
        budget_tokens: drafted tokens that cycles with a selection had planned with;
            `budgeted_tokens` those that the target verified in these cycles.
        chains: requests' cycles and committed tokens.
        between_tokens: time between tokens of a request; those that come together share it.
        cycle_times: of cycles.
    """

    prompt_tokens: int
    produced_tokens: int
    drafts: int
    drafted_tokens: int
    accepted_tokens: int
    accepted_at: tuple[int, ...]
    budget_tokens: int
    budgeted_tokens: int
    chains: Mapping[Chain, ChainCounts]
    between_tokens: TimeFigures
    cycle_times: TimeFigures


class TimeCounts:
    """Times in buckets. The client library's histogram would lock once per value, and cannot
    count a value several times."""

    def __init__(self, bounds_s: Sequence[float] = TIME_BOUNDS_S) -> None:
        self._bounds_s, self._counts = bounds_s, [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def add(self, time_s: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds_s, time_s)] += times
        self._sum_s += time_s * times

    def figures(self) -> TimeFigures:
        return TimeFigures(tuple(accumulate(self._counts)), self._sum_s)


class DecodeCounts:
    """See the module."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prompt_tokens = 0
        self._cycle_times = TimeCounts()
        self._between_tokens = TimeCounts()
        self._produced = self._drafts = self._drafted = self._accepted = 0
        self._budget = self._budgeted = 0
        self._lengths = [0] * (MAX_DEPTH + 1)  # of drafts, by how many tokens were accepted
        self._chains: dict[Chain, ChainCounts] = {}

    def record_prompt(self, tokens: int) -> None:
        """A request was given a row."""
        with self._lock:
            self._prompt_tokens += tokens

    def record_cycle(self, elapsed_s: float) -> None:
        with self._lock:
            self._cycle_times.add(elapsed_s)

    def record(self, gains: Sequence[Gain], budget_tokens: int | None) -> None:
        """A cycle's gains. `budget_tokens` None: whole drafts were verified."""
        with self._lock:
            for gain in gains:
                self._record(gain)
            if budget_tokens is not None:
                self._budget += budget_tokens
                self._budgeted += sum(gain.drafted for gain in gains)

    def figures(self) -> DecodeFigures:
        with self._lock:
            at_least = list(accumulate(reversed(self._lengths)))[::-1]
            return DecodeFigures(
                prompt_tokens=self._prompt_tokens,
                produced_tokens=self._produced,
                drafts=self._drafts,
                drafted_tokens=self._drafted,
                accepted_tokens=self._accepted,
                accepted_at=tuple(at_least[1:]),
                budget_tokens=self._budget,
                budgeted_tokens=self._budgeted,
                chains=dict(self._chains),
                between_tokens=self._between_tokens.figures(),
                cycle_times=self._cycle_times.figures(),
            )

    def _record(self, gain: Gain) -> None:
        accepted = gain.committed - 1
        chain = gain.chain
        if chain not in self._chains and len(self._chains) >= _CHAINS:
            chain = OTHER_CHAINS
        is_timed = gain.since_s is not None and gain.produced
        before = self._chains.get(chain, ChainCounts(0, 0))
        self._chains[chain] = ChainCounts(
            before.cycles + 1,
            before.tokens + gain.committed,
            before.between_s + (gain.since_s or 0.0 if is_timed else 0.0),
            before.timed_tokens + (gain.produced if is_timed else 0),
        )
        self._produced += gain.produced
        if gain.drafted:
            self._drafts += 1
            self._drafted += gain.drafted
            self._accepted += accepted
            self._lengths[min(accepted, MAX_DEPTH)] += 1  # verifiers may have lengthened a path
        if gain.since_s is not None and gain.produced:
            self._between_tokens.add(gain.since_s / gain.produced, gain.produced)
