"""Requests that are declined go on where they can be served, or are refused for what declined them.

Two engines of small random models in this process. Each tells its state once, when it is listened
to, so what is known of it comes from its answers after that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from specrouter import SLO, SamplingParams
from specrouter.cluster.link import Attempt, Reply
from specrouter.engine.request import Request
from test_support.cluster_streams import PROMPT, output_of
from tests.specrouter.cluster.links import Cluster, FaultyLink
from tests.specrouter.faults import PATIENCE_S, wait_until

PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True)
ONCE: dict[str, Any] = {
    "routing": {"metrics_s": 60.0},
    "resume": {"silence_s": 600.0},
}


@pytest.fixture(scope="module")
def replicas(small_config: dict[str, Any]) -> Iterator[Cluster]:
    with Cluster(small_config, **ONCE) as made:
        yield made


@pytest.fixture
def cluster(replicas: Cluster) -> Iterator[Cluster]:
    """Its replicas tell their states anew after each test."""
    replicas.wait_until_ready()
    yield replicas
    members = replicas.router._fleet.members
    for link in replicas.links:
        replicas.router._loop.call(link.kill)
        wait_until(lambda name=link.name: members[name].standing == "lost")  # type: ignore[misc]
        replicas.router._loop.call(link.revive)


def request(slo: SLO | None) -> Request:
    return Request(prompt=PROMPT, params=PARAMS, speculation=None, slo=slo)


def answered_first(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    answer: Callable[[FaultyLink], Awaitable[Reply]],
) -> list[FaultyLink]:
    """The first replica that is asked answers so, and nothing else. Returns who is asked."""
    asked: list[FaultyLink] = []

    async def stream(link: FaultyLink, serve: Any, attempt: Attempt) -> AsyncGenerator[Reply]:
        asked.append(link)
        if len(asked) == 1:
            yield await answer(link)
            return
        async with aclosing(serve(attempt)) as replies:
            async for reply in replies:
                yield reply

    for link in cluster.links:
        monkeypatch.setattr(link, "stream", partial(stream, link, link.stream))
    return asked


def test_a_pair_whose_first_half_declines_is_left_for_the_other_half(
    small_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Cluster(small_config, pairs=[{"name": "p"}], **ONCE) as cluster:
        cluster.wait_until_ready()
        server = cluster.links[0].server
        monkeypatch.setattr(server, "_declines", lambda attempt, state: "it has no time")
        output = output_of(cluster.router, request(None))
        assert (output.finish_reason, len(output.token_ids)) == ("length", 8), output.error
        asked = [one["replica"] for one in cluster.router.instruments.routings()]
        assert asked == ["p-prefill", "p-decode"]


def test_a_replica_that_was_lost_since_the_ranking_is_not_asked(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls to a process that is gone would wait for the next one."""
    may_decline = asyncio.Event()

    async def decline(link: FaultyLink) -> Reply:
        await may_decline.wait()
        return Reply(link.server.state(), "it has no time")

    asked = answered_first(cluster, monkeypatch, decline)
    with ThreadPoolExecutor(1) as client:
        serving = client.submit(output_of, cluster.router, request(SLO(tpot_ms=60_000.0)))
        wait_until(lambda: bool(asked))
        [other] = [link for link in cluster.links if link is not asked[0]]
        cluster.router._loop.call(other.kill)
        wait_until(lambda: cluster.router._fleet.members[other.name].standing == "lost")
        cluster.router._loop.call(may_decline.set)
        output = serving.result(PATIENCE_S)
    assert output.finish_reason == "length"
    assert asked == [asked[0]] * 2, "it is ranked anew, without the one that was lost"


def test_a_replica_that_has_failed_declines_no_objective(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is known by its answer first; the request goes on elsewhere, though it would rather be
    rejected than be late."""

    async def fail(link: FaultyLink) -> Reply:
        failed = replace(link.server.state(), status="failed", failure="broken")
        return Reply(failed, "the replica is failed")

    asked = answered_first(cluster, monkeypatch, fail)
    output = output_of(cluster.router, request(SLO(tpot_ms=60_000.0, on_unattainable="reject")))
    assert (output.finish_reason, len(output.token_ids)) == ("length", 8), output.error
    assert len({link.name for link in asked}) == 2


def test_a_refusal_is_of_the_states_that_declined(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both were idle when they told their states, and have long queues when they are asked."""

    async def stream(link: FaultyLink, attempt: Attempt) -> AsyncGenerator[Reply]:
        own = link.server.state()
        busy = replace(own, running=own.rows, waiting=100, retry_after_s=10_000.0)
        yield Reply(busy, "100 wait")

    for link in cluster.links:
        monkeypatch.setattr(link, "stream", partial(stream, link))
    output = output_of(cluster.router, request(SLO(ttft_ms=60_000.0, on_unattainable="reject")))
    assert (output.finish_reason, output.error_field) == ("error", "unattainable")
    assert output.error is not None
    assert output.error.endswith("declined: 100 wait"), output.error
    assert output.feasible is not None
    assert output.feasible.ttft_ms is not None
    assert output.feasible.ttft_ms > 60_000.0, "so it may be tried again later"
