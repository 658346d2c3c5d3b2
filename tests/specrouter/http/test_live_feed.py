"""What the page is told of a router once a second: by whom it is made, for how many, until when."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any, cast

import pytest
from starlette.requests import ClientDisconnect

from specrouter import ChainRouter, SamplingParams, Speculation
from specrouter.config import SchedulerConfig, TreesConfig
from specrouter.http import live_feed
from specrouter.http.app import create_app
from specrouter.http.drain import Drain
from specrouter.http.live_feed import FEED_PATH, MAX_VIEWERS, LiveFeed
from specrouter.http.live_snapshot import live_snapshot
from tests.specrouter.fake_router import FakeRouter
from tests.specrouter.http.client import send

SECRET = "zebra7"
PAIR = ["tiny-1m", "tiny-3m"]


@pytest.fixture(scope="module")
def opened() -> Iterator[tuple[ChainRouter, Any]]:
    """A router, and what was told of it before its first request."""
    models = [{"name": name, "source": f"bundled:{name}", "dtype": "float32"} for name in PAIR]
    pool = {"target": PAIR[-1], "models": models}
    settings = {"pool": pool, "engine": {"max_requests": 4, "max_model_len": 128}}
    with ChainRouter.from_config(settings) as router:
        yield router, told(router)


@pytest.fixture
def router(opened: tuple[ChainRouter, Any]) -> ChainRouter:
    return opened[0]


def told(router: ChainRouter) -> Any:
    return json.loads(json.dumps(live_snapshot(router), allow_nan=False))


def test_before_the_first_request_there_are_predictions_and_models(
    opened: tuple[ChainRouter, Any],
) -> None:
    _, seen = opened
    assert [chain for chain, _ in seen["decision"]["predicted"]].count(PAIR) == 1
    assert [one["name"] for one in seen["models"]] == PAIR
    target = seen["models"][-1]
    assert (target["device"], target["dtype"], target["state"]) == ("cpu", "float32", "loaded")
    assert all(time_ms > 0 for _, time_ms in target["times"])
    assert (seen["cycles"], seen["switches"]) == ([], [])


def test_cycles_chains_and_times_are_those_of_requests_and_no_text_is_told(
    router: ChainRouter,
) -> None:
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, cache_salt=SECRET)
    before = told(router)
    [known] = [one for one in before["chains"] if one["chain"] == PAIR] or [{"between_s": 0.0}]
    (output,) = router.generate(f"print({SECRET!r})", params, Speculation(tuple(PAIR), depth=3))
    seen = told(router)
    assert SECRET not in json.dumps(seen)
    assert seen["totals"]["produced_tokens"] - before["totals"]["produced_tokens"] == 24
    (chain,) = [one for one in seen["chains"] if one["chain"] == PAIR]
    assert chain["timed_tokens"] > 0
    between_ms = 1000 * (chain["between_s"] - known["between_s"])
    assert 0 < between_ms <= 1.01 * cast(float, output.metrics.e2e_ms)
    cycles = seen["cycles"][len(before["cycles"]) :]
    drafting = [cycle for cycle in cycles if cycle[0] == PAIR]
    assert drafting
    for _, elapsed_ms, draft_ms, rescore_ms, verify_ms, requests, tokens in drafting:
        assert 0 < draft_ms + verify_ms <= elapsed_ms + 0.02
        assert min(draft_ms, verify_ms) >= 0 == rescore_ms
        assert requests == 1 <= tokens
    assert any(draft_ms > 0 < verify_ms for _, _, draft_ms, _, verify_ms, *_ in drafting)
    assert 0 < sum(cycle[-1] for cycle in cycles) <= 24


def test_the_decision_is_the_policys(router: ChainRouter) -> None:
    engine = router.instruments.engine
    fixed = SchedulerConfig(policy="static", chain=tuple(PAIR), depth=2)
    engine.set_policy(fixed, TreesConfig())
    try:
        router.generate("x", SamplingParams(max_new_tokens=4, ignore_eos=True))
        seen = told(router)
        assert (seen["decision"]["chain"], seen["decision"]["depth"]) == (PAIR, 2)
        assert seen["switches"][-1]["reason"] == seen["decision"]["reason"]
    finally:
        engine.set_policy(SchedulerConfig(), TreesConfig())


# The feed


class Counted:
    """Stands for `live_snapshot`: a number more each time, and in which thread it was made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = 0
        self.threads = set[threading.Thread]()
        monkeypatch.setattr(live_feed, "live_snapshot", self)

    def __call__(self, router: object) -> dict[str, int]:
        self.made += 1
        self.threads.add(threading.current_thread())
        return {"number": self.made}


def number_of(event: bytes) -> int:
    found = json.loads(event.removeprefix(b"data: "))
    assert isinstance(found["number"], int)
    return found["number"]


async def watch(app: Any, send_: Callable[[Any], Awaitable[None]], version: str = "2.3") -> None:
    """A viewer that never leaves by itself."""

    async def receive() -> Any:
        await asyncio.Event().wait()

    scope = {"type": "http", "method": "GET", "path": FEED_PATH, "headers": []}
    await app({**scope, "query_string": b"", "asgi": {"spec_version": version}}, receive, send_)


