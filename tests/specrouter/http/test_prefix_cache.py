"""Who shares cached prefixes with whom, and what an answer says of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from starlette.testclient import TestClient

from specrouter import ChainRouter, SamplingParams
from specrouter.http.app import create_app
from specrouter.http.keys import API_KEY_VARIABLE
from specrouter.http.openai_answer import Usage
from tests.specrouter.fake_router import METRICS, FakeRouter

KEYS = ["key-of-a", "key-of-b"]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}]},
    "/generate": {"prompt": "abc"},
}


@pytest.fixture(autouse=True)
def no_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)


def asked(path: str, body: dict[str, Any], key: str | None = None) -> SamplingParams:
    """What reaches the router."""
    router = FakeRouter(server={"api_keys": KEYS if key else []})
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with TestClient(create_app(cast(ChainRouter, router))) as client:
        assert client.post(path, json=body, headers=headers).status_code == 200
    params: SamplingParams = router.calls[0][1]
    return params


@pytest.mark.parametrize("path", PATHS)
def test_keys_share_nothing_unless_they_ask(path: str) -> None:
    body = PATHS[path]
    salts = [asked(path, body, key).cache_salt for key in (*KEYS, KEYS[0])]
    assert salts[0] == salts[2] != salts[1]
    assert not any(key in str(salt) for key in KEYS for salt in salts)
    shared = {asked(path, body | {"cache_salt": "ours"}, key).cache_salt for key in KEYS}
    assert shared == {"salt ours"}


def test_nobody_can_ask_for_the_salt_of_a_key() -> None:
    of_key = asked("/generate", PATHS["/generate"], KEYS[0]).cache_salt
    stolen = asked("/generate", PATHS["/generate"] | {"cache_salt": of_key}, KEYS[1]).cache_salt
    assert stolen != of_key


@pytest.mark.parametrize("path", PATHS)
def test_without_keys_all_share_what_has_no_salt(path: str) -> None:
    assert asked(path, PATHS[path]).cache_salt is None
    assert asked(path, PATHS[path]).prefix_cache
    assert not asked(path, PATHS[path] | {"prefix_cache": False}).prefix_cache


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("name", "value"),
    [("cache_salt", ""), ("cache_salt", 7), ("cache_salt", "x" * 1025), ("prefix_cache", "off")],
)
def test_bad_values_are_refused_by_name(path: str, name: str, value: Any) -> None:
    with TestClient(create_app(cast(ChainRouter, FakeRouter()))) as client:
        answer = client.post(path, json=PATHS[path] | {name: value})
    assert answer.status_code in (400, 422)
    assert answer.json()["error"]["param"] == name


def test_cached_tokens_of_a_prompt_count_once_whatever_its_samples() -> None:
    usage = Usage(20)
    for sample, cached in ((1, 9), (0, 4), (0, 3)):  # two prompts, one with two samples
        usage.add(1, replace(METRICS, cached_tokens=cached), sample)
    assert usage.to_json()["prompt_tokens_details"] == {"cached_tokens": 7}
