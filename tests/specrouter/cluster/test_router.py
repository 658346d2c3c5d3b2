"""Requests survive their replicas with the same text, wherever these fail; nothing is lost.

Two engines of small random models in float64 in this process, where nothing may differ.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from modelpool.device_manager import DeviceInfo
from modelpool.errors import ConfigError
from specrouter import (
    SLO,
    ChainRouter,
    RequestError,
    RouterConfig,
    SamplingParams,
    UnavailableError,
)
from specrouter.cluster.fleet import FleetMember
from specrouter.cluster.link import Attempt, Feed, Reply
from specrouter.cluster.router import ClusterRouter
from specrouter.engine.request import Request
from specrouter.engine.serving import streamed
from test_support.cluster_streams import KINDS, PROMPT, Load, output_of, served
from tests.specrouter.cluster.links import NEWS, QUIET, Cluster, FaultyLink, Telling
from tests.specrouter.cluster.states import state
from tests.specrouter.faults import PATIENCE_S, wait_until

Settings = dict[str, Any]

GREEDY = Request(prompt=PROMPT, params=KINDS["greedy"], speculation=None, slo=None)
SOON_SILENT: Settings = {
    "routing": {"metrics_s": 0.1, "policy": "round-robin"},
    "resume": {"silence_s": 1.0},
}


def front(settings: Settings, host: Telling, **changed: Any) -> ClusterRouter:
    """Of that host's replica."""
    cluster = {"replicas": [{"name": "a"}]}
    config = RouterConfig.load({**settings, "cluster": cluster, **changed})
    return ClusterRouter(config, lambda: host)


@pytest.fixture(scope="module")
def load(small_config: Settings) -> Load:
    return Load.of(small_config)


@pytest.fixture(scope="module")
def replicas(small_config: Settings) -> Iterator[Cluster]:
    """Both get their share, so that each fault meets somebody."""
    with Cluster(small_config, resume=QUIET, routing={**NEWS, "policy": "round-robin"}) as made:
        yield made


@pytest.fixture
def cluster(replicas: Cluster) -> Cluster:
    replicas.wait_until_ready()
    return replicas


@pytest.fixture(scope="module")
def by_objective(small_config: Settings) -> Iterator[Cluster]:
    with Cluster(small_config, resume=QUIET, routing=NEWS) as made:
        made.wait_until_ready()
        yield made


# The same text, wherever it is cut


def test_a_cluster_gives_the_texts_of_one_engine(cluster: Cluster, load: Load) -> None:
    load.check(cluster.router)
    assert all(link.streams for link in cluster.links), "both have served"


@pytest.mark.parametrize("after", [0, 1, 3, 8])
def test_a_replica_that_dies_at_any_point_changes_no_text(
    cluster: Cluster, load: Load, after: int
) -> None:
    dying = cluster.links[after % 2]
    dying.dies_at = dying.replies + after
    try:
        load.check(cluster.router)
        assert dying.is_dead
        wait_until(lambda: cluster.status == "degraded")
    finally:
        dying.dies_at = None


@pytest.mark.parametrize("after", [0, 2])
def test_a_stream_that_breaks_alone_goes_on(cluster: Cluster, load: Load, after: int) -> None:
    cluster.links[0].fails_at = cluster.links[0].replies + after
    load.check(cluster.router)
    assert cluster.links[0].fails_at is None, "it has broken"


@pytest.mark.parametrize("after", [0, 5])
def test_streams_of_an_engine_that_fails_go_on_elsewhere(
    small_config: Settings, load: Load, after: int
) -> None:
    with Cluster(small_config, resume=QUIET, routing={**NEWS, "policy": "round-robin"}) as cluster:
        cluster.wait_until_ready()
        dying: Any = cluster.links[0]._engine
        steps = dying.instruments.engine.steps
        run, last = steps.run, steps.cycle + after

        def failing() -> None:
            run()
            if steps.cycle > last:
                raise RuntimeError("the device is gone")

        steps.run = failing
        load.check(cluster.router)
        assert dying.failure == "RuntimeError: the device is gone"
        wait_until(lambda: cluster.status == "degraded")


