"""Pairs give the texts of one engine, whichever half fails wherever, and whatever is lost on its
way between them.

Two engines of small random models in float64 in this process, where nothing may differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from specrouter import SLO, RequestOutput
from statemgr import RowKV
from test_support.cluster_streams import KINDS, LONG_PROMPT, Load, output_of
from tests.specrouter.cluster.links import NEWS, QUIET, Cluster, LocalTransport

Settings = dict[str, Any]

PAIR: Settings = {"pairs": [{"name": "p"}], "routing": NEWS, "resume": QUIET}


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
def load(small_config: Settings) -> Load:
    return Load.of(small_config, LONG_PROMPT)


@pytest.fixture(scope="module")
def transport() -> Lossy:
    return Lossy()


@pytest.fixture(scope="module")
def halves(small_config: Settings, transport: Lossy) -> Iterator[Cluster]:
    with Cluster(small_config, transport=transport, **PAIR) as made:
        yield made


@pytest.fixture
def cluster(halves: Cluster) -> Cluster:
    halves.wait_until_ready()
    return halves


def imported(cluster: Cluster) -> list[int]:
    """Tokens whose keys and values came from the other half, by half."""
    engines = [link.server.report().engine for link in cluster.links]
    return [engine.cache.imported_tokens for engine in engines]


def alone(cluster: Cluster, load: Load, kind: str, slo: SLO | None = None) -> RequestOutput:
    """Nothing of its prompt is found in a prefix cache."""
    asked = load.asked(replace(KINDS[kind], prefix_cache=False), slo)
    output = output_of(cluster.router, asked)
    assert output.token_ids == load.outputs[kind][0].token_ids
    return output


def test_a_pair_gives_the_texts_of_one_engine_and_the_decode_half_reads_no_prompt(
    cluster: Cluster, load: Load
) -> None:
    before = imported(cluster)
    load.check(cluster.router)
    reads, decodes = imported(cluster)
    assert reads == before[0]
    alone(cluster, load, "greedy")
    assert imported(cluster)[1] - decodes == len(LONG_PROMPT)
    first, then = cluster.router.instruments.routings()[-2:]
    assert [first["replica"], then["replica"]] == ["p-prefill", "p-decode"]
    assert then["reason"] == "goes on from what p-prefill has read"
    assert [first["attempt"], then["attempt"]] == [1, 2]
    assert first["order"] == ["p"]


@pytest.mark.parametrize("half", [0, 1], ids=["prefill", "decode"])
@pytest.mark.parametrize("after", [2])
def test_a_stream_of_a_half_that_breaks_alone_goes_on(
    cluster: Cluster, load: Load, half: int, after: int
) -> None:
    cluster.links[half].fails_at = cluster.links[half].replies + after
    load.check(cluster.router)
    assert cluster.links[half].fails_at is None, "it has broken"


@pytest.mark.parametrize("half", [0, 1], ids=["prefill", "decode"])
def test_a_half_that_falls_silent_is_left_and_nothing_comes_twice(
    small_config: Settings, load: Load, half: int
) -> None:
    section = {**PAIR, "routing": {"metrics_s": 0.1}, "resume": {"silence_s": 1.0}}
    with Cluster(small_config, **section) as cluster:
        hanging = cluster.links[half]
        cluster.wait_until_ready()
        hanging.hangs_at = hanging.replies + 6
        load.check(cluster.router)
        hanging.hangs_at = None
        cluster.router._loop.call(hanging.is_back.set)
        cluster.wait_until_ready()
        load.check(cluster.router)


@pytest.mark.parametrize("lost", [{0}, {1}, {0, 1, 2}], ids=str)
def test_keys_and_values_that_are_lost_change_no_text(
    cluster: Cluster, transport: Lossy, load: Load, lost: set[int]
) -> None:
    before = imported(cluster)[1]
    transport.carried, transport.lost = 0, lost
    try:
        alone(cluster, load, "sampled")
    finally:
        transport.lost = set()
    assert imported(cluster)[1] - before == 32 * min(lost), "what came before the loss is used"


def test_keys_and_values_of_another_text_are_refused(
    cluster: Cluster, transport: Lossy, load: Load
) -> None:
    before = imported(cluster)[1]
    transport.is_broken = True
    try:
        load.check(cluster.router)
    finally:
        transport.is_broken = False
    assert imported(cluster)[1] == before


def test_a_rolling_restart_of_both_halves_under_load_changes_nothing(
    cluster: Cluster, load: Load
) -> None:
    load.check_restart(cluster.router)


@pytest.mark.parametrize("part", ["tpot_ms", "e2e_ms"])
def test_an_objective_that_a_pair_would_miss_after_its_first_token_is_refused_where_that_is_asked(
    cluster: Cluster, load: Load, part: str
) -> None:
    slo = SLO(**{part: 1e-3}, on_unattainable="reject")  # type: ignore[arg-type]
    output = output_of(cluster.router, load.asked(KINDS["greedy"], slo))
    assert (output.finish_reason, output.error_field) == ("error", "unattainable")
    assert output.error is not None
    assert "p-decode declined: p would be late by" in output.error
    alone(cluster, load, "greedy", SLO(**{part: 1e-3}))  # type: ignore[arg-type]


def test_a_request_has_one_clock_and_one_account_over_both_halves(
    cluster: Cluster, load: Load
) -> None:
    ended = cluster.router.instruments.slo_accounts.report().total.requests
    output = alone(cluster, load, "greedy", SLO(ttft_ms=60_000.0, tpot_ms=60_000.0))
    assert output.metrics.attained is True
    assert output.metrics.ttft_ms is not None
    assert output.metrics.e2e_ms is not None
    assert output.metrics.ttft_ms < output.metrics.e2e_ms
    assert cluster.router.instruments.slo_accounts.report().total.requests == ended + 1
