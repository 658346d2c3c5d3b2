"""Replicas in this process that fail as they are told to."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from specrouter import ChainRouter, RouterConfig
from specrouter.cluster.kv_transfer import KVLostError, KVMailbox, KVTransport
from specrouter.cluster.link import Attempt, Feed, ReplicaLostError, Reply
from specrouter.cluster.replica import ReplicaEngine, ReplicaServer
from specrouter.cluster.router import ClusterRouter
from statemgr import RowKV
from tests.specrouter.cluster.states import state
from tests.specrouter.faults import wait_until

Message = TypeVar("Message")

QUIET = {"silence_s": 30.0}
NEWS = {"metrics_s": 0.1}


class LocalTransport:
    """Within one process."""

    def __init__(self) -> None:
        self._mailbox = KVMailbox[RowKV]()

    async def give(self, kv: RowKV) -> str:
        ticket = uuid.uuid4().hex
        self._mailbox.leave(ticket, kv)
        return ticket

    async def take(self, ticket: str) -> RowKV:
        kv = self._mailbox.take(ticket)
        if kv is None:
            raise KVLostError("nothing is there")
        return kv


class LocalLink:
    """To a replica in this process.

    Args:
        make: the router of the replica, which takes as long as loading its models.
        transport: that all replicas share.
    """

    def __init__(
        self, name: str, make: Callable[[], ReplicaEngine], metrics_s: float, transport: KVTransport
    ) -> None:
        self.name = name
        self._make, self._metrics_s, self._transport = make, metrics_s, transport
        self._server: ReplicaServer | None = None
        self._begin()

    async def feed(self) -> AsyncGenerator[Feed]:
        own = self.server
        async with aclosing(own.feed()) as feed:
            async for news in feed:
                if self._server is not own:
                    return
                yield news

    def stream(self, attempt: Attempt) -> AsyncGenerator[Reply]:
        return self.server.stream(attempt)

    async def restart(self) -> None:
        self._server = None
        await asyncio.to_thread(self._engine.close)
        await asyncio.to_thread(self._begin)

    def close(self) -> None:
        self._engine.close()

    def _begin(self) -> None:
        self._engine = self._make()
        self._server = ReplicaServer(self._engine, self._metrics_s, self._transport)

    @property
    def server(self) -> ReplicaServer:
        if self._server is None:
            raise ReplicaLostError(f"{self.name} is being replaced")
        return self._server


class FaultyLink(LocalLink):
    """Attributes:
    dies_at: messages of all streams, after which it is lost: streams and feed raise, for good.
    hangs_at: the same, but it falls silent, until `is_back` is set; its engine goes on.
    fails_at: streams alone raise then, each of them once.
    replies: messages that it has sent.
    """

    def __init__(
        self, name: str, make: Callable[[], ReplicaEngine], metrics_s: float, transport: KVTransport
    ) -> None:
        super().__init__(name, make, metrics_s, transport)
        self.dies_at: int | None = None
        self.hangs_at: int | None = None
        self.fails_at: int | None = None
        self.is_back = asyncio.Event()
        self._killed = asyncio.Event()
        self.replies = 0
        self.streams = 0

    @property
    def is_dead(self) -> bool:
        counted = self.dies_at is not None and self.replies >= self.dies_at
        return counted or self._killed.is_set()

    def kill(self) -> None:
        """At once: streams and feed raise though they wait. In the loop that calls it."""
        self._killed.set()

    def revive(self) -> None:
        """Another one is in its place."""
        self.dies_at, self._killed = None, asyncio.Event()

    async def _alive(self, messages: AsyncGenerator[Message]) -> AsyncGenerator[Message]:
        """As long as it is not killed."""
        killed = asyncio.ensure_future(self._killed.wait())
        try:
            while True:
                coming = asyncio.ensure_future(anext(messages))
                try:
                    either: set[asyncio.Future[Any]] = {coming, killed}
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                    if killed.done():
                        raise ReplicaLostError(f"{self.name} was killed")
                    yield coming.result()
                finally:
                    coming.cancel()
                    await asyncio.gather(coming, return_exceptions=True)
        except StopAsyncIteration:
            return
        finally:
            killed.cancel()

    async def _fault(self) -> None:
        if self.is_dead:
            raise ReplicaLostError(f"{self.name} was killed")
        if self.hangs_at is not None and self.replies >= self.hangs_at:
            await self.is_back.wait()

    async def feed(self) -> AsyncGenerator[Feed]:
        await self._fault()
        async with aclosing(super().feed()) as feed, aclosing(self._alive(feed)) as every:
            async for news in every:
                await self._fault()
                yield news

    async def stream(self, attempt: Attempt) -> AsyncGenerator[Reply]:
        await self._fault()
        self.streams += 1
        async with (
            aclosing(super().stream(attempt)) as replies,
            aclosing(self._alive(replies)) as every,
        ):
            async for reply in every:
                for part in _in_parts(reply):
                    await self._fault()
                    if self.fails_at is not None and self.replies >= self.fails_at:
                        self.fails_at = None
                        raise ConnectionError("cut")
                    self.replies += 1
                    yield part


def _in_parts(reply: Reply) -> list[Reply]:
    """A delta each: there are more points at which a fault may come."""
    if len(reply.deltas) < 2:
        return [reply]
    parts = [Reply(deltas=(delta,)) for delta in reply.deltas]
    return [*parts[:-1], Reply(reply.state, deltas=parts[-1].deltas)]


class Telling:
    """A host of one replica that has no engine, and tells its state."""

    name = "a"

    def __init__(self) -> None:
        self.links: list[Any] = [self]
        self.is_closed = False

    async def feed(self) -> AsyncGenerator[Feed]:
        while True:
            yield Feed(state())
            await asyncio.sleep(0.01)

    async def leave(self) -> None:
        return None

    def close(self) -> None:
        self.is_closed = True


class Cluster:
    """A router over such replicas, and their host; close the router."""

    def __init__(
        self,
        settings: dict[str, Any],
        make: Callable[[str, RouterConfig], Any] | None = None,
        transport: KVTransport | None = None,
        **cluster: Any,
    ) -> None:
        replicas = {} if "pairs" in cluster else {"replicas": [{"name": "a", "count": 2}]}
        section = {**replicas, **cluster}
        config = RouterConfig.load({**settings, "cluster": section})
        assert config.cluster is not None
        period_s = config.cluster.routing.metrics_s
        self.links: list[FaultyLink] = []
        shared = transport or LocalTransport()

        for name, own in config.replicas().items():
            link = FaultyLink(name, partial(make or _engine, name, own), period_s, shared)
            self.links.append(link)
        self.router = ClusterRouter(config, lambda: self)

    @property
    def status(self) -> str:
        return self.router.health().status

    def wait_until_ready(self) -> None:
        wait_until(lambda: self.status == "ok")

    async def leave(self) -> None:
        return None

    def close(self) -> None:
        for link in self.links:
            link.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for link in self.links:
            self.router._loop.call(link.is_back.set)
        self.router.close()


def _engine(name: str, config: RouterConfig) -> ChainRouter:
    return ChainRouter.from_config(config)
