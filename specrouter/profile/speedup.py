"""SpeedupMeter: the speedup of decoding with drafts over decoding without, measured as it runs.

No text depends on drafts, so a few cycles may run without. In each block of cycles at about one
load, `RUN` in a row, at a random place, are without drafts. Their tokens per second are compared
with those of the block's other cycles of as many requests. The catching up of drafters afterwards
counts against drafts. If drafting is slower it rests, at first for `_REST` blocks, and twice as
long each further time. A block without any draft is not counted.

The interval is an asymptotic confidence sequence, of the newest blocks that do not contradict each
other: it may be looked at after each block. It starts anew when older blocks are left out, so the
decision to rest, which must not come about by chance within hours, asks for 99% while 95% are
reported.
Source: Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas, "Time-uniform central limit theory and
asymptotic confidence sequences", 2024, Theorem 2.2.

Contract: the engine's thread records; any thread may read `speedups`. The random places are the
same in every process.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from specrouter.profile.snapshot import load_of

RUN = 8  # cycles without drafts
BLOCK = 100 * RUN  # cycles of a block
# Shorter blocks while drafting looks slower: then cycles without drafts are expected to be faster.
_DOUBTED_BLOCK = 20 * RUN
_LEAST = 6  # blocks that an interval needs
_MOST = 64  # the most blocks of an interval, the newest ones
_DOUBTED = 2  # blocks after which drafting may look slower
_RECENT = (6, 12, 24)  # newest blocks that are compared with all older ones
_ERROR = 0.05  # share of intervals that miss the truth at some time
_REST_ERROR = 0.01  # the same for the decision to rest
_TIGHTEST = 20  # blocks at which the interval is as narrow as it can be
_REST, _LONGEST_REST = 32, 512  # blocks


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """Tokens per second with drafts over those without, at one load.

    Attributes:
        low, high: bounds of an interval that holds the true ratio in 19 of 20 measurements.
        is_resting: drafting was found to be slower, and rests.
    """

    ratio: float
    low: float
    high: float
    is_resting: bool = False

    def __str__(self) -> str:
        return f"{self.ratio:.2f}x ({self.low:.2f} to {self.high:.2f})"


def summary(speedups: Mapping[int, Speedup]) -> str:
    """Format the speedups, e.g. `1.37x (1.34 to 1.40) at 1 request, off at 9 to 16 (...)`."""
    return ", ".join(
        f"off at {requests_of(load)} ({one})" if one.is_resting else f"{one} at {requests_of(load)}"
        for load, one in sorted(speedups.items())
    )


def requests_of(load: int) -> str:
    """Format the numbers of requests of a load; see `load_of`."""
    least = load // 2 + 1
    numbers = str(load) if least >= load else f"{least} to {load}"
    return f"{numbers} request{'' if load == 1 else 's'}"


class SpeedupMeter:
    """The meter of all loads.

    Attributes:
        speedups: last measured speedups by load, where there are enough blocks.
    """

    def __init__(self) -> None:
        self.speedups: Mapping[int, Speedup] = {}
        self._loads: dict[int, _Load] = {}

    def drafts(self, requests: int) -> bool:
        """Return whether so many requests may draft in the next cycle."""
        return self._load(requests).drafts

    def resting(self, requests: int) -> Speedup | None:
        """Return the speedup because of which drafting rests at this load; None: it does not.

        It must be called once in each cycle.
        """
        return self._load(requests).resting()

    def record(
        self, requests: int, drafts: bool, drafted: bool, tokens: float, elapsed_ms: float
    ) -> None:
        """Record a cycle in which so many requests decoded, and nothing else was done.

        `drafts` is the answer of that method; `drafted` is true if there was any draft.
        """
        load = self._load(requests)
        before = load.speedup
        load.record(requests, drafts, drafted, tokens, elapsed_ms)
        if load.speedup is not None and load.speedup is not before:
            self.speedups = {**self.speedups, load_of(requests): load.speedup}

    def _load(self, requests: int) -> "_Load":
        load = load_of(requests)
        if load not in self._loads:
            self._loads[load] = _Load(random.Random(load))
        return self._loads[load]


@dataclass
class _Cycles:
    cycles: int = 0
    tokens: float = 0
    ms: float = 0.0

    def add(self, tokens: float, ms: float) -> None:
        self.cycles, self.tokens, self.ms = self.cycles + 1, self.tokens + tokens, self.ms + ms


@dataclass(kw_only=True)
class _Block:
    """Cycles by the number of requests. From `start` on, `RUN` of `size` are without drafts."""

    size: int
    start: int
    at: int = 0
    has_drafts: bool = False
    drafted: dict[int, _Cycles] = field(default_factory=dict)
    alone: dict[int, _Cycles] = field(default_factory=dict)

    def sums(self) -> tuple[float, float, float, float] | None:
        """Return tokens and milliseconds with drafts and without, for equal numbers of cycles.

        The cycles have equal numbers of requests. None: there are no such cycles, or nothing was
        drafted.
        """
        if not self.has_drafts:
            return None
        both = [(self.drafted[n], one) for n, one in self.alone.items() if n in self.drafted]
        if not both:
            return None
        shares = [(alone.cycles / drafted.cycles, drafted, alone) for drafted, alone in both]
        return (
            sum(share * drafted.tokens for share, drafted, _ in shares),
            sum(share * drafted.ms for share, drafted, _ in shares),
            sum(alone.tokens for _, _, alone in shares),
            sum(alone.ms for _, _, alone in shares),
        )


class _Load:
    """The meter of one load; `speedup` is the last one."""

    def __init__(self, places: random.Random) -> None:
        self.speedup: Speedup | None = None
        self._rests_for: Speedup | None = None
        self._places = places
        self._sums: list[tuple[float, float, float, float]] = []
        self._rest, self._next_rest = 0, _REST * BLOCK  # cycles
        self._block = self._new_block()

    @property
    def drafts(self) -> bool:
        block = self._block
        return self._rests_for is None and not block.start <= block.at < block.start + RUN

    def resting(self) -> Speedup | None:
        if self._rests_for is not None:
            self._rest -= 1
            if self._rest < 0:
                self._rests_for = None
        return self._rests_for

    def record(self, requests: int, drafts: bool, drafted: bool, tokens: float, ms: float) -> None:
        if self._rests_for is not None:
            return
        block = self._block
        block.has_drafts |= drafted
        (block.drafted if drafts else block.alone).setdefault(requests, _Cycles()).add(tokens, ms)
        block.at += 1
        if block.at == block.size:
            found = block.sums()
            if found is not None:
                self._sums = [*self._sums, found][-_MOST:]
                self._judge()
            self._block = self._new_block()

    def _new_block(self) -> _Block:
        size = BLOCK
        if len(self._sums) >= _DOUBTED and _log_ratio(np.sum(self._sums[-_LEAST:], axis=0)) < 0:
            size = _DOUBTED_BLOCK
        return _Block(size=size, start=self._places.randrange(size - RUN))

    def _judge(self) -> None:
        for recent in _RECENT:
            before, since = self._sums[:-recent], self._sums[-recent:]
            if len(before) >= _LEAST and _contradict(_interval(before), _interval(since)):
                self._sums = since  # something has changed
                break
        if len(self._sums) < _LEAST:
            return
        middle, half = _interval(self._sums)
        low, ratio, high = (math.exp(each) for each in (middle - half, middle, middle + half))
        rests = middle + _interval(self._sums, _REST_ERROR)[1] < 0
        self.speedup = Speedup(ratio=ratio, low=low, high=high, is_resting=rests)
        if rests:
            self._rests_for, self._rest, self._sums = self.speedup, self._next_rest, []
            self._next_rest = min(2 * self._next_rest, _LONGEST_REST * BLOCK)
        elif low > 1.0:
            self._next_rest = _REST * BLOCK


def _log_ratio(sums: Sequence[float]) -> float:
    tokens, ms, alone_tokens, alone_ms = sums
    return math.log(tokens * alone_ms / (ms * alone_tokens))


def _contradict(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return abs(one[0] - other[0]) > one[1] + other[1]


def _interval(
    blocks: Sequence[tuple[float, float, float, float]], error: float = _ERROR
) -> tuple[float, float]:
    """Return the logarithm of the ratio, and half of its interval's width."""
    count, found = len(blocks), np.array(blocks)
    sums = found.sum(axis=0)
    # The contribution of each block to the logarithm of the ratio of sums, to first order.
    errors = count * (found / sums) @ np.array([1.0, -1.0, -1.0, 1.0])
    # With few blocks the spread is itself uncertain: use that of Student's t with count - 1.
    spread = float(np.std(errors, ddof=1)) * math.sqrt((count - 1) / (count - 3))
    logs = -2.0 * math.log(error)
    rho2 = (logs + math.log(logs + 1.0)) / _TIGHTEST
    scale = count * rho2 + 1.0
    half = math.sqrt(2.0 * scale / (count**2 * rho2) * math.log(math.sqrt(scale) / error))
    return _log_ratio(sums), spread * half
