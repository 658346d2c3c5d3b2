"""ThreadChoice: the CPU threads of a model's forwards while other programs use the same cores.

Contract: with as many threads as cores, each of a forward's barriers waits for the thread that has
no core at the moment: beside one busy program, two threads take some ten times as long as one. So
while other programs use the cores, one thread is tried now and then, and used if it is faster. On
cores of its own a model has all its threads, and nothing is measured.

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

_LOOK_S = 0.25  # between two measurements of the cores
_SOON_S = 0.05  # the same after an interval of `_LONG_S`: what others did then may be over
_LONG_S = 1.0
_BUSY, _FREE = 0.4, 0.2  # used cores beyond the spare ones: from here busy, from here free again
_ENOUGH = 2  # forwards of similar size with one thread, and with all, for a comparison
_COMPARE_AGAIN_S = 30.0

# CPU seconds of all programs on this one's cores, and of this one; None if unknown.
Usage = Callable[[], tuple[float, float] | None]


class OtherPrograms:
    """Measurement of how many of this process's cores other programs use.

    It is not exact: if threads race, one of them measures twice.
    """

    def __init__(
        self, usage: Usage | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._usage, self._clock = usage or _usage, clock
        self._looked_s, self._before = clock(), self._usage()
        self._wait_s = _LOOK_S
        self._cores = 0.0

    def cores(self) -> float:
        """Return the mean number of cores in the last quarter of a second or longer.

        The interval ends now or shortly before; after a long one it is shorter.
        """
        now_s = self._clock()
        elapsed_s = now_s - self._looked_s
        if self._before is not None and elapsed_s >= self._wait_s:
            now, before = self._usage(), self._before
            self._looked_s, self._before = now_s, now
            is_short = self._wait_s == _SOON_S
            self._wait_s = _SOON_S if elapsed_s >= _LONG_S else _LOOK_S
            if now is not None:
                others_s = (now[0] - before[0]) - (now[1] - before[1])
                cores = max(0.0, others_s / elapsed_s)
                # Usage is counted in hundredths of a second: a short look may only say "free".
                self._cores = min(cores, self._cores) if is_short else cores
        return self._cores


class ThreadChoice:
    """Choice of the threads of one model; not thread-safe, as a model runs one forward at a time.

    Args:
        most: threads of the model on cores of its own.
        cores: cores that this process may use.
        most_tokens: most tokens of a pack that may have one thread; larger ones always have all.
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
        self._is_busy = False  # other programs use the cores
        self._has_one = False  # one thread was faster
        self._compared_s = 0.0
        self._count = 0
        # Times in ms, by the power of two of the tokens, and by whether one thread was used.
        self._times: dict[tuple[int, bool], deque[float]] = {}

    @contextmanager
    def chosen(self, tokens: int) -> Iterator[None]:
        """Set the threads for a forward of `tokens` tokens, in a context."""
        is_small = tokens <= self._most_tokens
        threads = self.threads() if is_small else self._most
        is_compared = is_small and self._is_busy and not self._has_one
        began_s = self._clock()
        with cpu_threads(threads):
            yield
        if is_compared:
            self.took(tokens, threads, (self._clock() - began_s) * 1000)

    def threads(self) -> int:
        """Return the threads of the next forward that may have one."""
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
        return self._most if self._count % 2 else 1

    def took(self, tokens: int, threads: int, ms: float) -> None:
        """Record the time of a forward while the faster number of threads is not known."""
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
    """Return the usage from Linux' /proc/stat, which counts hundredths of a second."""
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
