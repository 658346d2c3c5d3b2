"""Replicas: several simulated services on machines of one kind, with one clock.

A request goes to the next replica in turn. Where the policy admits by objectives, it is handed over
as SLOs-Serve has it: to the first replica, from there on, that would admit it now; if none does, it
is best effort where it came first. Load is balanced by attainability, not measured.
Source: SLOs-Serve (arXiv 2504.08784), section 4.2.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from research.sim.request import SimulatedRequest
from research.sim.service import SimulatedService
from specrouter.bench.replay import LoadRequest


@dataclass
class Replicas:
    """A service and its clock. `make`: one replica."""

    make: Callable[[], SimulatedService]
    count: int
    _turn: int = 0
    _replicas: list[SimulatedService] = field(init=False)

    def __post_init__(self) -> None:
        self._replicas = [self.make() for _ in range(self.count)]

    def use(self, policy: str) -> None:
        for one in self._replicas:
            one.use(policy)
        self._turn = 0
        self._by_objectives = policy in ("slos-serve", "slo")  # admissions that say no

    def send(self, request: LoadRequest) -> SimulatedRequest:
        first, self._turn = self._turn, (self._turn + 1) % self.count
        if not self._by_objectives or self.count == 1:
            return self._replicas[first].send(request)
        attaining = self._attaining(request, first)
        sent = self._replicas[first if attaining is None else attaining].send(request)
        sent.is_declined = attaining is None
        return sent

    def _attaining(self, request: LoadRequest, first: int) -> int | None:
        """The place of the first replica, from `first` on, that would admit the request beside what
        it has admitted; None: none would."""
        _, asked = self._replicas[first].shown(request)
        for hops in range(self.count):
            place = (first + hops) % self.count
            one = self._replicas[place]
            view, _ = one.shown(request)
            if one.admits(replace(view, waiting=view.waiting.joined(asked)), int(asked.id[0])):
                return place
        return None

    def now_s(self) -> float:
        return self._replicas[0].now_s()

    def sleep_s(self, duration_s: float) -> None:
        for one in self._replicas:
            one.sleep_s(duration_s)
