"""How many CPU threads a model's forwards have while other programs want the same cores.

Contract: with as many threads as cores, every one of a forward's barriers waits for the thread that
has no core just now: with one busy program beside, two threads take some ten times as long as one.
So while other programs use the cores, one thread is tried now and then, and used where it is
faster. On cores of its own a model has all its threads, and nothing is measured.

Forwards are compared with others of the same moment, not with the fastest ever: a service that
starts beside a busy program has no such time.
"""

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from modelpool.fast.cpu import cpu_threads

logger = logging.getLogger(__name__)

_LOOK_S = 0.25  # between two looks at the cores
_BUSY, _FREE = 0.4, 0.2  # cores beyond those that are left over, from which and to which on
_ENOUGH = 2  # forwards of about a size with one thread and with all, to compare the two
_COMPARE_AGAIN_S = 30.0

# Seconds that all programs have used of this one's cores, and those of this one; None if unknown.
Usage = Callable[[], tuple[float, float] | None]


class OtherPrograms:
    """How many of the cores that this process may use others use. Not exact: where threads race,
    one of them looks twice."""

    def __init__(
        self, usage: Usage | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._usage, self._clock = usage or _usage, clock
        self._looked_s, self._before = clock(), self._usage()
        self._cores = 0.0

    def cores(self) -> float:
        """In the mean of the last quarter of a second or longer, until now or shortly before."""
        now_s = self._clock()
        elapsed_s = now_s - self._looked_s
        if self._before is not None and elapsed_s >= _LOOK_S:
            now, before = self._usage(), self._before
            self._looked_s, self._before = now_s, now
            if now is not None:
                others_s = (now[0] - before[0]) - (now[1] - before[1])
                self._cores = max(0.0, others_s / elapsed_s)
        return self._cores


class ThreadChoice:
    """Of one model. Not thread-safe: a model runs one forward at a time.

    Args:
        most: the threads that it has on cores of its own.
        cores: that this process may use.
        most_tokens: of a pack that may have one thread; larger ones always have all.
    """

    def __init__(
        self,
        name: str,
        most: int,
        others: OtherPrograms,
        *,
        cores: int | None = None,
        most_tokens: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._most, self._others, self._clock = name, most, others, clock
        self._left_over = max(0, (cores or _core_count()) - most)
        self._most_tokens = most_tokens
        self._is_busy = False  # are there others?
        self._has_one = False  # was one thread faster?
        self._compared_s = 0.0
        self._count = 0
        # ms, by the power of two of the tokens, and whether it was one thread.
        self._times: dict[tuple[int, bool], deque[float]] = {}

    @contextmanager
    def chosen(self, tokens: int) -> Iterator[None]:
        """Around a forward of so many tokens."""
        is_small = tokens <= self._most_tokens
        threads = self.threads() if is_small else self._most
        is_compared = is_small and self._is_busy and not self._has_one
        began_s = self._clock()
        with cpu_threads(threads):
            yield
        if is_compared:
            self.took(tokens, threads, (self._clock() - began_s) * 1000)

    def threads(self) -> int:
        """For the next forward that may have one."""
        beyond = self._others.cores() - self._left_over
        was_busy, self._is_busy = self._is_busy, beyond > (_FREE if self._is_busy else _BUSY)
        if not self._is_busy:
            if was_busy:
                self._forget()
            return self._most
        if self._has_one:
            if self._clock() - self._compared_s < _COMPARE_AGAIN_S:
                return 1
            self._forget()
        self._count += 1
        return 1 if self._count % 2 else self._most

    def took(self, tokens: int, threads: int, ms: float) -> None:
        """Tells how long a forward took while it is not known which threads are faster."""
        size = tokens.bit_length()
        times = self._times.setdefault((size, threads == 1), deque(maxlen=_ENOUGH))
        times.append(ms)
        one, most = (self._times.get((size, is_one), ()) for is_one in (True, False))
        if len(one) == len(most) == _ENOUGH and sum(one) < sum(most):
            self._has_one, self._compared_s = True, self._clock()
            logger.info("%s: other programs use its cores; it has one thread now", self._name)

    def _forget(self) -> None:
        self._has_one, self._count = False, 0
        self._times.clear()


def _core_count() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _usage() -> tuple[float, float] | None:
    """By Linux' account in /proc/stat, which counts hundredths of a second."""
    try:
        names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        with open("/proc/stat", encoding="ascii") as file:
            lines = [line.split() for line in file if line.startswith("cpu")]
    except (OSError, AttributeError):
        return None
    ticks = 0
    for name, user, nice, system, _idle, _wait, *interrupts in lines:
        if name in names:
            ticks += int(user) + int(nice) + int(system) + sum(map(int, interrupts[:3]))
    return ticks / os.sysconf("SC_CLK_TCK"), time.process_time()
