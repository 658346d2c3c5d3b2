"""MemoryReturn: memory that nobody uses any more goes back to the system.

glibc keeps what was freed for later, in an arena for each thread: a text of 4 MB that is tokenized
leaves some hundred megabytes behind, however soon it is forgotten. `malloc_trim` gives them back.
Where there is no such function (macOS, musl), nothing is done.
"""

import ctypes
import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_DELAY_S = 1.0  # for others that are done meanwhile
_PAUSE_S = 5.0  # between two times, since threads that allocate wait for it


def _no_trim() -> None:
    pass


def _glibc_trim() -> Callable[[], object]:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return _no_trim
    return lambda: trim(0)


class MemoryReturn:
    """Thread-safe. Works in a thread of its own, which ends by itself."""

    def __init__(self, trim: Callable[[], object] | None = None) -> None:
        self._trim = trim or _glibc_trim()
        self._lock = threading.Lock()
        self._is_planned = False
        self._last_s = -_PAUSE_S

    def soon(self) -> None:
        """After something large is done; as often as one likes."""
        with self._lock:
            if self._is_planned:
                return
            self._is_planned = True
            delay_s = max(_DELAY_S, self._last_s + _PAUSE_S - time.monotonic())
        timer = threading.Timer(delay_s, self._give)
        timer.name, timer.daemon = "specrouter-memory", True
        timer.start()

    def _give(self) -> None:
        with self._lock:  # what is done from here on is for another time
            self._is_planned, self._last_s = False, time.monotonic()
        self._trim()
