"""ClusterRouter: replicas behind the face of one router.

Contract: as `ChainRouter`, a request that is accepted ends in exactly one last delta, one that
cannot be served is refused before it is sent anywhere. Its text does not depend on which replicas
serve it, nor on how many of them are lost meanwhile. Prompts are read and refused in this process;
no weights are loaded here.

Not here: how messages travel (`ReplicaLink`), and which replica is chosen (`policy`).
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from prometheus_client.metrics_core import Metric

from modelpool import ModelPool
from modelpool.progress import LoadProgress
from specrouter.cluster.dispatcher import Dispatcher
from specrouter.cluster.fleet import Fleet, FleetLimits, overload_of
from specrouter.cluster.forwarder import ForwardingContext
from specrouter.cluster.job import Job
from specrouter.cluster.link import ReplicaHost, ReplicaReport
from specrouter.cluster.loop_thread import LoopThread
from specrouter.cluster.metrics import ClusterAccounts, replica_metrics, total, total_state
from specrouter.cluster.pairs import pairs_of
from specrouter.cluster.resume import Progress
from specrouter.config import RouterConfig
from specrouter.engine.admission_log import AdmissionRecord
from specrouter.engine.decode_counts import DecodeFigures
from specrouter.engine.engine_state import EngineState
from specrouter.engine.input_validation import InputValidation
from specrouter.engine.prefix_log import PrefixRecord
from specrouter.engine.request import Request
from specrouter.engine.request_meter import RequestMeter
from specrouter.engine.serving import Health
from specrouter.engine.slo_accounts import SloReport
from specrouter.profile.calibration import CalibrationFigures
from specrouter.profile.profiler import EngineStatistics
from specrouter.profile.snapshot import PerformanceSnapshot, TreeKey
from specrouter.request.delta_stream import DeltaStream, DeltaStreams
from specrouter.request.errors import UnavailableError
from specrouter.request.lanes import Lanes
from specrouter.request.output import Delta
from specrouter.request.spec import RequestSpec
from specrouter.request.structure import Structure
from specrouter.routing.decision_record import DecisionRecord

logger = logging.getLogger(__name__)

Start = Callable[[], ReplicaHost]
Record = TypeVar("Record", DecisionRecord, AdmissionRecord, PrefixRecord)

_FIRST_NEWS_S = 600.0  # of a replica that is being started: large models take minutes


class ClusterRouter:
    """Args:
    start: the replicas, once the rest of the configuration is found to be right. Their host is
        closed with the router.
    progress: told what is being done.

    Raises `ConfigError` where the replicas are not of one fingerprint: texts would depend on which
    of them serves a request.
    """

    def __init__(
        self, config: RouterConfig, start: Start, progress: LoadProgress | None = None
    ) -> None:
        assert config.cluster is not None, "there is a section for it"
        self.config = config
        self.pool = ModelPool(config.pool, headers_only=True, progress=progress)
        self._validation = InputValidation(config, self.pool, lambda: FleetLimits(self._fleet))
        self.slo_classes = self._validation.slo_classes
        self.lanes = Lanes()
        self._host = start()
        self._fleet = Fleet(self._host.links, config.cluster)
        self._meter = RequestMeter(self.pool.target, self.slo_classes)
        self.slo_accounts = ClusterAccounts(self._reports, self._meter)
        routing, waiting = config.cluster.routing, config.server.max_waiting
        pairs, caches = pairs_of(config.cluster), config.engine.prefix_cache
        dispatcher = Dispatcher(self._fleet, routing, waiting, caches, pairs)
        self._context = ForwardingContext(
            fleet=self._fleet,
            dispatcher=dispatcher,
            config=config.cluster.resume,
            tokenizer=self.pool.tokenizer,
            eos_token_ids=self.pool.eos_token_ids,
        )
        self.streams = DeltaStreams()
        self._jobs = dict[Future[None], Job]()
        self._is_closed, self._closing = False, threading.Lock()
        self._loop = LoopThread("specrouter-cluster")
        try:
            self._loop.call(self._fleet.start)
            self._loop.run(self._fleet.all_ready(_FIRST_NEWS_S))
        except BaseException:
            self.close()
            raise

    def submit_each(
        self, asked: Sequence[Request], stream: DeltaStream, max_waiting: int | None = None
    ) -> None:
        """See `ChainRouter.submit_each`. Each sample is sent to a replica by itself."""
        accepted = self._validation.accept_all(asked)
        self.check_room(max_waiting)
        running = [
            self._send(asked[number], spec, partial(stream.tell, number))
            for number, spec in accepted
        ]
        stream.begin(running)

    def _send(
        self, asked: Request, spec: RequestSpec, listener: Callable[[Delta], None]
    ) -> "Future[None]":
        job = Job(self._context, Progress(asked, spec), spec, self.slo_accounts, listener)
        running = self._loop.start(job.run())
        self._jobs[running] = job
        running.add_done_callback(lambda done: self._jobs.pop(done, None))
        return running

    def check_structure(self, structure: Structure) -> None:
        """See `ChainRouter`."""
        self._validation.check_structure(structure)

    def check_room(self, max_waiting: int | None = None) -> None:
        """See `ChainRouter`."""
        if not self.is_healthy:
            raise UnavailableError(self.failure or "the router is closed")
        views = self._fleet.ready(time.monotonic())
        if not views:
            raise UnavailableError("no replica is ready")
        found = overload_of(views, max_waiting)
        if found is not None:
            raise found

    def check_text(self, field: str, text: str) -> None:
        """See `ChainRouter`."""
        self._validation.context.check_text(field, text)

    @property
    def fingerprint(self) -> str:
        """Of all replicas."""
        assert self._fleet.fingerprint is not None, "all have told theirs"
        return self._fleet.fingerprint

    @property
    def max_prompt_characters(self) -> int:
        return self._validation.context.max_characters

    @property
    def max_request_tokens(self) -> int:
        return self._validation.context.max_tokens

    @property
    def is_healthy(self) -> bool:
        """As long as a replica serves or will again."""
        return not self._is_closed and not self._fleet.is_over

    @property
    def failure(self) -> str | None:
        if not self._fleet.is_over:
            return None
        causes = "; ".join(f"{one.name}: {one.why}" for one in self._fleet.members.values())
        return f"all replicas have failed: {causes}"

    @property
    def restarts(self) -> int:
        """Of engines, over all replicas."""
        return sum(report.restarts for report in self._reports())

    def health(self) -> Health:
        """Down only where no replica takes requests."""
        members = self._fleet.members.values()
        replicas = {one.name: one.standing + (f": {one.why}" if one.why else "") for one in members}
        ready = len(self._fleet.ready(time.monotonic()))
        if self._is_closed or not ready:
            return Health("stopped", replicas)
        return Health("ok" if ready == len(replicas) else "degraded", replicas)

    def restart_replicas(self) -> None:
        """One replica after the other, each emptied first: its requests go on elsewhere.

        Raises `TimeoutError` where one does not come back, or cannot be replaced: those after it
        are left as they are.
        """
        for name in list(self._fleet.members):
            self._loop.run(self._fleet.others_back(name, _FIRST_NEWS_S))
            logger.info("replica %s is being restarted", name)
            self._loop.call(partial(self._fleet.drain, name))
            self._loop.run(self._fleet.restarted(name, _FIRST_NEWS_S))
            self._loop.run(self._fleet.back(name, _FIRST_NEWS_S))

    def performance(self) -> PerformanceSnapshot:
        """Of the first replica that has told: estimates of several do not add up."""
        return next(
            (one.performance for one in self._reports()),
            PerformanceSnapshot(times={}, parameters={}),
        )

    def statistics(self) -> EngineStatistics:
        return total([EngineStatistics(), *(one.statistics for one in self._reports())])

    def decoded(self) -> DecodeFigures:
        return total(one.decoded for one in self._reports())

    def engine_state(self) -> EngineState:
        """Of the replicas that take requests, or of all where none does."""
        members = [one for one in self._fleet.members.values() if one.report is not None]
        ready = [one for one in members if one.standing == "ready"] or members
        return total_state(one.report.engine for one in ready if one.report is not None)

    def ended_requests(self) -> Iterator[Metric]:
        return self._meter.collect()

    def replica_metrics(self) -> Iterator[Metric]:
        yield from replica_metrics(self._fleet.members.values())
        yield self._context.dispatcher.ages.metric()

    def slo_report(self) -> SloReport:
        return self.slo_accounts.report()

    def calibration(self) -> Mapping[TreeKey, CalibrationFigures]:
        return {key: seen.calibration for key, seen in self.performance().trees.items()}

    def decisions(self) -> Sequence[DecisionRecord]:
        """Of all replicas, by their times; so are the others."""
        return _by_time(report.decisions for report in self._reports())

    def admissions(self) -> Sequence[AdmissionRecord]:
        return _by_time(report.admissions for report in self._reports())

    def prefixes(self) -> Sequence[PrefixRecord]:
        return _by_time(report.prefixes for report in self._reports())

    def routings(self) -> Sequence[Mapping[str, Any]]:
        return self._context.dispatcher.records

    def close(self, patience_s: float = 30.0) -> None:
        """Ends what runs with "cancelled", and the replicas."""
        with self._closing:  # who comes second waits for the first
            if self._is_closed:
                return
            self._is_closed = True
            self.lanes.close()
            for job in list(self._jobs.values()):
                self._loop.call(job.stop)
            self._loop.run(self._fleet.stop())
            self._loop.run(self._host.leave())
            self._loop.close()
            self._host.close(patience_s)

    def __enter__(self) -> "ClusterRouter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reports(self) -> list[ReplicaReport]:
        reports = [member.report for member in self._fleet.members.values()]
        return [report for report in reports if report is not None]


def _by_time(every: Iterable[Sequence[Record]]) -> Sequence[Record]:
    return sorted(chain.from_iterable(every), key=lambda record: record.unix_s)
