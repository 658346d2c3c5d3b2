"""Pairs give the texts of one engine, whichever half fails wherever, and whatever is lost on its
way between them.

Two engines of small random models in float64 in this process, where nothing may differ.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from specrouter import SLO, ChainRouter, RequestOutput, SamplingParams
from specrouter.cluster.kv_transfer import LocalTransport
from specrouter.engine.request_args import RequestArgs
from specrouter.request.output import Delta
from statemgr import RowKV
from tests.specrouter.cluster.links import Cluster
from tests.specrouter.cluster.test_router import (
    KINDS,
    NEWS,
    QUIET,
    Settings,
    assert_same,
    output_of,
    ready,
    served,
)
from tests.specrouter.faults import wait_until

PROMPT = tuple(5 + 7 * at % 300 for at in range(75))  # three chunks of 32
PAIR: dict[str, Any] = {"pairs": [{"name": "p"}], "routing": NEWS, "resume": QUIET}
Expected = dict[str, list[RequestOutput]]


class Lossy(LocalTransport):
    """Loses every part whose number is in `lost`, or breaks one; counts what was carried."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: set[int] = set()
        self.is_broken = False
        self.carried = 0

    async def take(self, ticket: str) -> RowKV:
        kv = await super().take(ticket)
        if self.carried in self.lost:
            self.carried += 1
            raise ConnectionError("lost")
        self.carried += 1
        return replace(kv, text="broken") if self.is_broken else kv


@pytest.fixture(scope="module")
def settings(small_config: Settings) -> Settings:
    return copy.deepcopy(small_config)


@pytest.fixture(scope="module")
def expected(settings: Settings) -> Expected:
    """By one engine, undisturbed; one of them stops at a text in its middle."""
    with ChainRouter.from_config(settings) as router:
        found = {name: router.generate([list(PROMPT)], each) for name, each in KINDS.items()}
        return {**found, "stop": router.generate([list(PROMPT)], stopped(found))}


def stopped(expected: Expected) -> SamplingParams:
    """From its first token on, text is held back that might be the stop's beginning."""
    text = expected["greedy"][0].text
    return SamplingParams(max_new_tokens=20, ignore_eos=True, stop=(text[:1] + "\0", text[-9:-5]))


@pytest.fixture(scope="module")
def transport() -> Lossy:
    return Lossy()


@pytest.fixture(scope="module")
def cluster(settings: Settings, transport: Lossy) -> Iterator[Cluster]:
    with Cluster(settings, transport=transport, **PAIR) as made:
        yield made


def all_kinds(cluster: Cluster, expected: Expected) -> dict[tuple[str, int], list[Delta]]:
    """All at once; by kind and sample."""
    wait_until(lambda: ready(cluster))
    of = {**KINDS, "stop": stopped(expected)}
    asked = [RequestArgs(PROMPT, of[kind], None, None) for kind in expected]
    found = asyncio.run(served(cluster, asked))
    kinds = list(expected)
    return {(kinds[number], sample): deltas for (number, sample), deltas in found.items()}


def imported(cluster: Cluster) -> list[int]:
    """Tokens whose keys and values came from the other half, by half."""
    engines = [link.local._own.report().engine for link in cluster.links]
    return [engine.cache.imported_tokens for engine in engines]


def alone(cluster: Cluster, params: SamplingParams, slo: SLO | None = None) -> RequestOutput:
    """Nothing of its prompt is found in a prefix cache."""
    asked = RequestArgs(PROMPT, replace(params, prefix_cache=False), None, slo)
    return output_of(cluster, asked)


def test_a_pair_gives_the_texts_of_one_engine_and_the_decode_half_reads_no_prompt(
    cluster: Cluster, expected: Expected
) -> None:
    before = imported(cluster)
    assert_same(all_kinds(cluster, expected), expected)
    reads, decodes = imported(cluster)
    assert reads == before[0]
    one = alone(cluster, KINDS["greedy"])
    assert one.token_ids == expected["greedy"][0].token_ids
    assert imported(cluster)[1] - decodes == len(PROMPT)
    first, then = cluster.router.routings()[-2:]
    assert [first["replica"], then["replica"]] == ["p-prefill", "p-decode"]
    assert then["reason"] == "goes on from what p-prefill has read"
    assert [first["attempt"], then["attempt"]] == [1, 2]
    assert first["order"] == ["p"]


