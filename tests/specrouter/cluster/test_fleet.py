"""A fleet ends when it is told to, whatever its links do then."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

from specrouter.cluster.fleet import Fleet
from specrouter.cluster.link import Feed, ReplicaLink, ReplicaLostError
from specrouter.config import ClusterConfig


class _LostAtTheEnd:
    """Its feed says nothing, and raises when it is closed."""

    name = "replica"

    def __init__(self) -> None:
        self.feeds = 0

    async def feed(self) -> AsyncGenerator[Feed]:
        self.feeds += 1
        try:
            await asyncio.Event().wait()
            yield cast(Any, None)
        finally:
            raise ReplicaLostError("it went while it was left")


def test_a_feed_that_raises_as_it_is_closed_keeps_no_fleet_from_ending() -> None:
    link = _LostAtTheEnd()

    async def run() -> None:
        fleet = Fleet(
            [cast(ReplicaLink, link)],
            ClusterConfig.model_validate({"replicas": [{"name": "replica"}]}),
        )
        fleet.start()
        while not link.feeds:
            await asyncio.sleep(0)
        async with asyncio.timeout(10.0):
            await fleet.stop()

    asyncio.run(run())
    assert link.feeds == 1
