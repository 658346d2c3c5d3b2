"""A structure that fails while its text is made is the client's mistake, told by its field."""

from __future__ import annotations

from typing import Any

import pytest

from specrouter.request.output import STRUCTURE_FAILED
from tests.specrouter.fake_router import FakeRouter
from tests.specrouter.http.client import post, refusal, stream_of

ERROR = f"{STRUCTURE_FAILED}: too many items"
ASKED: dict[str, tuple[dict[str, Any], str]] = {
    "/generate": ({"prompt": "a", "guided_regex": "a+"}, "guided_regex"),
    "/v1/completions": (
        {"prompt": "a", "structured_outputs": {"grammar": 'start: "a"'}},
        "structured_outputs.grammar",
    ),
    "/v1/chat/completions": (
        {
            "messages": [{"role": "user", "content": "a"}],
            "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
        },
        "response_format.json_schema.schema",
    ),
}


@pytest.mark.parametrize("path", ASKED)
def test_before_the_answer_has_begun_it_is_a_400(path: str) -> None:
    body, field = ASKED[path]
    for router, stream in ((FakeRouter(error=ERROR), False), (_silent(), True)):
        response = post(router, {**body, "stream": stream}, path)
        error = refusal(response)
        assert (response.status_code, error["param"], error["code"]) == (
            400,
            field,
            "invalid_value",
        )
        assert error["message"] == f"{field}: {ERROR}"
        assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("path", ASKED)
def test_in_a_stream_it_is_an_event(path: str) -> None:
    body, field = ASKED[path]
    *_, last = stream_of(FakeRouter(error=ERROR), body, path)
    assert (last["error"]["param"], last["error"]["type"]) == (field, "invalid_request_error")


@pytest.mark.parametrize("asked", [{}, {"response_format": {"type": "json_object"}}], ids=str)
def test_of_forced_calls_it_is_told_of_the_tools(asked: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [tool], **asked}
    path = "/v1/chat/completions"
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        response = post(FakeRouter(error=ERROR), {**body, "tool_choice": choice}, path)
        assert (response.status_code, refusal(response)["param"]) == (400, "tools")


def test_what_fails_otherwise_is_the_services_fault() -> None:
    body, _ = ASKED["/generate"]
    assert post(FakeRouter(error="out of memory"), body).status_code == 500


def _silent() -> FakeRouter:
    return FakeRouter(error=ERROR, silent=1)