def first_events(count: int) -> list[bytes]:
    async def heard() -> list[bytes]:
        feed = LiveFeed(cast(ChainRouter, None), Drain(), interval_s=0.01)
        async with aclosing(feed.events()) as events:
            return [await anext(events) for _ in range(count)]

    return asyncio.run(asyncio.wait_for(heard(), 30.0))


def test_viewers_share_a_snapshot_and_nothing_is_made_for_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = Counted(monkeypatch)

    async def scenario() -> list[list[int]]:
        feed = LiveFeed(cast(ChainRouter, None), Drain(), interval_s=0.01)

        async def view() -> list[int]:
            async with aclosing(feed.events()) as events:
                return [number_of(await anext(events)) for _ in range(5)]

        seen = await asyncio.gather(*(view() for _ in range(6)))
        await asyncio.sleep(0.05)
        made = counted.made
        await asyncio.sleep(0.05)
        assert counted.made == made
        return list(seen)

    seen = asyncio.run(asyncio.wait_for(scenario(), 30.0))
    assert all(numbers == seen[0] for numbers in seen)
    assert counted.made <= 6
    assert threading.main_thread() not in counted.threads


def test_a_snapshot_that_fails_is_told_and_the_next_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)

    def fails_once(router: object) -> dict[str, int]:
        if not counted.made:
            counted.made += 1
            raise RuntimeError("no figures")
        return counted(router)

    monkeypatch.setattr(live_feed, "live_snapshot", fails_once)

    first, second = first_events(2)
    assert json.loads(first[6:])["error"]["code"] == "snapshot_failed"
    assert b"no figures" not in first
    assert number_of(second) == 2


@pytest.mark.parametrize(
    ("snapshot", "told"),
    [
        ({"a": [1.5, math.nan, (math.inf,)], "b": {"c": -math.inf}}, None),
        ({"a": {1}}, "snapshot_failed"),
    ],
)
def test_what_json_has_not_is_null_or_told_as_a_failure(
    monkeypatch: pytest.MonkeyPatch, snapshot: dict[str, Any], told: str | None
) -> None:
    monkeypatch.setattr(live_feed, "live_snapshot", lambda _: snapshot)
    event = json.loads(first_events(1)[0][6:])
    if told is None:
        assert event == {"a": [1.5, None, [None]], "b": {"c": None}}
    else:
        assert event["error"]["code"] == told


@pytest.mark.parametrize("version", ["2.3", "2.4"])
def test_who_never_reads_gives_up_its_place(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    Counted(monkeypatch)
    monkeypatch.setattr(live_feed, "STALLED_S", 0.05)
    app = service_of_one(1, monkeypatch)

    async def stall() -> list[int]:
        statuses = list[int]()

        async def send_(message: Any) -> None:
            if "status" in message:
                statuses.append(message["status"])
            else:
                await asyncio.Event().wait()

        with contextlib.suppress(ClientDisconnect):
            await watch(app, send_, version)
        return statuses

    for _ in range(3):
        assert asyncio.run(asyncio.wait_for(stall(), 30.0)) == [200]


def test_of_many_viewers_at_once_those_beyond_the_bound_are_refused_and_the_drain_ends_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Counted(monkeypatch)
    drain = Drain()
    app = create_app(cast(ChainRouter, FakeRouter()), drain)
    many = MAX_VIEWERS + 4

    async def view() -> tuple[int, int]:
        """The status, and how many events came; the first viewer with one lets all go."""
        heard = list[Any]()

        async def send_(message: Any) -> None:
            heard.append(message)
            if message.get("body") and heard[0]["status"] == 200:
                drain.begin()

        await watch(app, send_)
        return heard[0]["status"], sum(bool(one.get("body")) for one in heard)

    async def scenario() -> list[tuple[int, int]]:
        return list(await asyncio.gather(*(view() for _ in range(many))))

    seen = asyncio.run(asyncio.wait_for(scenario(), 30.0))
    assert MAX_VIEWERS > 4
    assert sorted(seen) == [(200, 1)] * MAX_VIEWERS + [(503, 1)] * 4
    refused = send(service_of_one(0, monkeypatch), "GET", FEED_PATH)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
    assert "0 pages watch already" in refused.json()["error"]["message"]


def service_of_one(most: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(live_feed, "MAX_VIEWERS", most)
    return create_app(cast(ChainRouter, FakeRouter()), Drain())


def test_who_has_left_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """However it leaves: here before it was sent anything."""
    Counted(monkeypatch)
    app = service_of_one(1, monkeypatch)

    async def leave() -> None:
        async def send_(message: Any) -> None:
            assert message.get("status", 200) == 200
            raise OSError("the client is gone")

        with contextlib.suppress(ClientDisconnect):
            await watch(app, send_, "2.4")

    for _ in range(3):
        asyncio.run(asyncio.wait_for(leave(), 30.0))
