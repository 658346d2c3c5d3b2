"""SpecuStream's depths are those of StreamServe's Algorithm 4."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.errors import ConfigError
from research.policies.specustream import (
    HISTORY,
    LEAST_DEPTH,
    MOST_DEPTH,
    Flow,
    SpecuStream,
    throughput,
)
from specrouter.config import RouterConfig
from specrouter.config.policies import CHAIN_POLICIES
from specrouter.cycle import DraftShape
from specrouter.routing.chain_policy import RequestDepth
from specrouter.view import EngineView, Standing
from tests.specrouter.config.test_config import POOL
from tests.specrouter.predictions import ALL, PAIR, TRIPLE, snapshot
from tests.specrouter.routing.test_scheduler import choose, scheduler
from tests.specrouter.views import Entry, engine_view, request_view

PRINTED, FIXED = SpecuStream(), SpecuStream("acceptances")
AIM = 400.0  # tokens/s, from which on the throughput deepens nothing


def depths(stream: SpecuStream, rates: list[float], load: float = 0.0) -> list[float]:
    """After each of these acceptance rates."""
    flow, found = Flow(), list[float]()
    for drafts, rate in enumerate(rates, start=1):
        flow = stream.updated(flow, rate, drafts)
        found.append(stream.depth(flow, rate, load, AIM))
    return found


def test_a_constant_rate_deepens_as_printed() -> None:
    found = depths(PRINTED, [0.8] * 200)
    assert [round(each, 2) for each in found[:3]] == [5.32, 5.61, 5.87]
    assert round(found[9], 2) == 7.08
    assert found[-1] == pytest.approx(6.6, abs=0.01)


def test_load_takes_depth_away() -> None:
    settled = depths(PRINTED, [0.8] * 200, load=0.9)[-1]
    assert settled == pytest.approx(5.16, abs=0.01)
    assert depths(PRINTED, [0.8] * 200, load=1.0)[-1] == settled, "it counts up to 0.9"


@pytest.mark.parametrize(("depth", "together"), [(2.0, 40), (5.0, 16), (6.6, 12), (20.0, 4)])
def test_micro_batches_are_smaller_the_deeper_the_drafts(
    depth: float, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SpecuStream, "depth", lambda *_: depth)
    found = PRINTED.depths(view([running(1)], {}, 1))[1]
    assert found == RequestDepth(levels=round(depth), together=together, memory=Flow())


def test_before_the_first_tokens_the_slowness_knows_no_bound() -> None:
    flow = PRINTED.updated(Flow(), 0.8, 1)
    assert PRINTED.depth(flow, 0.8, 0.0, 0.0) == MOST_DEPTH
    assert PRINTED.depth(Flow(), 0.0, 0.0, 0.0) == 5.0, "nothing was drafted yet"


@given(st.lists(st.floats(0.0, 1.0), max_size=40), st.floats(0.0, 1.0), st.floats(0.0, 1e4))
def test_depths_are_within_bounds(rates: list[float], load: float, tokens_per_s: float) -> None:
    for stream in (PRINTED, FIXED):
        flow = Flow()
        for drafts, rate in enumerate(rates, start=1):
            flow = stream.updated(flow, rate, drafts)
            depth = stream.depth(flow, rate, load, tokens_per_s)
            assert LEAST_DEPTH <= depth <= MOST_DEPTH
            assert len(flow.vector) == HISTORY


@given(st.lists(st.floats(0.0, 1.0), min_size=HISTORY, max_size=3 * HISTORY))
def test_the_fixed_form_goes_by_the_mean_rate(rates: list[float]) -> None:
    """High and stable rates draft deeper than low ones; as printed, swings draft deepest."""
    best = depths(FIXED, [1.0] * len(rates))[-1]
    assert depths(FIXED, [*rates, rates[-1]])[-1] <= best
    swings, stable = [0.0, 1.0] * HISTORY, [1.0] * 2 * HISTORY
    assert depths(FIXED, swings)[-1] < depths(FIXED, stable)[-1]
    assert depths(PRINTED, swings)[-1] > depths(PRINTED, stable)[-1]


def view(requests: list[Entry], flows: dict[int, Flow], free_rows: int) -> EngineView:
    standing = Standing(memories=flows)
    return engine_view(requests, free_rows=free_rows, standing=standing)


def running(number: int, **others: Any) -> Entry:
    return request_view(number, row=number, **others)


def test_a_draft_is_news_once() -> None:
    flow = PRINTED.updated(Flow(), 0.5, 3)
    same, newer = running(1, drafts=3, acceptance=0.5), running(2, drafts=4, acceptance=1.0)
    found = PRINTED.depths(view([same, newer, running(3)], {1: flow, 2: flow}, 1))
    assert found[1].memory is flow
    assert found[2].memory == PRINTED.updated(flow, 1.0, 4)
    assert found[3] == RequestDepth(levels=5, together=16, memory=Flow())


def test_the_load_is_the_share_of_rows_and_the_throughput_that_of_all() -> None:
    flow = Flow((0.8,) * HISTORY, HISTORY, 1)
    one = running(1, drafts=1, acceptance=0.8, decoded=10, decode_ms=50.0)
    two = running(2, decoded=20, decode_ms=100.0)
    assert throughput(view([one, two, running(3)], {}, 0)) == AIM
    seen = set()
    for free_rows in (0, 2, 6):
        found = PRINTED.depths(view([one, two], {1: flow}, free_rows))[1]
        depth = PRINTED.depth(flow, 0.8, 2 / (2 + free_rows), AIM)
        assert (found.levels, found.together) == (round(depth), math.floor(80 / depth))
        seen.add(found.together)
    assert len(seen) == 3


@pytest.mark.parametrize("policy", ["specustream", "specustream-fixed"])
def test_streamed_drafts_are_paths_of_any_chain(policy: str) -> None:
    published = f"research.policies:{policy.replace('-', '_').upper()}"
    assert CHAIN_POLICIES.find(policy) is CHAIN_POLICIES.find(published)
    for name in (policy, published):
        chained = {"policy": name, "chain": ["small", "big"], "width": 1}
        assert RouterConfig.load({"pool": POOL, "scheduler": chained}).scheduler.policy == published
        with pytest.raises(ConfigError) as caught:
            RouterConfig.load({"pool": POOL, "scheduler": {"policy": name, "width": 2}})
        assert caught.value.field == "scheduler.width"


def test_the_two_differ_in_what_the_flow_vector_holds() -> None:
    assert CHAIN_POLICIES.find("specustream") == PRINTED
    assert CHAIN_POLICIES.find("specustream-fixed") == FIXED


def test_its_chain_is_the_smallest_drafters_or_the_configured_one_as_deep_as_any() -> None:
    known = snapshot({})
    assert choose(known, "specustream").route == (PAIR, DraftShape(MOST_DEPTH, 1))
    chained = choose(known, "specustream", chain=TRIPLE, available=ALL - {"middle"})
    assert (chained.chain, chained.shape.depth) == (PAIR, MOST_DEPTH)
    assert choose(known, "specustream", depth=3).shape.depth == 3
    assert scheduler("specustream").drafters == ("small",)
    assert scheduler("specustream", chain=TRIPLE).drafters == ("small", "middle")
    assert not CHAIN_POLICIES.find("specustream").decides_every_cycle
