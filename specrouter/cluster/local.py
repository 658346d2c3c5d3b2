"""LocalLink: a replica in this process, for tests."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from specrouter.cluster.kv_transfer import KVTransport
from specrouter.cluster.link import Attempt, Feed, ReplicaLostError, Reply
from specrouter.cluster.replica import ReplicaEngine, ReplicaServer


class LocalLink:
    """Args:
    make: the router of the replica, which takes as long as loading its models.
    transport: that all replicas of a host share.
    """

    is_replaced = False

    def __init__(
        self,
        name: str,
        make: Callable[[], ReplicaEngine],
        metrics_s: float,
        transport: KVTransport | None = None,
    ) -> None:
        self.name = name
        self._make = make
        self._metrics_s = metrics_s
        self._transport = transport
        self._server: ReplicaServer | None = self._new()

    async def feed(self) -> AsyncGenerator[Feed]:
        own = self._own
        async with aclosing(own.feed()) as feed:
            async for news in feed:
                if self._server is not own:
                    return
                yield news

    def stream(self, attempt: Attempt) -> AsyncGenerator[Reply]:
        return self._own.stream(attempt)

    async def restart(self) -> None:
        old, self._server = self._own, None
        await asyncio.to_thread(old.close)
        self._server = await asyncio.to_thread(self._new)

    def close(self, patience_s: float) -> None:
        if self._server is not None:
            self._server.close(patience_s)

    def _new(self) -> ReplicaServer:
        return ReplicaServer(self._make(), self._metrics_s, self._transport)

    @property
    def _own(self) -> ReplicaServer:
        if self._server is None:
            raise ReplicaLostError(f"{self.name} is being replaced")
        return self._server