def test_a_replica_that_falls_silent_is_left_and_nothing_comes_twice(
    small_config: Settings, load: Load
) -> None:
    with Cluster(small_config, **SOON_SILENT) as cluster:
        hanging = cluster.links[0]
        hanging.hangs_at = hanging.replies + 6
        began_s = time.monotonic()
        load.check(cluster.router)
        assert time.monotonic() - began_s >= 0.9, "somebody waited for it"
        wait_until(lambda: cluster.status == "degraded")
        hanging.hangs_at = None
        cluster.router._loop.call(hanging.is_back.set)
        cluster.wait_until_ready()
        load.check(cluster.router)


def test_a_rolling_restart_under_load_changes_nothing(cluster: Cluster, load: Load) -> None:
    load.check_restart(cluster.router)
    assert cluster.status == "ok"


def test_a_rolling_restart_empties_no_replica_while_the_others_do_not_serve(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = cluster.router._fleet.members.values()
    restarted: list[tuple[str, str]] = []  # who was restarted, and what the other one did then

    async def restart(own: FleetMember, other: FleetMember) -> None:
        restarted.append((own.name, other.standing))

    monkeypatch.setattr(cluster.links[0], "restart", partial(restart, first, second))
    monkeypatch.setattr(cluster.links[1], "restart", partial(restart, second, first))
    cluster.router._loop.call(cluster.links[1].kill)
    wait_until(lambda: second.standing == "lost")
    with ThreadPoolExecutor(1) as operator:
        restarting = operator.submit(cluster.router.restart_replicas)
        try:
            for _ in range(2):
                reported_s = first.reported_s
                wait_until(lambda reported_s=reported_s: first.reported_s > reported_s)  # type: ignore[misc]
            assert first.standing == "ready"
        finally:
            cluster.router._loop.call(cluster.links[1].revive)
        restarting.result(PATIENCE_S)
    assert restarted == [("a-0", "ready"), ("a-1", "ready")]
    assert cluster.status == "ok"


# Clocks, seeds and limits


def test_a_seed_that_nobody_gave_is_drawn_once(cluster: Cluster) -> None:
    params = SamplingParams(max_new_tokens=30, temperature=1.0, ignore_eos=True)
    for link in cluster.links:
        link.fails_at = link.replies + 3
    output = output_of(cluster.router, replace(GREEDY, params=params))
    seeded = replace(GREEDY, params=replace(params, seed=output.seed))
    assert output_of(cluster.router, seeded).token_ids == output.token_ids


def test_times_count_from_the_first_submission(small_config: Settings) -> None:
    """The silence of the first replica is part of the time to the first token."""
    with Cluster(small_config, **SOON_SILENT) as cluster:
        cluster.links[0].hangs_at = cluster.links[0].replies
        output = output_of(cluster.router, replace(GREEDY, slo=SLO(ttft_ms=400.0)))
        assert output.metrics.ttft_ms is not None
        assert output.metrics.ttft_ms > 900.0
        assert output.metrics.attained is False
        report = cluster.router.instruments.slo_accounts.report()
        assert (report.total.requests, report.total.judged, report.total.attained) == (1, 1, 0)


def test_the_time_of_a_request_is_up_where_no_replica_is_left_to_say_so(
    small_config: Settings,
) -> None:
    with Cluster(small_config, resume={"silence_s": 0.5}, routing=NEWS) as cluster:
        for link in cluster.links:
            link.hangs_at = link.replies
        params = SamplingParams(max_new_tokens=30, logprobs=0)
        asked = replace(GREEDY, params=params, timeout_s=2.0)
        assert output_of(cluster.router, asked).finish_reason == "timeout"
        wait_until(lambda: cluster.status == "stopped")
        with pytest.raises(UnavailableError, match="no replica is ready"):
            cluster.router.check_room()


def test_the_time_of_a_request_is_up_where_its_replica_is_stuck_and_goes_on_telling(
    by_objective: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def takes_it(link: FaultyLink, attempt: Attempt) -> AsyncGenerator[Reply]:
        yield Reply(link.server.state())
        await asyncio.Event().wait()

    monkeypatch.setattr(FaultyLink, "stream", takes_it)
    output = output_of(by_objective.router, replace(GREEDY, timeout_s=0.1))
    assert (output.finish_reason, output.token_ids) == ("timeout", [])


def test_a_request_that_fails_everywhere_ends_with_the_cause(small_config: Settings) -> None:
    with Cluster(small_config, resume={"limit": 1}) as cluster:
        for link in cluster.links:
            link.fails_at = link.replies + 2
        params = SamplingParams(max_new_tokens=60, ignore_eos=True)
        output = output_of(cluster.router, replace(GREEDY, params=params))
        assert output.finish_reason == "error"
        assert output.error is not None
        assert "ConnectionError: cut" in output.error
        assert len(output.token_ids) >= 1, "what came is kept"


def test_a_client_that_leaves_frees_the_replica(cluster: Cluster) -> None:
    asked = replace(GREEDY, params=SamplingParams(max_new_tokens=200, ignore_eos=True))

    async def leave() -> None:
        async with streamed(cluster.router, [asked]) as deltas:
            await anext(deltas)

    asyncio.run(leave())
    wait_until(lambda: all(link.server.state().requests == 0 for link in cluster.links))
    assert all(link.server.state().requests == 0 for link in cluster.links), "they stay free"


def test_what_is_refused_is_sent_nowhere(cluster: Cluster) -> None:
    streams = [link.streams for link in cluster.links]
    bad = replace(GREEDY, params=SamplingParams(max_new_tokens=4000))
    with pytest.raises(RequestError) as caught:
        asyncio.run(served(cluster.router, [bad]))
    assert caught.value.field == "max_new_tokens"
    assert [link.streams for link in cluster.links] == streams


# Objectives


def test_an_objective_that_no_replica_attains_is_refused_where_that_is_asked(
    by_objective: Cluster,
) -> None:
    slo = SLO(tpot_ms=1e-4, on_unattainable="reject")
    output = output_of(by_objective.router, replace(GREEDY, slo=slo))
    assert (output.finish_reason, output.error_field) == ("error", "unattainable")
    assert output.feasible is not None
    assert output.feasible.tpot_ms is not None
    hops = by_objective.router.instruments.routings()[-2:]
    assert {one["replica"] for one in hops} == {"a-0", "a-1"}, "both were asked"
    assert hops[-1]["reason"].startswith("next in order, since")


def test_it_is_served_without_a_promise_otherwise(by_objective: Cluster, load: Load) -> None:
    asked = replace(GREEDY, slo=SLO(tpot_ms=1e-4))
    assert output_of(by_objective.router, asked).token_ids == load.outputs["greedy"][0].token_ids
    last = by_objective.router.instruments.routings()[-1]
    assert last["reason"].startswith("best effort, since")
    assert last["terms"]["a-0"]["slack"] < 0


# The whole


@pytest.mark.parametrize("limit", [{"kv_memory": "64MiB"}, {"kv_budget_tokens": 64}], ids=str)
def test_how_long_a_request_may_be_is_what_the_replicas_tell(
    small_config: Settings, limit: Settings
) -> None:
    engine = {**small_config["engine"], **limit}
    with front(small_config, Telling(), engine=engine) as router:
        assert router.limits.max_tokens == state().max_request_tokens
        router.limits.check_prompt(200)


def test_the_router_needs_no_device_no_memory_and_no_kernels_of_its_replicas(
    small_config: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = (DeviceInfo("cpu", 1, 1),)
    monkeypatch.setattr("modelpool.pool.read_devices", lambda: nothing)
    pool = small_config["pool"]
    first, *others = pool["models"]
    models = [{**first, "device": "cuda:7", "attention": "flashinfer"}, *others]
    with front(small_config, Telling(), pool={**pool, "models": models}) as router:
        assert set(router.pool.names) == {model["name"] for model in models}


def test_replicas_end_though_one_of_them_cannot_be_left(
    small_config: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def leave() -> None:
        raise ConnectionError("it is gone")

    host = Telling()
    monkeypatch.setattr(host, "leave", leave)
    router = front(small_config, host)
    with pytest.raises(ConnectionError):
        router.close()
    assert host.is_closed
    assert not router._loop._thread.is_alive()


def test_replicas_of_different_targets_are_refused(small_config: Settings) -> None:
    made = iter(["fp_one", "fp_other"])

    def make(name: str, config: Any) -> ChainRouter:
        router = ChainRouter.from_config(config)
        router.fingerprint = next(made)
        return router

    with pytest.raises(ConfigError, match="texts would differ") as caught:
        Cluster(small_config, make)
    assert "a-1 fp_other" in str(caught.value)


def test_figures_are_those_of_all_replicas(cluster: Cluster) -> None:
    router = cluster.router
    output_of(cluster.router, GREEDY)

    def told() -> bool:
        reports = [link.server.report() for link in cluster.links]
        reports += [one.past for one in router._fleet.members.values() if one.past is not None]
        produced = [report.decoded.produced_tokens for report in reports]
        return router.instruments.decoded().produced_tokens == sum(produced) > 0

    wait_until(told)  # each replica tells now and then
    assert router.instruments.engine_state().rows == 16
    assert router.instruments.statistics().cycles > 0
    replicas = router.instruments.replicas()
    assert sum(one.attempts for one in replicas.values()) > 0
    assert {one.is_up and one.rows for one in replicas.values()} == {8}
    [ages] = [one for one in router.instruments.ended_requests() if "state_age" in one.name]
    *_, count, _ = ages.samples
    assert (count.name[-6:], count.value > 0) == ("_count", True)
    assert router.instruments.routings()[-1]["policy"] == "round-robin"


def test_a_prompt_goes_where_its_beginning_was_read_until_that_replica_is_lost(
    small_config: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    routing = {**NEWS, "policy": "flowguard"}
    prompt = tuple(7 + at % 40 for at in range(200))
    asked = Request(
        prompt=prompt,
        params=SamplingParams(max_new_tokens=2, ignore_eos=True),
        speculation=None,
        slo=None,
    )
    unread: list[int] = []  # as replicas are told, which judge objectives by it

    def declines(attempt: Attempt, _: Any) -> None:
        unread.append(attempt.routed.prompt_tokens)

    with Cluster(small_config, resume=QUIET, routing=routing) as cluster:
        for link in cluster.links:
            monkeypatch.setattr(link.server, "_declines", declines)
        for _ in range(3):
            output_of(cluster.router, asked)
        first, *others = cluster.router.instruments.routings()
        assert [one["replica"] for one in others] == [first["replica"]] * 2
        assert others[-1]["terms"][first["replica"]]["C"] == pytest.approx(128 / 200)
        assert unread == [200, 72, 72]

        [link] = [link for link in cluster.links if link.name == first["replica"]]
        cluster.router._loop.call(link.kill)
        wait_until(lambda: cluster.status != "ok")
        cluster.router._loop.call(link.revive)
        cluster.wait_until_ready()
        output_of(cluster.router, asked)
        last = cluster.router.instruments.routings()[-1]
        assert last["terms"][link.name]["C"] == 0.0, "whoever is in its place has read nothing"


def test_a_feed_that_ends_makes_a_replica_lost_until_it_speaks_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = cluster.router._fleet.members["a-1"]

    async def short() -> AsyncGenerator[Feed]:
        raise ConnectionError("no feed")
        yield

    with monkeypatch.context() as patch:
        patch.setattr(cluster.links[1], "feed", short)
        patch.setattr(cluster.links[1], "dies_at", 0)
        wait_until(lambda: member.standing == "lost")
        wait_until(lambda: "ConnectionError: no feed" in member.why)
        assert cluster.status == "degraded"
    cluster.wait_until_ready()
