"""Paths that are not served: the answer says what is."""

from __future__ import annotations

import pytest

from tests.specrouter.fake_router import FakeRouter
from tests.specrouter.http.client import refusal, request


@pytest.mark.parametrize("path", ["/v1/responses", "/completions", "/v2", "/" + "a" * 10_000])
def test_a_path_that_is_not_served_is_answered_with_what_is(path: str) -> None:
    response = request(FakeRouter(), "POST", path)
    assert response.status_code == 404
    message = refusal(response)["message"]
    assert message.startswith(f"no POST {path[:20]}")
    assert "/v1/chat/completions" in message
    assert len(message) < 300


def test_a_method_that_a_path_does_not_have_is_answered_with_those_that_it_has() -> None:
    response = request(FakeRouter(), "GET", "/generate")
    assert response.status_code == 405
    assert refusal(response)["message"] == "no GET /generate here; it takes POST; see /docs"
