"""AdmissionQueue: requests that wait for a row, by their admission keys, then by their arrival."""

import heapq
import itertools
from collections.abc import Callable, Iterator

from specrouter.request import RunningRequest


class AdmissionQueue:
    """Belongs to the engine's thread; its length may be asked for anywhere."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, RunningRequest]] = []
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[RunningRequest]:
        """In no order."""
        return (request for *_, request in self._heap)

    def push(self, request: RunningRequest) -> None:
        heapq.heappush(self._heap, (request.admission_key, next(self._arrivals), request))

    @property
    def first(self) -> RunningRequest:
        return self._heap[0][-1]

    def pop(self) -> RunningRequest:
        return heapq.heappop(self._heap)[-1]

    def take_out(self, leaves: Callable[[RunningRequest], bool]) -> list[RunningRequest]:
        """Those that leave without having been admitted."""
        out, staying = list[RunningRequest](), list[tuple[float, int, RunningRequest]]()
        for item in self._heap:
            if leaves(item[-1]):
                out.append(item[-1])
            else:
                staying.append(item)
        if out:
            heapq.heapify(staying)
            self._heap = staying
        return out
