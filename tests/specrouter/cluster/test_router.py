"""Requests survive their replicas with the same text, wherever these fail; nothing is lost.

Two engines of small random models in float64 in this process, where nothing may differ.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from modelpool.errors import ConfigError
from specrouter import (
    SLO,
    ChainRouter,
    RequestError,
    RequestOutput,
    SamplingParams,
    UnavailableError,
)
from specrouter.cluster.link import Feed
from specrouter.engine.request_args import RequestArgs
from specrouter.request.output import Delta, TokenLogprobs
from specrouter.request.structure import Structure
from tests.specrouter.cluster.links import Cluster, collected
from tests.specrouter.faults import PATIENCE_S, wait_until

Settings = dict[str, Any]

PROMPT = (5, 17, 300, 42, 9)
JSON = Structure("json_schema", {"type": "array", "items": {"type": "integer"}, "maxItems": 4})
QUIET = {"silence_s": 30.0}
NEWS = {"stale_s": 30.0, "metrics_s": 0.1}
# What a text can depend on, beside the target: each of them has to go on where it was cut.
KINDS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(max_new_tokens=20, ignore_eos=True),
    "sampled": SamplingParams(max_new_tokens=16, temperature=0.9, seed=3, top_p=0.95),
    "penalties": SamplingParams(
        max_new_tokens=16,
        temperature=0.7,
        seed=5,
        presence_penalty=0.8,
        frequency_penalty=0.4,
        repetition_penalty=1.2,
        min_tokens=6,
        logit_bias={7: 2.0},
    ),
    "structure": SamplingParams(max_new_tokens=24, temperature=1.0, seed=8, structure=JSON),
    "samples": SamplingParams(max_new_tokens=10, temperature=1.0, seed=9, n=2, ignore_eos=True),
    "logprobs": SamplingParams(max_new_tokens=10, temperature=0.5, seed=4, logprobs=2,
                               prompt_logprobs=1),
    "bad words": SamplingParams(max_new_tokens=12, temperature=1.0, seed=6,
                                bad_words_ids=((42, 9), (17,)), min_p=0.01),
}  # fmt: skip


@pytest.fixture(scope="module")
def settings(small_config: Settings) -> Settings:
    return copy.deepcopy(small_config)


@pytest.fixture(scope="module")
def expected(settings: Settings) -> dict[str, list[RequestOutput]]:
    """By one engine, undisturbed; with texts to stop at that lie in the middle of others."""
    with ChainRouter.from_config(settings) as router:
        found = {name: router.generate([list(PROMPT)], each) for name, each in KINDS.items()}
        whole = found["greedy"][0].text
        stopped = SamplingParams(max_new_tokens=20, ignore_eos=True, stop=(whole[-9:-5],))
        return {**found, "stop": router.generate([list(PROMPT)], stopped)}


@pytest.fixture(scope="module")
def cluster(settings: Settings) -> Iterator[Cluster]:
    """Both replicas get their share, so that each fault meets somebody."""
    routing = {**NEWS, "policy": "round-robin"}
    with Cluster(settings, resume=QUIET, routing=routing) as made:
        yield made


@pytest.fixture(scope="module")
def by_objective(settings: Settings) -> Iterator[Cluster]:
    with Cluster(settings, resume=QUIET, routing=NEWS) as made:
        yield made


def params_of(kind: str, expected: dict[str, list[RequestOutput]]) -> SamplingParams:
    if kind == "stop":
        text = expected["greedy"][0].text[-9:-5]
        return SamplingParams(max_new_tokens=20, ignore_eos=True, stop=(text,))
    return KINDS[kind]


async def served(cluster: Cluster, asked: list[RequestArgs]) -> dict[tuple[int, int], list[Delta]]:
    found: list[tuple[int, Delta]] = []
    async with asyncio.timeout(PATIENCE_S), aclosing(cluster.router.astream_each(asked)) as deltas:
        async for number, delta in deltas:
            found.append((number, delta))
    return collected(found)


def all_kinds(
    cluster: Cluster, expected: dict[str, list[RequestOutput]]
) -> dict[tuple[str, int], list[Delta]]:
    """All at once; by kind and sample."""
    kinds = list(expected)
    asked = [RequestArgs(PROMPT, params_of(kind, expected), None, None) for kind in kinds]
    found = asyncio.run(served(cluster, asked))
    return {(kinds[number], sample): deltas for (number, sample), deltas in found.items()}


def assert_same(
    found: dict[tuple[str, int], list[Delta]], expected: dict[str, list[RequestOutput]]
) -> None:
    assert set(found) == {(kind, one.index) for kind, every in expected.items() for one in every}
    for (kind, sample), deltas in found.items():
        whole, output = expected[kind][sample], deltas[-1].output
        assert output is not None, kind
        assert [one.finish_reason for one in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert output.token_ids == whole.token_ids, kind
        assert (output.text, output.finish_reason) == (whole.text, whole.finish_reason), kind
        assert output.stop_reason == whole.stop_reason
        assert [token for one in deltas for token in one.token_ids] == whole.token_ids, kind
        assert "".join(one.text for one in deltas) == whole.text, kind
        assert_close(output.logprobs, whole.logprobs)
        assert_close(output.prompt_logprobs, whole.prompt_logprobs)


def assert_close(found: list[Any] | None, expected: list[Any] | None) -> None:
    assert (found is None) == (expected is None)
    for one, other in zip(found or [], expected or [], strict=True):
        if isinstance(other, TokenLogprobs):
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
        else:
            assert one is other


def ready(cluster: Cluster) -> bool:
    return cluster.router.health().status == "ok"


def output_of(cluster: Cluster, asked: RequestArgs) -> RequestOutput:
    """Of a request alone."""
    [deltas] = asyncio.run(served(cluster, [asked])).values()
    output = deltas[-1].output
    assert output is not None
    assert [token for one in deltas for token in one.token_ids] == output.token_ids
    return output


# The same text, wherever it is cut


def test_a_cluster_gives_the_texts_of_one_engine(
    cluster: Cluster, expected: dict[str, list[RequestOutput]]
) -> None:
    assert_same(all_kinds(cluster, expected), expected)
    assert all(link.streams for link in cluster.links), "both have served"


@pytest.mark.parametrize("after", [0, 1, 2, 3, 4, 6, 8, 10])
def test_a_replica_that_dies_at_any_point_changes_no_text(
    cluster: Cluster, expected: dict[str, list[RequestOutput]], after: int
) -> None:
    wait_until(lambda: ready(cluster))
    dying = cluster.links[after % 2]
    dying.dies_at = dying.replies + after
    try:
        found = all_kinds(cluster, expected)
        assert_same(found, expected)
        assert dying.is_dead
        wait_until(lambda: cluster.router.health().status == "degraded")
    finally:
        dying.dies_at = None


@pytest.mark.parametrize("after", [0, 2, 7])
def test_a_stream_that_breaks_alone_goes_on(
    cluster: Cluster, expected: dict[str, list[RequestOutput]], after: int
) -> None:
    wait_until(lambda: ready(cluster))
    cluster.links[0].fails_at = cluster.links[0].replies + after
    assert_same(all_kinds(cluster, expected), expected)
    assert cluster.links[0].fails_at is None, "it has broken"


def test_a_replica_that_falls_silent_is_left_and_nothing_comes_twice(
    settings: Settings, expected: dict[str, list[RequestOutput]]
) -> None:
    routing = {"stale_s": 1.5, "metrics_s": 0.1, "policy": "round-robin"}
    with Cluster(settings, resume={"silence_s": 1.0}, routing=routing) as cluster:
        hanging = cluster.links[0]
        hanging.hangs_at = hanging.replies + 6
        began_s = time.monotonic()
        found = all_kinds(cluster, expected)
        assert time.monotonic() - began_s >= 0.9, "somebody waited for it"
        assert_same(found, expected)
        wait_until(lambda: cluster.router.health().status == "degraded")
        hanging.hangs_at = None
        cluster.router._loop.call(hanging.is_back.set)
        wait_until(lambda: ready(cluster))
        assert_same(all_kinds(cluster, expected), expected)


def test_a_rolling_restart_under_load_changes_nothing(
    cluster: Cluster, expected: dict[str, list[RequestOutput]]
) -> None:
    wait_until(lambda: ready(cluster))
    asked = [RequestArgs(PROMPT, params_of(kind, expected), None, None) for kind in expected]

    async def both() -> list[dict[tuple[int, int], list[Delta]]]:
        restarting = asyncio.ensure_future(asyncio.to_thread(cluster.router.restart_replicas))
        rounds: list[dict[tuple[int, int], list[Delta]]] = []
        while not restarting.done() or not rounds:
            rounds.append(await served(cluster, asked))
        await restarting
        return rounds

    kinds = list(expected)
    for found in asyncio.run(both()):
        named = {(kinds[number], sample): each for (number, sample), each in found.items()}
        assert_same(named, expected)
    assert ready(cluster)


def test_a_rolling_restart_empties_no_replica_while_the_others_do_not_serve(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until(lambda: ready(cluster))
    first, second = cluster.router._fleet.members.values()
    restarted: list[tuple[str, str]] = []  # who was restarted, and what the other one did then

    async def restart_first() -> None:
        restarted.append(("a-0", second.standing))

    async def restart_second() -> None:
        restarted.append(("a-1", first.standing))

    monkeypatch.setattr(cluster.links[0], "restart", restart_first)
    monkeypatch.setattr(cluster.links[1], "restart", restart_second)
    cluster.router._loop.call(cluster.links[1].kill)
    wait_until(lambda: second.standing == "lost")
    with ThreadPoolExecutor(1) as operator:
        restarting = operator.submit(cluster.router.restart_replicas)
        try:
            for _ in range(2):
                told_s = first.told_s
                wait_until(lambda told_s=told_s: first.told_s > told_s)  # type: ignore[misc]
            assert first.standing == "ready"
        finally:
            cluster.router._loop.call(cluster.links[1].revive)
        restarting.result(PATIENCE_S)
    assert restarted == [("a-0", "ready"), ("a-1", "ready")]
    assert ready(cluster)


# Clocks, seeds and limits


def test_a_seed_that_nobody_gave_is_drawn_once(cluster: Cluster) -> None:
    wait_until(lambda: ready(cluster))
    params = SamplingParams(max_new_tokens=30, temperature=1.0, ignore_eos=True)
    for link in cluster.links:
        link.fails_at = link.replies + 3
    output = output_of(cluster, RequestArgs(PROMPT, params, None, None))
    seeded = RequestArgs(PROMPT, replace(params, seed=output.seed), None, None)
    assert output_of(cluster, seeded).token_ids == output.token_ids


def test_times_count_from_the_first_submission(settings: Settings) -> None:
    """The silence of the first replica is part of the time to the first token."""
    routing = {"stale_s": 1.5, "metrics_s": 0.1, "policy": "round-robin"}
    with Cluster(settings, resume={"silence_s": 1.0}, routing=routing) as cluster:
        cluster.links[0].hangs_at = cluster.links[0].replies
        asked = RequestArgs(PROMPT, KINDS["greedy"], None, SLO(ttft_ms=400.0))
        output = output_of(cluster, asked)
        assert output.metrics.ttft_ms is not None
        assert output.metrics.ttft_ms > 900.0
        assert output.metrics.attained is False
        report = cluster.router.slo_report()
        assert (report.total.requests, report.total.judged, report.total.attained) == (1, 1, 0)


def test_the_time_of_a_request_is_up_where_no_replica_is_left_to_say_so(
    settings: Settings,
) -> None:
    routing = {"stale_s": 0.5, "metrics_s": 0.1}
    with Cluster(settings, resume={"silence_s": 0.5}, routing=routing) as cluster:
        for link in cluster.links:
            link.hangs_at = link.replies
        params = SamplingParams(max_new_tokens=30, logprobs=0)
        asked = RequestArgs(PROMPT, params, None, None, 0, 2.0)
        assert output_of(cluster, asked).finish_reason == "timeout"
        wait_until(lambda: cluster.router.health().status == "stopped")
        with pytest.raises(UnavailableError, match="no replica is ready"):
            cluster.router.check_room()


def test_a_request_that_fails_everywhere_ends_with_the_cause(settings: Settings) -> None:
    with Cluster(settings, resume={"limit": 1}) as cluster:
        for link in cluster.links:
            link.fails_at = link.replies + 2
        params = SamplingParams(max_new_tokens=60, ignore_eos=True)
        output = output_of(cluster, RequestArgs(PROMPT, params, None, None))
        assert output.finish_reason == "error"
        assert output.error is not None
        assert "ConnectionError: cut" in output.error
        assert len(output.token_ids) >= 1, "what came is kept"


def test_a_client_that_leaves_frees_the_replica(cluster: Cluster) -> None:
    wait_until(lambda: ready(cluster))
    params = SamplingParams(max_new_tokens=200, ignore_eos=True)

    async def leave() -> None:
        deltas: AsyncGenerator[tuple[int, Delta]]
        async with aclosing(
            cluster.router.astream_each([RequestArgs(PROMPT, params, None, None)])
        ) as deltas:
            async for _ in deltas:
                return

    asyncio.run(leave())
    wait_until(lambda: all(link.local._own.state().requests == 0 for link in cluster.links))
    assert all(link.local._own.state().requests == 0 for link in cluster.links), "they stay free"


def test_what_is_refused_is_sent_nowhere(cluster: Cluster) -> None:
    wait_until(lambda: ready(cluster))
    streams = [link.streams for link in cluster.links]
    bad = RequestArgs(PROMPT, SamplingParams(max_new_tokens=4000), None, None)
    with pytest.raises(RequestError) as caught:
        asyncio.run(served(cluster, [bad]))
    assert caught.value.field == "max_new_tokens"
    assert [link.streams for link in cluster.links] == streams


# Objectives


def test_an_objective_that_no_replica_attains_is_refused_where_that_is_asked(
    by_objective: Cluster,
) -> None:
    wait_until(lambda: ready(by_objective))
    slo = SLO(tpot_ms=1e-4, on_unattainable="reject")
    output = output_of(by_objective, RequestArgs(PROMPT, KINDS["greedy"], None, slo))
    assert (output.finish_reason, output.error_field) == ("error", "unattainable")
    assert output.feasible is not None
    assert output.feasible.tpot_ms is not None
    hops = by_objective.router.routings()[-2:]
    assert {one["replica"] for one in hops} == {"a-0", "a-1"}, "both were asked"
    assert hops[-1]["reason"].startswith("next in order, since")


def test_it_is_served_without_a_promise_otherwise(
    by_objective: Cluster, expected: dict[str, list[RequestOutput]]
) -> None:
    wait_until(lambda: ready(by_objective))
    asked = RequestArgs(PROMPT, KINDS["greedy"], None, SLO(tpot_ms=1e-4))
    assert output_of(by_objective, asked).token_ids == expected["greedy"][0].token_ids
    last = by_objective.router.routings()[-1]
    assert last["reason"].startswith("best effort, since")
    assert last["terms"]["a-0"]["slack"] < 0


# The whole


def test_replicas_of_different_targets_are_refused(settings: Settings) -> None:
    made = iter(["fp_one", "fp_other"])

    def make(name: str, config: Any) -> ChainRouter:
        router = ChainRouter.from_config(config)
        router._fingerprint = next(made)
        return router

    with pytest.raises(ConfigError, match="texts would differ") as caught:
        Cluster(settings, make)
    assert "a-1 fp_other" in str(caught.value)


def test_figures_are_those_of_all_replicas(cluster: Cluster) -> None:
    wait_until(lambda: ready(cluster))
    router = cluster.router
    output_of(cluster, RequestArgs(PROMPT, KINDS["greedy"], None, None))

    def told() -> bool:
        produced = [link.local._own.report().decoded.produced_tokens for link in cluster.links]
        return router.decoded().produced_tokens == sum(produced) > 0

    wait_until(told)  # each replica tells now and then
    assert router.engine_state().rows == 16
    assert router.statistics().cycles > 0
    names = {family.name for family in router.replica_metrics()}
    assert {"specrouter_replica_up", "specrouter_replica_moves"} <= names
    assert "specrouter_replica_state_age_at_use_seconds" in names
    assert router.routings()[-1]["policy"] == "round-robin"


def test_a_prompt_goes_where_its_beginning_was_read_until_that_replica_is_lost(
    settings: Settings,
) -> None:
    routing = {**NEWS, "policy": "flowguard"}
    prompt = tuple(7 + at % 40 for at in range(200))
    params = SamplingParams(max_new_tokens=2, ignore_eos=True)
    with Cluster(settings, resume=QUIET, routing=routing) as cluster:
        for _ in range(3):
            output_of(cluster, RequestArgs(prompt, params, None, None))
        first, *others = cluster.router.routings()
        assert [one["replica"] for one in others] == [first["replica"]] * 2
        assert others[-1]["terms"][first["replica"]]["C"] == pytest.approx(128 / 200)

        [link] = [link for link in cluster.links if link.name == first["replica"]]
        cluster.router._loop.call(link.kill)
        wait_until(lambda: not ready(cluster))
        cluster.router._loop.call(link.revive)
        wait_until(lambda: ready(cluster))
        output_of(cluster, RequestArgs(prompt, params, None, None))
        last = cluster.router.routings()[-1]
        assert last["terms"][link.name]["C"] == 0.0, "whoever is in its place has read nothing"


def test_states_are_fresh(cluster: Cluster) -> None:
    """Each replica speaks again and again, and what it has said counts from then."""
    wait_until(lambda: ready(cluster))
    told: dict[str, set[float]] = {"a-0": set(), "a-1": set()}

    def have_spoken() -> bool:
        for name, member in cluster.router._fleet.members.items():
            told[name].add(member.told_s)
        return all(len(times) > 3 for times in told.values())

    began_s = time.monotonic()
    wait_until(have_spoken)
    now_s = time.monotonic()
    ages = [view.age_s for view in cluster.router._fleet.ready(now_s)]
    assert len(ages) == 2
    assert max(ages) <= now_s - began_s


def test_a_feed_that_ends_makes_a_replica_lost_until_it_speaks_again(cluster: Cluster) -> None:
    wait_until(lambda: ready(cluster))
    member = cluster.router._fleet.members["a-1"]
    original = cluster.links[1].feed

    async def short() -> AsyncGenerator[Feed]:
        raise ConnectionError("no feed")
        yield

    cluster.links[1].feed = short  # type: ignore[method-assign]
    cluster.links[1].dies_at = 0
    try:
        wait_until(lambda: member.standing == "lost")
        wait_until(lambda: "ConnectionError: no feed" in member.why)
        assert cluster.router.health().status == "degraded"
    finally:
        cluster.links[1].feed = original  # type: ignore[method-assign]
        cluster.links[1].dies_at = None
    wait_until(lambda: ready(cluster))
