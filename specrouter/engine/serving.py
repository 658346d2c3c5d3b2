"""ServingRouter: what the HTTP service asks of a router, whether it has one engine or many.

`ChainRouter` has an engine in this process, `ClusterRouter` replicas in others. What is shown of
engines is as old as the last they told; nothing here waits for a cycle.
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
    """Whether requests are taken.

    Attributes:
        status: "degraded": they are, by fewer replicas than there should be.
        replicas: what each one is doing; none where there is one engine only.
        loading: drafters that are loaded while requests are served.
        unloadable: those that could not be, and why; texts are served without them.
    """

    status: Literal["ok", "degraded", "stopped"]
    replicas: Mapping[str, str] = field(default_factory=dict)
    loading: tuple[str, ...] = ()
    unloadable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ReplicaFigures:
    """What a cluster counts of one replica.

    Attributes:
        state_age_s: None: it has told nothing. Of its state: None where it takes no requests.
        attempts: samples that were sent there; of them, those that it `declined`, and those that
            went on elsewhere (`moves`, by cause).
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
    """What is measured of a router; see `EngineInstruments`."""

    @property
    def slo_accounts(self) -> SloAccounts: ...

    def performance(self) -> PerformanceSnapshot: ...

    def statistics(self) -> EngineStatistics: ...

    def decoded(self) -> DecodeFigures: ...

    def engine_state(self) -> EngineState: ...

    def ended_requests(self) -> Iterator[Metric]:
        """What is counted as requests end, and as they are routed."""
        ...

    def replicas(self) -> Mapping[str, ReplicaFigures]:
        """By name; none where there is one engine only."""
        ...

    def decision(self) -> ChainDecision | None:
        """In use for requests that leave all open; None: nobody has told."""
        ...

    def cycles(self) -> Sequence[CycleTimes]:
        """The last ones, oldest first; none where there are replicas."""
        ...

    def decisions(self) -> Sequence[DecisionRecord]: ...

    def admissions(self) -> Sequence[AdmissionRecord]: ...

    def prefixes(self) -> Sequence[PrefixRecord]: ...

    def routings(self) -> Sequence[Mapping[str, Any]]:
        """The last requests that were given replicas, with terms and reasons, oldest first."""
        ...


class ServingRouter(Protocol):
    """See `ChainRouter` for what is not described here. Close it.

    Attributes, to be read:
        pool: its names and its tokenizer; models need not be loaded in this process.
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
        """False: it will not serve again."""
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
        """One after the other; returns when all serve again. Not where there are none."""
        ...

    def close(self, patience_s: float = 30.0) -> None: ...

    def __enter__(self) -> "ServingRouter": ...

    def __exit__(self, *error: object) -> None: ...


@asynccontextmanager
async def streamed(
    router: ServingRouter, asked: Sequence[Request], max_waiting: int | None = None
) -> AsyncIterator[DeltaStream]:
    """Deltas of several requests. All of these are queued or none; leaving cancels what still runs.

    Raises: see `ChainRouter.submit_each`.
    """
    router.check_room(max_waiting)  # before anything is done for it, and again at the end
    async with aclosing(router.streams.open()) as stream:
        await router.lanes.run(lane_for(asked), router.submit_each, asked, stream, max_waiting)
        yield stream
