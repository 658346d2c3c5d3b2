"""Events: what happens when in a simulation, in the order of its times."""

import heapq
from collections.abc import Callable
from itertools import count

MESSAGE, CYCLE = 0, 1  # which comes first at the same time: who asks meets the next cycle

Happen = Callable[[], None]


class Events:
    """A clock. What happens at the same time happens in the order in which it was planned."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._planned: list[tuple[float, int, int, Happen]] = []
        self._numbers = count()

    def at(self, at_s: float, happen: Happen, kind: int = MESSAGE) -> None:
        """Now, where that is past."""
        planned = (max(at_s, self.now_s), kind, next(self._numbers), happen)
        heapq.heappush(self._planned, planned)

    def after(self, delay_s: float, happen: Happen) -> None:
        self.at(self.now_s + delay_s, happen)

    def run_until(self, end_s: float) -> None:
        """All up to then, but for the cycles that begin then."""
        while self._planned and self._planned[0][:2] < (end_s, CYCLE):
            self.now_s, _, _, happen = heapq.heappop(self._planned)
            happen()
        self.now_s = end_s
