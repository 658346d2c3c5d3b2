"""Totals of decoding since the start, by chain, by draft position, and against the plan.

Contract: recorded once a cycle, in a few operations per row. Memory is bounded for any requests: 64
chains, `MAX_DEPTH` positions, fixed bounds of times. Thread-safe.
"""

import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from specrouter.request.params import MAX_DEPTH, Chain

OTHER_CHAINS: Chain = ("(other)",)  # all chains beyond the first 64
_CHAINS = 64
# Upper bounds of the buckets, for times of a cycle and times between tokens.
TIME_BOUNDS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0),
)


@dataclass(frozen=True)
class Gain:
    """Tokens that one request gained in a cycle.

    Attributes:
        chain: the chain that it decoded through.
        drafted: draft tokens that the target verified for it.
        committed: accepted tokens and the target's next one.
        produced: those of them that belong to the text, which may have ended before the last.
        since_s: seconds since its last tokens; None for its first.
    """

    chain: Chain
    drafted: int
    committed: int
    produced: int
    since_s: float | None = None


@dataclass(frozen=True)
class ChainCounts:
    """Counts of one chain, in which each request of a cycle counts as a cycle of its own.

    `between_s` / `timed_tokens` is the time per token as requests saw it: the sum of the times from
    a request's previous tokens to those that the chain brought, over the number of these.
    """

    cycles: int
    tokens: int
    between_s: float = 0.0
    timed_tokens: int = 0


@dataclass(frozen=True)
class TimeFigures:
    """A histogram: for each of `TIME_BOUNDS_S`, the times up to it; last, the count of all."""

    counts: tuple[int, ...]
    sum_s: float


@dataclass(frozen=True, kw_only=True)
class DecodeFigures:
    """Totals since the start.

    Attributes:
        prompt_tokens: tokens of the prompts of requests that were given a row.
        produced_tokens: output tokens of all requests.
        drafts: drafts that the target verified, one per request and cycle.
        drafted_tokens, accepted_tokens: nodes that it verified, and those that it accepted.
        accepted_at: accepted tokens by position in the draft.
        budget_tokens: draft tokens that cycles with a selection were planned with.
        budgeted_tokens: those that the target verified in these cycles.
        chains: counts of each chain.
        between_tokens: time between tokens of a request; those that come together share it.
        cycle_times: times of cycles.
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
    """A histogram of times.

    That of the Prometheus client locks once per value and cannot count a value several times.
    """

    def __init__(self, bounds_s: Sequence[float] = TIME_BOUNDS_S) -> None:
        self._bounds_s, self._counts = bounds_s, [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def add(self, time_s: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds_s, time_s)] += times
        self._sum_s += time_s * times

    def figures(self) -> TimeFigures:
        return TimeFigures(tuple(accumulate(self._counts)), self._sum_s)


class DecodeCounts:
    """Totals of decoding, recorded by the engine and read by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prompt_tokens = 0
        self._cycle_times = TimeCounts()
        self._between_tokens = TimeCounts()
        self._produced = self._drafts = self._drafted = self._accepted = 0
        self._budget = self._budgeted = 0
        self._lengths = [0] * (MAX_DEPTH + 1)  # drafts by their number of accepted tokens
        self._chains: dict[Chain, ChainCounts] = {}

    def record_prompt(self, tokens: int) -> None:
        """Record the prompt of a request that was given a row."""
        with self._lock:
            self._prompt_tokens += tokens

    def record_cycle(self, elapsed_s: float) -> None:
        with self._lock:
            self._cycle_times.add(elapsed_s)

    def record(self, gains: Sequence[Gain], budget_tokens: int | None) -> None:
        """Record a cycle's gains; `budget_tokens` None: whole drafts were verified."""
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
            self._lengths[min(accepted, MAX_DEPTH)] += 1  # intermediates may lengthen a path
        if gain.since_s is not None and gain.produced:
            self._between_tokens.add(gain.since_s / gain.produced, gain.produced)
