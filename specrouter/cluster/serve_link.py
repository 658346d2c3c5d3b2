"""ServeHost: replicas in processes of Ray Serve, each an application of its own.

Contract: Ray Serve starts the processes, restarts those that die, and carries messages over gRPC;
it does not route. Calls to a replica use only its own handle. Serve replaces a dead replica; until
then calls to it wait, so only the feed may call a replica whose feed has ended.

KV goes through Ray's object store: written there once, and read in place by processes of the same
machine. What a process has written is lost with it.

This is the only module that imports Ray. Import it only where a configuration has a cluster.
"""

import asyncio
import logging
import os
import threading
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

# Ray reads these at its import: messages go over gRPC, handles live in the loop that calls them,
# and only our own service listens to HTTP. Access to Ray's ports can run code: they need a token.
os.environ.setdefault("RAY_SERVE_THROUGHPUT_OPTIMIZED", "1")
os.environ.setdefault("RAY_SERVE_ENABLE_DIRECT_INGRESS", "0")
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # cuda:1 is the machine's
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # else a late call starts a new Ray
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Else Ray's processes have a lower priority than all others of the machine.
os.environ.setdefault("RAY_worker_niceness", "0")

import ray
from ray import serve

from modelpool.progress import LoadProgress
from specrouter.cluster.kv_transfer import KVLostError, KVMailbox
from specrouter.cluster.link import Attempt, Feed, ReplicaLostError, Reply
from specrouter.cluster.multiplex import Order, Pieces, ReplyReceiver, ReplySender
from specrouter.cluster.replica import ReplicaEngine, ReplicaServer
from specrouter.config import RouterConfig
from specrouter.logs import configure_logs
from statemgr import RowKV

logger = logging.getLogger(__name__)

MakeRouter = Callable[[RouterConfig], ReplicaEngine]

_MAILBOX = {"name": "specrouter-kv-mailbox", "namespace": "specrouter"}
_PREFIX = "specrouter-"  # prefix of the applications' names
# Size of Ray's object store, without pairs and with them: it carries the KV between their halves,
# some prompts at once. What does not fit goes to the disk.
_STORE_BYTES, _PAIR_STORE_BYTES = 128 * 2**20, 2**30
_MANY = 100_000  # concurrent requests: no limit here, since the router limits them
_HEALTH_PERIOD_S, _HEALTH_TIMEOUT_S = 5.0, 15.0  # then Serve replaces a replica that hangs
_END_S = 5.0  # for a replica to end its requests


class ServeHost:
    """A host that starts or joins Ray and starts the replicas; its constructor waits for them.

    Args:
        config: a configuration with a cluster.
        make: makes the router of a replica's configuration, in the replica's process.
        progress: gets each step of the start.
    """

    def __init__(
        self, config: RouterConfig, make: MakeRouter, progress: LoadProgress | None = None
    ) -> None:
        assert config.cluster is not None, "there is a section for it"
        self._cluster = config.cluster
        self._names = tuple(config.replicas())
        self._mailbox: Any = None  # for KV, if there are pairs
        # Ray is started and ended in one thread: ending it from another takes ten seconds longer.
        self._thread = ThreadPoolExecutor(1, "specrouter-ray")
        self.links: list[ServeLink] = []
        progress = progress or LoadProgress()
        progress.begin("starting", "Ray")
        self._thread.submit(self._connect).result()
        progress.begin("starting", "replicas")
        try:
            self.links = self._thread.submit(self._started, config, make).result()
        except BaseException:
            self.close()
            raise

    async def leave(self) -> None:
        left = (link.leave() for link in self.links)
        for error in await asyncio.gather(*left, return_exceptions=True):
            if error is not None:
                logger.warning("a replica was left with an error: %r", error)

    def close(self) -> None:
        """End the replicas; a Ray that was started here ends with all its processes."""
        self._thread.submit(self._end).result()
        self._thread.shutdown()

    def _end(self) -> None:
        if self._cluster.address != "local":
            for name in self._names:
                serve.delete(_PREFIX + name)
            if self._mailbox is not None:
                ray.kill(self._mailbox)
        ray.shutdown()

    def _connect(self) -> None:
        """Start or join Ray.

        A local Ray is reachable only from this machine: any process that reaches it can run code.
        """
        quiet = {"log_to_driver": True, "configure_logging": False}
        if self._cluster.address != "local":
            ray.init(address=self._cluster.address, **quiet)
        else:
            ray.init(
                address="local",
                num_cpus=sum(self._cluster.threads.values()),
                include_dashboard=False,
                object_store_memory=_PAIR_STORE_BYTES if self._cluster.pairs else _STORE_BYTES,
                _node_ip_address="127.0.0.1",
                **quiet,
            )
        serve.start(proxy_location="Disabled", logging_config={"enable_access_log": False})

    def _started(self, config: RouterConfig, make: MakeRouter) -> "list[ServeLink]":
        threads, applications = self._cluster.threads, []
        if self._cluster.pairs:
            self._mailbox = start_mailbox()
        for name, own in config.replicas().items():
            options: dict[str, Any] = {
                "name": "replica",
                "num_replicas": 1,
                "max_ongoing_requests": _MANY,
                "health_check_period_s": _HEALTH_PERIOD_S,
                "health_check_timeout_s": _HEALTH_TIMEOUT_S,
                "graceful_shutdown_timeout_s": _END_S,
                "graceful_shutdown_wait_loop_s": 0.1,
                "ray_actor_options": {"num_cpus": threads[name]},
            }
            bound = serve.deployment(ServedReplica).options(**options)
            application = bound.bind(name, own, make, self._cluster.routing.metrics_s)
            applications.append(
                serve.RunTarget(application, name=_PREFIX + name, route_prefix=None)
            )
        serve.run_many(applications)
        return [ServeLink(name) for name in config.replicas()]


