"""A fleet ends when it is told to, whatever its links do then, and keeps whoever speaks."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from specrouter.cluster.fleet import Fleet, overload_of
from specrouter.cluster.link import Feed, ReplicaLink, ReplicaLostError
from specrouter.cluster.roster import STUCK_S
from specrouter.cluster.state import ReplicaView
from specrouter.config import ClusterConfig
from tests.specrouter.cluster.links import Telling
from tests.specrouter.cluster.states import state, view

CONFIG = ClusterConfig.model_validate({"replicas": [{"name": "replica"}]})


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
        fleet = Fleet([cast(ReplicaLink, link)], CONFIG)
        fleet.start()
        while not link.feeds:
            await asyncio.sleep(0)
        async with asyncio.timeout(10.0):
            await fleet.stop()

    asyncio.run(run())
    assert link.feeds == 1


async def _raises() -> None:
    raise ReplicaLostError("it cannot be started")


@pytest.mark.parametrize(
    ("restart", "error"), [(_raises, ReplicaLostError), (asyncio.Event().wait, TimeoutError)]
)
def test_a_replica_whose_restart_fails_serves_on_if_it_still_speaks(
    restart: Callable[[], Coroutine[Any, Any, object]], error: type[Exception]
) -> None:
    async def run() -> None:
        link: Any = Telling()
        link.restart = restart
        fleet = Fleet([link], CONFIG)

        def is_ready() -> bool:
            return fleet.members["a"].standing == "ready"

        fleet.start()
        try:
            await fleet.until(is_ready, 10.0)
            with pytest.raises(error):
                await fleet.restart("a", 0.02)
            await fleet.until(is_ready, 10.0)
        finally:
            await fleet.stop()

    asyncio.run(run())


def overload(views: list[ReplicaView], max_waiting: int | None) -> tuple[int, float] | None:
    error = overload_of(views, max_waiting)
    return None if error is None else (error.waiting, error.retry_after_s)


def test_rows_and_what_is_on_its_way_count() -> None:
    views = [view("a", state(4, 1, retry_after_s=5.0)), view("b", state(4, retry_after_s=2.0))]
    assert [overload(views, waiting) for waiting in (None, 2, 1)] == [None, None, (1, 2.0)]
    assert overload([views[0], replace(views[1], sent=2)], 2) == (3, 2.0)


def test_free_rows_anywhere_are_room() -> None:
    busy = view("a", state(4, 10))
    assert overload([busy, view("b", state(0))], 1) is None
    assert overload([busy, view("b", state(3), sent=1)], 1) == (10, 0.0)


def test_a_replica_that_is_stuck_in_a_cycle_is_chosen_only_where_all_are() -> None:
    links: list[Any] = [SimpleNamespace(name=name) for name in ("a", "b")]
    fleet = Fleet(links, CONFIG)

    def chosen(*steps_s: float) -> list[str]:
        for member, step_s in zip(fleet.members.values(), steps_s, strict=True):
            fleet._hear(member, Feed(state(step_s=step_s), None))
        views = fleet.ready(time.monotonic())
        assert fleet.excluded(views).keys() == {"a", "b"} - {one.name for one in views}
        return [one.name for one in views]

    assert chosen(STUCK_S, STUCK_S + 1.0) == ["a"]
    assert fleet.excluded([view("a")]) == {"b": "in one cycle for 11 s"}
    assert chosen(STUCK_S + 1.0, STUCK_S + 2.0) == ["a", "b"]
