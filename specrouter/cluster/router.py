"""ClusterRouter: replicas behind the interface of one router.

Contract: as in `ChainRouter`, an accepted request ends in exactly one last delta, and one that
cannot be served is refused before it is sent anywhere. Its text does not depend on which replicas
serve it, nor on how many of them are lost meanwhile. Prompts are tokenized and checked in this
process; no weights are loaded here.

Other modules define how messages travel (`ReplicaLink`), and which replica is chosen (`policy`).
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

from modelpool import ModelPool
from modelpool.config import PoolConfig
from modelpool.device_manager import DeviceInfo, read_devices
from modelpool.progress import LoadProgress
from specrouter.cluster.dispatcher import Dispatcher
from specrouter.cluster.fleet import Fleet, overload_of
from specrouter.cluster.forwarder import ForwardingContext, RequestForwarder
from specrouter.cluster.instruments import ClusterInstruments
from specrouter.cluster.link import ReplicaHost
from specrouter.cluster.resume import StreamProgress
from specrouter.config import RouterConfig
from specrouter.engine.input_validation import InputValidation
from specrouter.engine.request import Request
from specrouter.engine.request_meter import RequestMeter
from specrouter.engine.serving import Health
from specrouter.request.delta_stream import DeltaStream, DeltaStreams
from specrouter.request.errors import NoReplicaError, UnavailableError
from specrouter.request.lanes import Lanes
from specrouter.request.output import Delta
from specrouter.request.spec import RequestSpec
from specrouter.request.structure import Structure

logger = logging.getLogger(__name__)

Start = Callable[[], ReplicaHost]
Result = TypeVar("Result")

_FIRST_NEWS_S = 600.0  # for a replica's start: large models take minutes
_ROOMY = 2**60  # bytes


class ClusterRouter:
    """A router over replicas.

    Raises `ConfigError` if the replicas' fingerprints differ: texts would depend on which of them
    serves a request.

    Args:
        config: a configuration with a cluster.
        start: starts the replicas, after the rest of the configuration was checked. Their host is
            closed with the router.
        progress: gets each step of the start.
    """

    def __init__(
        self, config: RouterConfig, start: Start, progress: LoadProgress | None = None
    ) -> None:
        assert config.cluster is not None, "there is a section for it"
        self.config = config
        self.pool = _unplaced(next(iter(config.replicas().values())).pool, progress)
        engine = config.engine.model_copy(update={"kv_memory": None, "kv_budget_tokens": None})
        judged_by = config.model_copy(update={"engine": engine})  # replicas know what fits
        self._validation = InputValidation(judged_by, self.pool, lambda: self._fleet)
        self.slo_classes = self._validation.slo_classes
        self.sampling_defaults = self._validation.sampling_defaults
        self.lanes = Lanes()
        self._host = start()
        self._fleet = Fleet(self._host.links, config.cluster)
        meter = RequestMeter(self.pool.target, self.slo_classes)
        routing, waiting = config.cluster.routing, config.server.max_waiting
        pairs = {pair.name: pair.halves for pair in config.cluster.pairs}
        caches = config.engine.prefix_cache
        dispatcher = Dispatcher(self._fleet, routing, waiting, caches, pairs)
        self.limits = self._validation.context
        self.instruments = ClusterInstruments(self._fleet, dispatcher, meter)
        self._context = ForwardingContext(
            fleet=self._fleet,
            dispatcher=dispatcher,
            accounts=self.instruments.slo_accounts,
            config=config.cluster.resume,
            tokenizer=self.pool.tokenizer,
            eos_token_ids=self.pool.eos_token_ids,
        )
        self.streams = DeltaStreams()
        self._jobs = dict[Future[None], RequestForwarder]()
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
        """Queue requests like `ChainRouter.submit_each`; each sample is routed separately."""
        accepted = self._validation.accept_all(asked)
        self.check_room(max_waiting)
        running = [
            self._send(asked[number], spec, partial(stream.put, number))
            for number, spec in accepted
        ]
        stream.begin(running)

    def _send(
        self, asked: Request, spec: RequestSpec, listener: Callable[[Delta], None]
    ) -> "Future[None]":
        job = RequestForwarder(self._context, StreamProgress(asked, spec), listener)
        running = self._loop.start(job.run())
        self._jobs[running] = job
        running.add_done_callback(lambda done: self._jobs.pop(done, None))
        return running

    def check_structure(self, structure: Structure) -> None:
        """Compile a structure; see `ChainRouter`."""
        self._validation.check_structure(structure)

    def check_room(self, max_waiting: int | None = None) -> None:
        """Check for room; see `ChainRouter`."""
        if not self.is_healthy:
            raise UnavailableError("the router is closed")
        views = self._fleet.ready(time.monotonic())
        if not views:
            raise NoReplicaError
        found = overload_of(views, max_waiting)
        if found is not None:
            raise found

    @property
    def fingerprint(self) -> str:
        """The common fingerprint of all replicas."""
        assert self._fleet.fingerprint is not None, "all have reported theirs"
        return self._fleet.fingerprint

    @property
    def is_healthy(self) -> bool:
        """True until it is closed, also while no replica serves: one is expected back."""
        return not self._is_closed

    @property
    def failure(self) -> None:
        return None

    def health(self) -> Health:
        """Return the health, which is "stopped" only if no replica takes requests."""
        members = self._fleet.members.values()
        replicas = {one.name: one.standing + (f": {one.why}" if one.why else "") for one in members}
        ready = len(self._fleet.ready(time.monotonic()))
        if self._is_closed or not ready:
            return Health("stopped", replicas)
        return Health("ok" if ready == len(replicas) else "degraded", replicas)

    def restart_replicas(self) -> None:
        """Restart the replicas one after the other; requests of each continue elsewhere.

        Raises `TimeoutError` if one does not come back, or cannot be replaced, and does not restart
        those after it; `CancelledError` if the router is closed meanwhile.
        """
        for name in self._fleet.members:
            self._loop.run(self._fleet.restart(name, _FIRST_NEWS_S))

    def close(self, patience_s: float = 30.0) -> None:
        """End running requests with "cancelled", and the replicas."""
        with self._closing:  # a second caller waits for the first
            if self._is_closed:
                return
            self._is_closed = True
            self.lanes.close()
            with ExitStack() as last:  # also after errors
                last.callback(self._host.close)
                last.callback(self._loop.close)
                for job in list(self._jobs.values()):
                    self._loop.call(job.stop)
                self._loop.run(self._fleet.stop())
                self._loop.run(self._host.leave())

    def __enter__(self) -> "ClusterRouter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LoopThread:
    """An event loop in a thread of its own; close it from outside the loop."""

    def __init__(self, name: str) -> None:
        self._loop, self._is_over = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, Result]) -> "Future[Result]":
        """Start work from any thread; cancelling the returned future cancels the work."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run work to its end, and return its result or raise its error."""
        done = self.start(work)
        try:
            return done.result()
        except BaseException:
            done.cancel()
            raise

    def call(self, function: Callable[[], Result]) -> Result:
        """Call a function in the loop's thread, and return its result."""

        async def work() -> Result:
            return function()

        return self.run(work())

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel the work in the loop; a thread that does not end in time is abandoned."""
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._is_over.wait())


def _unplaced(config: PoolConfig, progress: LoadProgress | None) -> ModelPool:
    """Return the pool for tokenizers and headers, with nothing loaded.

    Devices, memory and kernels are the replicas', and may differ from this machine's.
    """
    models = tuple(model.model_copy(update={"attention": None}) for model in config.models)
    asked = config.model_copy(update={"models": models, "attention": "auto"})
    names = dict.fromkeys(
        [*(device.name for device in read_devices()), *(model.device for model in models)]
    )
    devices = [DeviceInfo(name, _ROOMY, _ROOMY) for name in names if name != "auto"]
    return ModelPool(asked, devices=devices, headers_only=True, progress=progress)
