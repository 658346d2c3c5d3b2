"""KVMailbox: where keys and values of a prompt wait until another process takes them.

Contract: what is left there under a key is taken once. What is not taken for 30 s, because its
request has ended or went on elsewhere, is dropped when the next is left: until then it stays in
memory. Imports nothing of weight, so that it can be a process.
"""

import time
from collections.abc import Callable
from typing import Generic, TypeVar

Left = TypeVar("Left")

_KEPT_S = 30.0  # a hand-over takes milliseconds, and seconds where a row has to be waited for


class KVMailbox(Generic[Left]):
    """Args: `clock`: monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left: dict[str, tuple[float, Left]] = {}  # the oldest first

    def leave(self, key: str, left: Left) -> None:
        now_s = self._clock()
        for old, (left_s, _) in list(self._left.items()):
            if now_s - left_s < _KEPT_S:
                break
            del self._left[old]
        self._left[key] = (now_s, left)

    def take(self, key: str) -> Left | None:
        """None: it is not there, or not any more."""
        _, left = self._left.pop(key, (0.0, None))
        return left
