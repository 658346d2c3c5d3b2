"""Paths that are not served: the answer says what is."""

from __future__ import annotations

import pytest

from specrouter.http.unserved import no_such_path
from tests.specrouter.fake_router import FakeRouter
from tests.specrouter.http.client import refusal, request


@pytest.mark.parametrize(
    ("method", "path", "named"),
    [
        ("POST", "/v1/responses", "chats are at /v1/chat/completions"),
        ("POST", "/v1/messages", "chats are at /v1/chat/completions"),
        ("POST", "/completions", "completions at /v1/completions"),
        ("POST", "/v1/embeddings", "makes text"),
        ("GET", "/v1/model", "/v1/models"),
        ("GET", "/v2", "chats are at /v1/chat/completions, completions at /v1/completions"),
    ],
)
def test_a_path_that_is_not_served_is_answered_with_what_is(
    method: str, path: str, named: str
) -> None:
    response = request(FakeRouter(), method, path)
    assert response.status_code == 404
    message = refusal(response)["message"]
    assert message.startswith(f"no {method} {path} here; ")
    assert named in message
    assert message.endswith("; see /docs")


def test_a_method_that_a_path_does_not_have_is_answered_with_those_that_it_has() -> None:
    response = request(FakeRouter(), "GET", "/generate")
    assert response.status_code == 405
    assert refusal(response)["message"] == "no GET /generate here; it takes POST; see /docs"


def test_a_long_path_is_told_in_part() -> None:
    assert len(no_such_path("GET", "/" + "a" * 10_000)) < 300
