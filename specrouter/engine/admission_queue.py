"""AdmissionQueue: requests that wait for a row, by their admission keys, then by their arrival.

AdmissionPace: how long they wait.
"""

import bisect
import itertools
from collections import deque
from collections.abc import Callable, Iterator

from specrouter.request.running import RunningRequest

WAITING_SHOWN = 64  # requests of the queue, of each kind, that a policy may choose among


def _asks(request: RunningRequest) -> bool:
    """Has it an objective that may still be attained?"""
    return request.has_objective and not request.is_declined


class AdmissionQueue:
    """Belongs to the engine's thread; its length may be asked for anywhere."""

    def __init__(self) -> None:
        self._sorted: list[tuple[float, float, RunningRequest]] = []
        self._arrivals = itertools.count()
        self._objectives = 0  # requests that came with one and wait

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[RunningRequest]:
        """In their order."""
        return (request for *_, request in self._sorted)

    @property
    def has_objectives(self) -> bool:
        """Does anybody wait who came with an objective?"""
        return self._objectives > 0

    def push(self, request: RunningRequest) -> None:
        self._objectives += request.has_objective
        # Those that gave way, whose key is the least, come again in their order.
        then = request.place if request.gave_way else next(self._arrivals)
        bisect.insort(self._sorted, (request.admission_key, then, request))

    def first_of(
        self, count: int, those: Callable[[RunningRequest], bool] = lambda request: True
    ) -> list[RunningRequest]:
        """At most so many, in their order."""
        return list(itertools.islice(filter(those, self), count))

    def shown(self, count: int = WAITING_SHOWN) -> list[RunningRequest]:
        """The first, in their order, and behind them whoever else is among the first that have
        objectives: many without any in front do not hide them from admission."""
        first = self.first_of(count)
        if not self.has_objectives or len(first) == len(self):
            return first
        seen = set(map(id, first))
        asking = self.first_of(count, _asks)
        return [*first, *(request for request in asking if id(request) not in seen)]

    def remove(self, request: RunningRequest) -> None:
        """It is soon found: those that are admitted are among the first."""
        del self._sorted[next(at for at, each in enumerate(self) if each is request)]
        self._objectives -= request.has_objective

    def take_out(self, leaves: Callable[[RunningRequest], bool]) -> list[RunningRequest]:
        """Those that leave without having been admitted."""
        out, staying = list[RunningRequest](), list[tuple[float, float, RunningRequest]]()
        for item in self._sorted:
            if leaves(item[-1]):
                out.append(item[-1])
            else:
                staying.append(item)
        self._sorted = staying
        self._objectives -= sum(request.has_objective for request in out)
        return out


_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0
_RECENT_ENDS = 64  # of requests, whose pace tells how long others will wait


class AdmissionPace:
    """How long it takes that a request ends while others wait: time without a queue says nothing.

    Times are in seconds, of one clock. May be asked from any thread; it is told from one.
    """

    def __init__(self) -> None:
        self._gaps_s: deque[float] = deque(maxlen=_RECENT_ENDS)  # before each of the last ends
        self._since_s: float | None = None  # the last end, or the queue's beginning; None: no queue

    def note_queue(self, is_waiting: bool, now_s: float) -> None:
        """Whether requests wait from now on."""
        if not is_waiting:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s

    def note_end(self, now_s: float) -> None:
        """A request that ran has ended."""
        if self._since_s is not None:
            self._gaps_s.append(now_s - self._since_s)
            self._since_s = now_s

    def seconds_per_request(self, now_s: float) -> float | None:
        """None: nobody has waited yet."""
        gaps_s, since_s = list(self._gaps_s), self._since_s
        going_on_s = 0.0 if since_s is None else now_s - since_s
        if not gaps_s and not going_on_s:
            return None
        return (sum(gaps_s) + going_on_s) / max(1, len(gaps_s))


def waiting_time_s(seconds_per_request: float | None, requests: int) -> float:
    """Until so many have been admitted, within bounds that a caller can be told."""
    wait_s = requests * (seconds_per_request or 0.0)
    return min(max(_SHORTEST_WAIT_S, wait_s), _LONGEST_WAIT_S)  # NaN: the shortest