class ServedReplica:
    """A replica in its process, which forwards calls to `ReplicaServer`."""

    def __init__(self, name: str, config: RouterConfig, make: MakeRouter, metrics_s: float) -> None:
        configure_logs(logging.INFO, config.server.log_format)
        logger.info("replica %s is being loaded in process %d", name, os.getpid())
        self._name = name
        self._router = make(config)
        self._server = ReplicaServer(self._router, metrics_s, ObjectStoreTransport())
        self._senders: dict[str, ReplySender] = {}  # by caller

    async def feed(self) -> AsyncGenerator[Feed]:
        async for news in self._server.feed():
            yield news

    async def replies(self, caller: str) -> AsyncGenerator[Pieces]:
        """Yield the replies to all attempts of a caller, until it closes the stream."""
        sender = self._senders[caller] = ReplySender(self._server.stream)
        try:
            async with aclosing(sender.messages()) as messages:
                async for pieces in messages:
                    yield pieces
        finally:
            del self._senders[caller]

    async def take(self, caller: str, orders: Sequence[Order]) -> None:
        """Begin or cancel attempts. Raises `KeyError` for a caller without an open stream."""
        self._senders[caller].take(orders)

    def process(self) -> int:
        return os.getpid()

    def check_health(self) -> None:
        """Raise if the engine has failed; Serve then replaces the replica."""
        if not self._router.is_healthy:
            raise RuntimeError(self._router.failure or f"{self._name} has stopped")

    def end(self) -> None:
        """End the process shortly after; Serve replaces it."""
        threading.Timer(0.1, os._exit, (0,)).start()


class ServeLink:
    def __init__(self, name: str) -> None:
        self.name = name
        self._handle: Any = None  # created in the loop that calls it
        self._replies: ReplyReceiver | None = None

    async def feed(self) -> AsyncGenerator[Feed]:
        async for news in self._messages("feed"):
            yield news

    def stream(self, attempt: Attempt) -> AsyncGenerator[Reply]:
        if self._replies is None or self._replies.is_closed:
            self._replies = self._receiver(uuid.uuid4().hex)
        return self._replies.stream(attempt)

    def _receiver(self, caller: str) -> ReplyReceiver:
        async def post(orders: Sequence[Order]) -> None:
            await self._calls().take.remote(caller, orders)

        return ReplyReceiver(partial(self._messages, "replies", caller), post)

    async def leave(self) -> None:
        if self._replies is not None:
            await self._replies.close()
        if self._handle is not None:
            await self._handle.shutdown_async()

    async def process(self) -> int:
        """Return the id of the replica's present process."""
        return int(await self._calls().process.remote())

    async def restart(self) -> None:
        """Restart the replica; return when the old process is gone, while a new one starts."""
        old = await self.process()
        with suppress(Exception):  # it may end before it answers
            await self._calls().end.remote()
        while await self._is_there(old):
            await asyncio.sleep(0.1)

    async def _is_there(self, process: int) -> bool:
        try:
            return await self.process() == process
        except Exception as error:
            logger.debug("%s does not answer: %s", self.name, error)
            return True

    async def _messages(self, method: str, *arguments: Any) -> AsyncGenerator[Any]:
        answer = getattr(self._calls().options(stream=True), method).remote(*arguments)
        try:
            async for message in answer:
                yield message
        except ray.exceptions.RayError as error:
            raise ReplicaLostError(f"{type(error).__name__}: {error}") from error
        finally:
            answer.cancel()

    def _calls(self) -> Any:
        if self._handle is None:
            self._handle = serve.get_app_handle(_PREFIX + self.name)
        return self._handle


def start_mailbox() -> Any:
    """Return the mailbox of this Ray, which is started if there is none.

    Ray drops objects without references, so a mailbox in a process of its own holds references
    until they are taken.
    """
    options = {**_MAILBOX, "get_if_exists": True, "num_cpus": 0, "max_restarts": -1}
    return ray.remote(KVMailbox).options(**options).remote()


class ObjectStoreTransport:
    """A transport of KV through Ray's object store; it needs a mailbox."""

    def __init__(self) -> None:
        self._mailbox: Any = None

    async def give(self, kv: RowKV) -> str:
        ticket, mailbox = uuid.uuid4().hex, await self._found()
        reference = await asyncio.to_thread(ray.put, kv)
        await mailbox.leave.remote(ticket, [reference])  # a list, else Ray would fetch it there
        return ticket

    async def take(self, ticket: str) -> RowKV:
        mailbox = await self._found()
        left = await mailbox.take.remote(ticket)
        if left is None:
            raise KVLostError("nothing is there")
        kv: RowKV = await left[0]
        return kv

    async def _found(self) -> Any:
        if self._mailbox is None:
            self._mailbox = await asyncio.to_thread(ray.get_actor, **_MAILBOX)
        return self._mailbox
