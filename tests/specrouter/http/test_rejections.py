"""An objective that cannot be attained: 503 with what could be, before the first byte."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from specrouter.http.answer_schemas import ErrorAnswer
from specrouter.request.output import Feasible
from tests.specrouter.fake_router import FakeRouter
from tests.specrouter.http.client import leave, post, stream_of

FEASIBLE = Feasible(ttft_ms=2400.0, tpot_ms=35.5)
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": "def f"},
    "/v1/completions": {"prompt": "def f"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
}


def asked(path: str, **slo: Any) -> dict[str, Any]:
    return {**BODIES[path], "slo": {**slo, "on_unattainable": "reject"}}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_rejection_is_a_503_that_tells_the_earliest_feasible_objective(
    stream: bool, path: str
) -> None:
    response = post(
        FakeRouter(rejects=FEASIBLE), {**asked(path, ttft_ms=900), "stream": stream}, path
    )
    assert response.status_code == 503
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"] == {
        "message": "slo: the objective cannot be attained",
        "type": "server_error",
        "param": "slo",
        "code": "slo_unattainable",
        "feasible": {"ttft_ms": 2400.0, "tpot_ms": 35.5},
    }
    ErrorAnswer.model_validate(response.json(), strict=True)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("slo", "feasible", "headers"),
    [
        pytest.param({"ttft_ms": 900}, FEASIBLE, {"retry-after": "2"}, id="1.5 s late"),
        pytest.param({"ttft_ms": 2399.9}, FEASIBLE, {"retry-after": "1"}, id="hardly late"),
        pytest.param({"tpot_ms": 9}, FEASIBLE, {"x-should-retry": "false"}, id="tokens only"),
        pytest.param(
            {"tpot_ms": 9, "ttft_ms": 9000}, FEASIBLE, {"x-should-retry": "false"}, id="in time"
        ),
        pytest.param({"ttft_ms": 9}, Feasible(), {"x-should-retry": "false"}, id="not known"),
    ],
)
def test_who_would_wait_too_long_for_the_first_token_is_told_when_to_come_again(
    slo: dict[str, float], feasible: Feasible, headers: dict[str, str], path: str
) -> None:
    response = post(FakeRouter(rejects=feasible), asked(path, **slo), path)
    assert response.status_code == 503
    names = ("retry-after", "x-should-retry")
    assert {name: response.headers[name] for name in names if name in response.headers} == headers


@pytest.mark.parametrize("path", BODIES)
def test_of_several_samples_the_stream_of_the_others_goes_on(path: str) -> None:
    body = {**asked(path, ttft_ms=900), "n": 2}
    events = stream_of(FakeRouter(rejects=FEASIBLE), body, path)
    errors = [event["error"] for event in events if "error" in event]
    assert [error["code"] for error in errors] == ["slo_unattainable"]
    assert errors[0]["feasible"] == {"ttft_ms": 2400.0, "tpot_ms": 35.5}
    assert len(events) > 2


@pytest.mark.parametrize("path", BODIES)
def test_all_samples_together_are_a_503(path: str) -> None:
    body = {**asked(path, ttft_ms=900), "n": 2, "stream": True}
    assert post(FakeRouter(rejects=FEASIBLE, rejected=2), body, path).status_code == 503


@pytest.mark.parametrize("path", BODIES)
def test_who_waits_for_admission_may_leave(path: str) -> None:
    router = FakeRouter(rejects=FEASIBLE, hold_after=0)
    asyncio.run(leave(router, {**asked(path, ttft_ms=900), "stream": True}, path))
    assert router.open_requests == 0
