"""The queue of requests that wait for a row, and an estimate of how long they wait."""

import bisect
import itertools
from collections import deque
from collections.abc import Callable, Iterator

from specrouter.request.running import RunningRequest

WAITING_SHOWN = 64  # requests of the queue, of each kind, that a policy may choose among


def _asks(request: RunningRequest) -> bool:
    """Return whether a request has an objective that was not declined."""
    return request.has_objective and not request.is_declined


class AdmissionQueue:
    """Requests that wait for a row, sorted by admission key, then by arrival.

    Belongs to the engine's thread; any thread may read its length.
    """

    def __init__(self) -> None:
        self._sorted: list[tuple[float, float, RunningRequest]] = []
        self._arrivals = itertools.count()
        self._objectives = 0  # waiting requests that came with one

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[RunningRequest]:
        """Iterate over the requests in their order."""
        return (request for *_, request in self._sorted)

    @property
    def has_objectives(self) -> bool:
        """True if any waiting request came with an objective."""
        return self._objectives > 0

    def push(self, request: RunningRequest) -> None:
        self._objectives += request.has_objective
        # Requests that gave up their KV memory have the lowest key; they keep their earlier order.
        then = request.place if request.gave_way else next(self._arrivals)
        bisect.insort(self._sorted, (request.admission_key, then, request))

    def first_of(
        self, count: int, those: Callable[[RunningRequest], bool] = lambda request: True
    ) -> list[RunningRequest]:
        """Return the first `count` requests for which `those` holds, in their order."""
        return list(itertools.islice(filter(those, self), count))

    def shown(self, count: int = WAITING_SHOWN) -> list[RunningRequest]:
        """Return the first `count` requests, and the first `count` with an open objective.

        Admission thus sees requests with objectives behind many requests without one.
        """
        first = self.first_of(count)
        if not self.has_objectives or len(first) == len(self):
            return first
        seen = set(map(id, first))
        asking = self.first_of(count, _asks)
        return [*first, *(request for request in asking if id(request) not in seen)]

    def remove(self, request: RunningRequest) -> None:
        """Remove a request; the search is short, because admitted requests are near the front."""
        del self._sorted[next(at for at, each in enumerate(self) if each is request)]
        self._objectives -= request.has_objective

    def take_out(self, leaves: Callable[[RunningRequest], bool]) -> list[RunningRequest]:
        """Remove and return the requests for which `leaves` holds."""
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
_RECENT_ENDS = 64  # ends of requests from which the waiting time of others is estimated


class AdmissionPace:
    """The mean time between ends of running requests, measured only while others wait.

    Times are in seconds, of one clock. One thread records; any thread may read.
    """

    def __init__(self) -> None:
        self._gaps_s: deque[float] = deque(maxlen=_RECENT_ENDS)  # before each of the last ends
        self._since_s: float | None = None  # last end, or start of the queue; None: no queue

    def note_queue(self, is_waiting: bool, now_s: float) -> None:
        """Record whether requests wait from now on."""
        if not is_waiting:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s

    def note_end(self, now_s: float) -> None:
        """Record that a running request has ended."""
        if self._since_s is not None:
            self._gaps_s.append(now_s - self._since_s)
            self._since_s = now_s

    def seconds_per_request(self, now_s: float) -> float | None:
        """Return the mean time between two ends, or None if no request has waited yet."""
        gaps_s, since_s = list(self._gaps_s), self._since_s
        going_on_s = 0.0 if since_s is None else now_s - since_s
        if not gaps_s and not going_on_s:
            return None
        return (sum(gaps_s) + going_on_s) / max(1, len(gaps_s))


def waiting_time_s(seconds_per_request: float | None, requests: int) -> float:
    """Return the time until so many requests are admitted, between 1 and 60 s."""
    wait_s = requests * (seconds_per_request or 0.0)
    return min(max(_SHORTEST_WAIT_S, wait_s), _LONGEST_WAIT_S)  # NaN: the shortest
