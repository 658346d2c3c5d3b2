"""Bodies that are no JSON, and large ones, which are read beside the event loop."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specrouter.http import bodies
from specrouter.http.body_limit import SMALL_BYTES
from specrouter.http.request_fields import MAX_BIASES, MAX_STOP_IDS
from specrouter.request.conversation import MAX_MESSAGES, MAX_PARTS
from specrouter.request.lanes import LONG_CHARACTERS, Lanes
from tests.specrouter.fake_router import FakeRouter
from tests.specrouter.http.client import noted, post, refusal, request

PADDING = b" " * SMALL_BYTES
GOOD: dict[str, Any] = {
    "/generate": {"prompt": "a"},
    "/v1/completions": {"prompt": ["a", "b"]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/tokenize": {"messages": [{"role": "user", "content": "a"}]},
    "/detokenize": {"tokens": [105]},
}
PART = {"type": "text", "text": ""}


@pytest.mark.parametrize("padding", [b"", PADDING])
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"prompt": "a"', "Expecting"),
        (b'{"prompt": "a",}', "Expecting"),
        (b'{"prompt": "a"} x', "Extra data"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "too many digits"),
    ],
)
def test_whatever_is_no_json_is_told_as_such(body: bytes, reason: str, padding: bytes) -> None:
    error = refusal(post(FakeRouter(), padding + body))
    assert error["code"] == "invalid_json"
    assert reason in error["message"]


@pytest.mark.parametrize("path", GOOD)
def test_a_body_is_read_in_a_thread_and_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = noted(monkeypatch, bodies, "loaded")
    content = json.dumps(GOOD[path]).encode()
    small = post(FakeRouter(), content, path)
    large = post(FakeRouter(), PADDING + content, path)
    assert small.status_code == large.status_code == 200
    assert set(small.json()) == set(large.json())
    assert [call.in_loop for call in loaded] == [False, False]


CHOICE = {"structured_outputs": {"choice": ["a", "b"]}}


@pytest.mark.parametrize("path", [path for path in GOOD if "tokenize" not in path])
@pytest.mark.parametrize(
    ("padding", "fields", "lanes"),
    [
        (b"", {}, ["requests"]),
        (b" " * LONG_CHARACTERS, {}, ["large"]),
        (b"", CHOICE, ["requests", "structures"]),
    ],
)
def test_a_request_is_one_job_unless_a_grammar_is_to_be_compiled(
    path: str,
    padding: bytes,
    fields: dict[str, Any],
    lanes: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs = noted(monkeypatch, Lanes, "run")
    content = json.dumps({**GOOD[path], **fields}).encode()
    assert post(FakeRouter(), padding + content, path).status_code == 200
    assert [call.arguments[1] for call in jobs] == lanes


@pytest.mark.parametrize("padding", [b"", PADDING])
def test_a_bad_field_is_named_however_large_the_body(padding: bytes) -> None:
    error = refusal(post(FakeRouter(), padding + b'{"prompt": "a", "top_p": 7}'))
    assert (error["param"], error["code"]) == ("top_p", "invalid_value")


@pytest.mark.parametrize(
    ("path", "field", "value", "param"),
    [
        ("/v1/chat/completions", "messages", [{"role": "user"}] * (MAX_MESSAGES + 1), "messages"),
        (
            "/v1/chat/completions",
            "messages",
            [{"role": "user", "content": [PART] * (MAX_PARTS + 1)}],
            "messages[0].content",
        ),
        ("/generate", "logit_bias", {str(i): 1 for i in range(MAX_BIASES + 1)}, "logit_bias"),
        ("/generate", "stop_token_ids", [5] * (MAX_STOP_IDS + 1), "stop_token_ids"),
    ],
)
def test_lists_are_bounded(path: str, field: str, value: Any, param: str) -> None:
    error = refusal(post(FakeRouter(), {**GOOD[path], field: value}, path))
    assert error["param"] == param


def test_a_path_with_a_slash_behind_it_leads_nowhere() -> None:
    response = request(FakeRouter(), "GET", "/health/", headers=[("Host", "elsewhere")])
    assert response.status_code == 404
    assert "location" not in response.headers
