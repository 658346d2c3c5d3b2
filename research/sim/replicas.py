"""Replicas: several simulated services on machines of one kind, with one clock.

A request goes to the next replica in turn. Where the policy admits by objectives, it is handed over
as SLOs-Serve has it: to the first replica, from there on, that would admit it now; if none does, it
is best effort where it came first. Source: SLOs-Serve (arXiv 2504.08784), section 4.2.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from research.sim.handover import after_arrival, hand_over
from research.sim.request import SimulatedRequest
from research.sim.service import SimulatedService
from specrouter.bench.replay import LoadRequest
from specrouter.view import EngineView, RequestView


@dataclass
class Replicas:
    """A service and its clock. `make`: one replica."""

    make: Callable[[], SimulatedService]
    count: int
    hands_over: bool = True
    handed_over: int = 0  # requests so far
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
        if not (self.hands_over and self._by_objectives and self.count > 1):
            return self._replicas[first].send(request)
        seen = [one.shown(request) for one in self._replicas]
        views, asked = [view for view, _ in seen], seen[first][1]
        admits = {id(view): one.admits for view, one in zip(views, self._replicas, strict=True)}

        def attainable(view: EngineView, one: RequestView) -> bool:
            return admits[id(view)](after_arrival(view, one), one.id)

        found = hand_over(asked, views, first, attainable, self.count - 1)
        assert found.replica is not None, "nobody is declined"
        self.handed_over += found.replica != first
        sent = self._replicas[found.replica].send(request)
        sent.is_declined = found.is_best_effort
        return sent

    def now_s(self) -> float:
        return self._replicas[0].now_s()

    def sleep_s(self, duration_s: float) -> None:
        for one in self._replicas:
            one.sleep_s(duration_s)
