"""The interface between the HTTP service and a router, with one engine or with replicas.

`ChainRouter` has an engine in this process, `ClusterRouter` replicas in others. Figures of replicas
are as old as their last report; no call waits for a cycle.
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from prometheus_client.metrics_core import Metric

from modelpool import ModelPool
from specrouter.config import RouterConfig
from specrouter.engine.admission_log import AdmissionRecord
from specrouter.engine.context_limit import ContextLimit
from specrouter.engine.cycle_log import CycleTimes
from specrouter.engine.decode_counts import DecodeFigures
from specrouter.engine.engine_state import EngineState
from specrouter.engine.prefix_record import PrefixRecord
from specrouter.engine.request import Request, lane_for
from specrouter.engine.slo_accounts import SloAccounts
from specrouter.profile.profiler import EngineStatistics
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.request.delta_stream import DeltaStream, DeltaStreams
from specrouter.request.lanes import Lanes
from specrouter.request.objective import SLO
from specrouter.request.structure import Structure
from specrouter.routing.decision_record import DecisionRecord
from specrouter.view import ChainDecision


@dataclass(frozen=True)
class Health:
    """The health of a router.

    Attributes:
        status: "degraded": requests are taken, by fewer replicas than there should be.
        replicas: state of each replica, by name; empty with a single engine.
        loading: drafters that are loaded while requests are served.
        unloadable: drafters that could not be loaded, with the reasons; requests are served
            without them.
    """

    status: Literal["ok", "degraded", "stopped"]
    replicas: Mapping[str, str] = field(default_factory=dict)
    loading: tuple[str, ...] = ()
    unloadable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ReplicaFigures:
    """A cluster's figures of one replica.

    Attributes:
        state_age_s: age of its last report; None before the first.
        running, waiting, rows, kv_share: from that report; None if it takes no requests.
        attempts: samples that were sent to it.
        declined: those of them that it declined.
        moves: those of them that were moved to another replica, by cause.
    """

    is_up: bool
    state_age_s: float | None
    running: int | None
    waiting: int | None
    rows: int | None
    kv_share: float | None
    attempts: int
    declined: int
    moves: Mapping[str, int]


class Instruments(Protocol):
    """Measurements of a router; see `EngineInstruments`."""

    @property
    def slo_accounts(self) -> SloAccounts: ...

    def performance(self) -> PerformanceSnapshot: ...

    def statistics(self) -> EngineStatistics: ...

    def decoded(self) -> DecodeFigures: ...

    def engine_state(self) -> EngineState: ...

    def ended_requests(self) -> Iterator[Metric]:
        """Yield Prometheus metrics of ended requests, and of their routing."""
        ...

    def replicas(self) -> Mapping[str, ReplicaFigures]:
        """Return figures of the replicas by name; empty with a single engine."""
        ...

    def decision(self) -> ChainDecision | None:
        """Return the decision in use for requests that override nothing; None if not known yet."""
        ...

    def cycles(self) -> Sequence[CycleTimes]:
        """Return the last cycles, oldest first; empty with replicas."""
        ...

    def decisions(self) -> Sequence[DecisionRecord]: ...

    def admissions(self) -> Sequence[AdmissionRecord]: ...

    def prefixes(self) -> Sequence[PrefixRecord]: ...

    def routings(self) -> Sequence[Mapping[str, Any]]:
        """Return the last assignments of requests to replicas, with reasons, oldest first."""
        ...


class ServingRouter(Protocol):
    """A router as the HTTP service uses it; see `ChainRouter` for members without a description.

    It has to be closed. All attributes are read-only.

    Attributes:
        pool: names of the models, and the tokenizer; models need not be loaded in this process.
    """

    config: RouterConfig
    pool: ModelPool
    slo_classes: Mapping[str, SLO]
    sampling_defaults: Mapping[str, Any]
    lanes: Lanes
    streams: DeltaStreams
    limits: ContextLimit

    @property
    def fingerprint(self) -> str: ...

    @property
    def instruments(self) -> Instruments: ...

    @property
    def is_healthy(self) -> bool:
        """True unless the router will not serve again."""
        ...

    @property
    def failure(self) -> str | None: ...

    def submit_each(
        self, asked: Sequence[Request], stream: DeltaStream, max_waiting: int | None = None
    ) -> None: ...

    def check_structure(self, structure: Structure) -> None: ...

    def check_room(self, max_waiting: int | None = None) -> None: ...

    def health(self) -> Health: ...

    def restart_replicas(self) -> None:
        """Restart the replicas, if there are any, in turn; return when all serve again."""
        ...

    def close(self, patience_s: float = 30.0) -> None: ...

    def __enter__(self) -> "ServingRouter": ...

    def __exit__(self, *error: object) -> None: ...


@asynccontextmanager
async def streamed(
    router: ServingRouter, asked: Sequence[Request], max_waiting: int | None = None
) -> AsyncIterator[DeltaStream]:
    """Queue several requests, all or none, and yield the stream of their deltas.

    Leaving the context cancels requests that still run. Raises what `ChainRouter.submit_each` does.
    """
    router.check_room(max_waiting)  # before the work of tokenizing, and again when queued
    async with aclosing(router.streams.open()) as stream:
        await router.lanes.run(lane_for(asked), router.submit_each, asked, stream, max_waiting)
        yield stream