@pytest.mark.parametrize("half", [0, 1], ids=["prefill", "decode"])
@pytest.mark.parametrize("after", [0, 1, 2, 3, 4, 6, 8, 12, 16, 20])
def test_a_half_that_dies_at_any_point_changes_no_text(
    cluster: Cluster, expected: Expected, half: int, after: int
) -> None:
    wait_until(lambda: ready(cluster))
    dying = cluster.links[half]
    dying.dies_at = dying.replies + after
    try:
        assert_same(all_kinds(cluster, expected), expected)
        assert dying.is_dead
        wait_until(lambda: cluster.router.health().status == "degraded")
        served_whole = alone(cluster, KINDS["sampled"])
        assert served_whole.token_ids == expected["sampled"][0].token_ids
        assert cluster.router.routings()[-1]["replica"] == cluster.links[1 - half].name
    finally:
        dying.dies_at = None


@pytest.mark.parametrize("half", [0, 1], ids=["prefill", "decode"])
@pytest.mark.parametrize("after", [0, 2, 7])
def test_a_stream_of_a_half_that_breaks_alone_goes_on(
    cluster: Cluster, expected: Expected, half: int, after: int
) -> None:
    wait_until(lambda: ready(cluster))
    cluster.links[half].fails_at = cluster.links[half].replies + after
    assert_same(all_kinds(cluster, expected), expected)
    assert cluster.links[half].fails_at is None, "it has broken"


@pytest.mark.parametrize("half", [0, 1], ids=["prefill", "decode"])
def test_a_half_that_falls_silent_is_left_and_nothing_comes_twice(
    settings: Settings, expected: Expected, half: int
) -> None:
    section = {**PAIR, "routing": {"stale_s": 1.5, "metrics_s": 0.1}, "resume": {"silence_s": 1.0}}
    with Cluster(settings, **section) as cluster:
        hanging = cluster.links[half]
        wait_until(lambda: ready(cluster))
        hanging.hangs_at = hanging.replies + 6
        assert_same(all_kinds(cluster, expected), expected)
        hanging.hangs_at = None
        cluster.router._loop.call(hanging.is_back.set)
        wait_until(lambda: ready(cluster))
        assert_same(all_kinds(cluster, expected), expected)


@pytest.mark.parametrize("lost", [{0}, {1}, {2}, {0, 1, 2}], ids=str)
def test_keys_and_values_that_are_lost_change_no_text(
    cluster: Cluster, transport: Lossy, expected: Expected, lost: set[int]
) -> None:
    wait_until(lambda: ready(cluster))
    before = imported(cluster)[1]
    transport.carried, transport.lost = 0, lost
    try:
        assert alone(cluster, KINDS["sampled"]).token_ids == expected["sampled"][0].token_ids
    finally:
        transport.lost = set()
    assert imported(cluster)[1] - before == 32 * min(lost), "what came before the loss is used"


def test_keys_and_values_of_another_text_are_refused(
    cluster: Cluster, transport: Lossy, expected: Expected
) -> None:
    wait_until(lambda: ready(cluster))
    before = imported(cluster)[1]
    transport.is_broken = True
    try:
        assert_same(all_kinds(cluster, expected), expected)
    finally:
        transport.is_broken = False
    assert imported(cluster)[1] == before


def test_a_rolling_restart_of_both_halves_under_load_changes_nothing(
    cluster: Cluster, expected: Expected
) -> None:
    wait_until(lambda: ready(cluster))
    of = {**KINDS, "stop": stopped(expected)}
    asked = [RequestArgs(PROMPT, of[kind], None, None) for kind in expected]

    async def both() -> list[Any]:
        restarting = asyncio.ensure_future(asyncio.to_thread(cluster.router.restart_replicas))
        rounds: list[Any] = []
        while not restarting.done() or not rounds:
            rounds.append(await served(cluster, asked))
        await restarting
        return rounds

    kinds = list(expected)
    for found in asyncio.run(both()):
        assert_same({(kinds[number], one): each for (number, one), each in found.items()}, expected)


def test_a_request_has_one_clock_and_one_account_over_both_halves(cluster: Cluster) -> None:
    wait_until(lambda: ready(cluster))
    ended = cluster.router.slo_report().total.requests
    output = alone(cluster, KINDS["greedy"], SLO(ttft_ms=60_000.0, tpot_ms=60_000.0))
    assert output.metrics.attained is True
    assert output.metrics.ttft_ms is not None
    assert output.metrics.e2e_ms is not None
    assert output.metrics.ttft_ms < output.metrics.e2e_ms
    assert cluster.router.slo_report().total.requests == ended + 1
