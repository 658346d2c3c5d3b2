"""A fleet ends when it is told to, whatever its links do then, and keeps whoever speaks."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, cast

import pytest

from specrouter.cluster.fleet import Fleet
from specrouter.cluster.link import Feed, ReplicaLink, ReplicaLostError
from specrouter.config import ClusterConfig
from tests.specrouter.cluster.states import state


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


class _Speaking:
    """Its feed goes on whatever becomes of its restart."""

    name = "replica"
    is_replaced = True

    def __init__(self, restart: Callable[[], Coroutine[Any, Any, object]]) -> None:
        self.restart = restart

    async def feed(self) -> AsyncGenerator[Feed]:
        while True:
            yield Feed(state())
            await asyncio.sleep(0.001)


async def _raises() -> None:
    raise ReplicaLostError("it cannot be started")


@pytest.mark.parametrize(
    ("restart", "error"), [(_raises, ReplicaLostError), (asyncio.Event().wait, TimeoutError)]
)
def test_a_replica_whose_restart_fails_serves_on_if_it_still_speaks(
    restart: Callable[[], Coroutine[Any, Any, object]], error: type[Exception]
) -> None:
    left: list[str] = []

    async def run() -> None:
        config = ClusterConfig.model_validate({"replicas": [{"name": "replica"}]})
        fleet = Fleet([cast(ReplicaLink, _Speaking(restart))], config)
        fleet.when_lost(left.append)
        fleet.start()
        try:
            await fleet.back("replica", 10.0)
            fleet.drain("replica")
            with pytest.raises(error):
                await fleet.restarted("replica", 0.02)
            await fleet.back("replica", 10.0)
        finally:
            await fleet.stop()

    asyncio.run(run())
    assert left == ["replica", "replica"], "told as it is emptied, and as its restart has failed"
