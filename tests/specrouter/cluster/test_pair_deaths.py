"""Either half of a pair may be killed at any moment of a request: nothing is lost, and the text is
that of one engine.

Two engines of small random models in float64 in this process, where nothing may differ.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from specrouter.cluster.kv_transfer import KVLostError
from specrouter.cluster.link import ReplicaLostError
from statemgr import RowKV
from test_support.cluster_moments import MOMENTS, Moment, WatchedLink
from test_support.cluster_streams import KINDS, LONG_PROMPT, Load, output_of
from tests.specrouter.cluster.links import Cluster, LocalTransport
from tests.specrouter.cluster.test_router_pairs import PAIR
from tests.specrouter.faults import wait_until

Settings = dict[str, Any]

HALVES = ("p-prefill", "p-decode")


class Store(LocalTransport):
    """What it carries is lost with the process that has written it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_lost = False

    async def take(self, ticket: str) -> RowKV:
        if self.is_lost:
            raise KVLostError("its owner has died")
        return await super().take(ticket)


class Death:
    """Kills a half the first time that any request comes to a moment; the message is lost if it is
    that half's own."""

    def __init__(self, cluster: Cluster, store: Store) -> None:
        self._cluster, self._store = cluster, store
        self._waits: tuple[Moment, str] | None = None
        for name, member in cluster.router._fleet.members.items():
            member.link = WatchedLink(member.link, partial(self._come, name))

    @property
    def has_come(self) -> bool:
        return self._waits is None

    def wait_for(self, moment: Moment, half: str) -> None:
        self._waits = moment, half

    def kill(self, half: str) -> None:
        """In the fleet's loop."""
        [link] = [link for link in self._cluster.links if link.name == half]
        link.kill()
        self._store.is_lost = half == "p-prefill"

    def undo(self) -> None:
        for link in self._cluster.links:
            self._cluster.router._loop.call(link.revive)
        self._store.is_lost, self._waits = False, None

    def _come(self, where: str, moment: Moment) -> None:
        if self._waits is None or self._waits[0] != moment:
            return
        half, self._waits = self._waits[1], None
        self.kill(half)
        if half == where:
            raise ReplicaLostError(f"{half} was killed")


@pytest.fixture(scope="module")
def settings(small_config: Settings) -> Settings:
    """Nothing of a prompt is found but what is handed over."""
    found = copy.deepcopy(small_config)
    found["engine"]["prefix_cache"] = False
    return found


@pytest.fixture(scope="module")
def load(settings: Settings) -> Load:
    return Load.of(settings, LONG_PROMPT)


@pytest.fixture(scope="module")
def store() -> Store:
    return Store()


@pytest.fixture(scope="module")
def cluster(settings: Settings, store: Store) -> Iterator[Cluster]:
    with Cluster(settings, transport=store, **PAIR) as made:
        yield made


@pytest.fixture(scope="module")
def death(cluster: Cluster, store: Store) -> Death:
    return Death(cluster, store)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_half_that_is_killed_at_any_moment_changes_no_text(
    cluster: Cluster, death: Death, load: Load, moment: Moment, half: str
) -> None:
    cluster.wait_until_ready()
    death.wait_for(moment, half)
    try:
        load.check(cluster.router)
        assert death.has_come, "it has been killed then"
        wait_until(lambda: cluster.status != "ok")
    finally:
        death.undo()


@pytest.mark.parametrize("half", HALVES)
def test_a_half_that_is_killed_while_nothing_runs_changes_no_text(
    cluster: Cluster, death: Death, load: Load, half: str
) -> None:
    """Requests come before its loss is known; those after it go to the other half."""
    cluster.wait_until_ready()
    cluster.router._loop.call(lambda: death.kill(half))
    try:
        load.check(cluster.router)
        wait_until(lambda: cluster.status != "ok")
        output_of(cluster.router, load.asked(KINDS["sampled"], None))
        assert {cluster.router.instruments.routings()[-1]["replica"], half} == set(HALVES)
    finally:
        death.undo()
