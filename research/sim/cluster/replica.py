"""SimulatedReplica: a simulated engine as the process of a replica shows it.

Contract: what it tells is what `specrouter.cluster.replica.ReplicaServer` tells, from the same
quantities: its own times by its scheduler, requests, memory, and how long others waited for a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from research.sim.request import Commits, SimulatedRequest
from research.sim.service import SimulatedService
from specrouter.bench.replay import LoadRequest
from specrouter.cluster.replica import batches
from specrouter.cluster.state import ReplicaState
from specrouter.engine.admission_queue import waiting_time_s
from specrouter.profile.cycle_times import Workload
from specrouter.routing.chain_policy import ModelNames

_UNBOUNDED = 1 << 40  # KV tokens of a machine without a bound


@dataclass(eq=False)
class Served:
    """A request at a replica. `sent`: as it stands; a pair's halves have one each."""

    sent: SimulatedRequest
    is_last: bool = True  # nobody takes it over from there

    @property
    def is_done(self) -> bool:
        return self.is_last and self.sent.is_done


class Replica(Protocol):
    """What a simulated cluster asks of a replica. Times are the simulation's, in seconds.

    `rows_given_s`: when requests were given rows to decode in.
    """

    @property
    def rows_given_s(self) -> Sequence[float]: ...

    def state(self) -> ReplicaState: ...

    @property
    def next_s(self) -> float | None:
        """When it goes on by itself; None: not before a request comes."""
        ...

    def run_until(self, now_s: float) -> None:
        """All that begins before."""
        ...

    def go_on(self, now_s: float) -> None:
        """With what begins now, or could have begun before."""
        ...

    def receive(self, request: LoadRequest, sent_s: float, commits: list[Commits]) -> Served: ...


@dataclass(eq=False)
class SimulatedReplica:
    """Args: `service`, with a policy in use."""

    service: SimulatedService
    rows_given_s: list[float] = field(default_factory=list)
    _without_row: list[SimulatedRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        machine = self.service.machine
        sizes = batches(machine.max_requests)
        self._tpot_ms = tuple((size, predicted_tpot_ms(self.service, size)) for size in sizes)
        chunk = machine.prefill_chunk
        whole_ms = machine.times[machine.target].at(chunk)
        self._prefill_ms = (whole_ms if machine.batch is None else machine.batch.ms(chunk)) / chunk

    def state(self) -> ReplicaState:
        service, machine = self.service, self.service.machine
        running, waiting = service.running, service.waiting
        promised = [one.pace.tpot_ms(one.objective) for one in running if not one.is_declined]
        capacity = machine.kv_tokens or _UNBOUNDED
        return ReplicaState(
            running=len(running),
            waiting=len(waiting),
            rows=machine.max_requests,
            kv_reserved_tokens=service.held_tokens,
            kv_capacity_tokens=capacity,
            unread_tokens=sum(one.prompt_tokens for one in (*running, *waiting) if not one.tokens),
            tpot_ms=self._tpot_ms,
            prefill_ms=self._prefill_ms,
            tightest_tpot_ms=min((each for each in promised if each is not None), default=None),
            baseline_tpot_ms=machine.times[machine.target].at(1),
            max_request_tokens=capacity,
            retry_after_s=self._retry_after_s(len(running), len(waiting)),
            fingerprint=machine.target,
        )

    def _retry_after_s(self, running: int, waiting: int) -> float:
        """As `EngineThread.seconds_until_admitted` says it."""
        ahead = waiting - (self.service.machine.max_requests - running)
        if ahead < 0:
            return 0.0
        return waiting_time_s(self.service.seconds_per_request(), ahead + 1)

    @property
    def next_s(self) -> float | None:
        return self.service.next_cycle_s

    def run_until(self, now_s: float) -> None:
        self.service.run_until(now_s)

    def go_on(self, now_s: float) -> None:
        self.service.begin_cycle(now_s)
        placed = [one for one in self._without_row if one.row is not None]
        if placed:
            self.rows_given_s += [now_s] * len(placed)
        self._without_row = [
            one for one in self._without_row if one.row is None and not one.is_done
        ]

    def receive(
        self, request: LoadRequest, sent_s: float, commits: list[Commits], kv_tokens: int = 0
    ) -> Served:
        sent = self.service.receive(request, sent_s, commits, kv_tokens)
        self._without_row.append(sent)
        return Served(sent)


def predicted_tpot_ms(service: SimulatedService, requests: int) -> float:
    """Of each of so many that decode together, as `Engine.predicted_tpot_ms` says it."""
    snapshot, workload = service.snapshot(), Workload(requests=requests)
    scheduler = service.planner.scheduler
    chosen = scheduler.choose(snapshot, workload, ModelNames(service.machine.names))
    option = scheduler.predict(snapshot, workload, chosen.chain, chosen.shape)
    return option.ms_per_token * snapshot.machine
