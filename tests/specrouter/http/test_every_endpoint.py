"""What every endpoint that makes texts has alike: defaults, endings, refusals, cached prefixes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from specrouter import OverloadedError, SamplingParams, UnavailableError
from specrouter.http.answers import ErrorAnswer
from specrouter.http.openai_answer import Usage
from specrouter.http.openai_fields import ChatRequest, CompletionRequest
from specrouter.http.request_fields import GenerateRequest, RequestFields
from specrouter.request.errors import NoReplicaError
from specrouter.request.output import STRUCTURE_FAILED, Feasible
from tests.specrouter.fake_router import METRICS, RUNS, FakeRouter, FakeTokenizer
from tests.specrouter.http.client import BODIES, UNASKED, leave, post, refusal, stream_of

MODELS: dict[str, type[RequestFields]] = {
    "/generate": GenerateRequest,
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
}
FEASIBLE = Feasible(ttft_ms=2400.0, tpot_ms=35.5)
ERROR = f"{STRUCTURE_FAILED}: too many items"
KEYS = ["key-of-a", "key-of-b"]

every_path = pytest.mark.parametrize("path", BODIES)
whole_or_streamed = pytest.mark.parametrize("stream", [False, True])


# Fields


def asked(path: str, fields: dict[str, Any], key: str | None = None) -> SamplingParams:
    """What reaches the router."""
    router = FakeRouter(server={"api_keys": KEYS if key else []})
    headers = [("Authorization", f"Bearer {key}")] if key else []
    assert post(router, {**BODIES[path], **fields}, path, headers).status_code == 200
    params: SamplingParams = router.calls[0][1]
    return params


@every_path
def test_null_means_the_default_for_every_optional_field(path: str) -> None:
    names = set(MODELS[path].model_fields) - {"prompt", "messages"}
    assert asked(path, dict.fromkeys(names)) == asked(path, {})


@every_path
def test_minus_one_is_no_seed_and_no_top_k_and_a_tiny_temperature_is_greedy(path: str) -> None:
    assert asked(path, {"seed": -1, "top_k": -1}) == asked(path, {})
    for tiny in (1e-7, 1e-300):
        assert asked(path, {"temperature": tiny}).temperature == 0


@every_path
@whole_or_streamed
def test_every_field_refuses_what_is_of_no_kind_by_its_name(stream: bool, path: str) -> None:
    for name in MODELS[path].model_fields:
        response = post(UNASKED, {"stream": stream, **BODIES[path], name: [[[0.5]]]}, path)
        assert (response.status_code, refusal(response)["param"].partition("[")[0]) == (400, name)
    assert UNASKED.calls == []


@every_path
def test_another_model_is_a_404(path: str) -> None:
    response = post(FakeRouter(), {**BODIES[path], "model": "small"}, path)
    assert response.status_code == 404
    error = refusal(response)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert post(FakeRouter(), {**BODIES[path], "model": "big"}, path).status_code == 200


# Endings


@every_path
@whole_or_streamed
@pytest.mark.parametrize(
    ("reason", "code", "retry"),
    [
        (OverloadedError(3, 2.5), "overloaded", "3"),
        (OverloadedError(3, 0.0), "overloaded", "1"),
        (NoReplicaError(), "no_replica_ready", "1"),
        (UnavailableError("the router is closed"), "engine_stopped", None),
    ],
)
def test_a_service_without_room_is_a_503_that_says_when_to_come_back(
    reason: Exception, code: str, retry: str | None, stream: bool, path: str
) -> None:
    response = post(FakeRouter(refuses=reason), {**BODIES[path], "stream": stream}, path)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == code
    assert response.headers.get("retry-after") == retry
    assert "x-should-retry" not in response.headers


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_service_without_room_reads_no_prompt(path: str) -> None:
    class Unread(FakeTokenizer):
        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            raise AssertionError("tokenized")

    router = FakeRouter(refuses=OverloadedError(3, 2.5), tokenizer=Unread())
    assert post(router, BODIES[path], path).status_code == 503
    assert post(router, {**BODIES[path], "n": 0}, path).status_code == 400


FAILURES: dict[str, tuple[dict[str, Any], int, str | None]] = {
    "generation_failed": ({"error": "it broke"}, 500, "false"),
    "timeout": ({"ends": "timeout"}, 408, "false"),
    "shutting_down": ({"ends": "cancelled"}, 503, None),
    "engine_dead": ({"ends": "engine_dead", "error": "it broke"}, 503, "false"),
}


@every_path
@pytest.mark.parametrize("code", FAILURES)
def test_a_text_that_did_not_come_to_its_end_is_an_error(code: str, path: str) -> None:
    how, status, retry = FAILURES[code]
    silent = FakeRouter(**how, silent=1)
    responses = [
        post(FakeRouter(**how), {**BODIES[path], "n": 2}, path),
        post(silent, {**BODIES[path], "stream": True}, path),  # it fails before its first token
    ]
    # Without a token of it, an engine did not die of this request.
    retries = retry, None if code == "engine_dead" else retry
    for response, expected in zip(responses, retries, strict=True):
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        assert response.headers.get("x-should-retry") == expected
    assert silent.open_requests == 0
    *_, last = stream_of(FakeRouter(**how), BODIES[path], path)
    assert last["error"]["code"] == code


@every_path
def test_a_crash_is_a_500_and_in_mid_stream_an_event_and_then_done(path: str) -> None:
    response = post(FakeRouter(crash=True), BODIES[path], path)
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
    *_, last = stream_of(FakeRouter(crash=True), BODIES[path], path)
    assert last["error"]["code"] == "generation_failed"
    assert last["error"]["message"] == "the engine broke"


@every_path
def test_a_stream_of_which_every_text_fails_before_its_first_token_is_a_status_code(
    path: str,
) -> None:
    router = FakeRouter(ends="timeout", silent=3)
    response = post(router, {**BODIES[path], "n": 3, "stream": True}, path)
    assert (response.status_code, response.json()["error"]["code"]) == (408, "timeout")


@every_path
@pytest.mark.parametrize(
    ("stream", "runs_before"), [(False, 0), (False, 2), (True, 0), (True, 1), (True, 2)]
)
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_cancels_its_request(
    stream: bool, runs_before: int, n: int, path: str
) -> None:
    router = FakeRouter(hold_after=runs_before)
    body = {**BODIES[path], "stream": stream, "n": n}
    asyncio.run(leave(router, body, path, after_events=runs_before if stream else 0))
    assert len(router.calls) == 1
    assert router.open_requests == 0


# An objective that cannot be attained: 503 with what could be, before the first byte


def with_slo(path: str, **slo: Any) -> dict[str, Any]:
    return {**BODIES[path], "slo": {**slo, "on_unattainable": "reject"}}


@every_path
@whole_or_streamed
def test_a_rejection_is_a_503_that_tells_the_earliest_feasible_objective(
    stream: bool, path: str
) -> None:
    response = post(
        FakeRouter(rejects=FEASIBLE), {**with_slo(path, ttft_ms=900), "stream": stream}, path
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


@every_path
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
    response = post(FakeRouter(rejects=feasible), with_slo(path, **slo), path)
    assert response.status_code == 503
    names = ("retry-after", "x-should-retry")
    assert {name: response.headers[name] for name in names if name in response.headers} == headers


@every_path
def test_of_several_samples_the_stream_of_the_others_goes_on(path: str) -> None:
    body = {**with_slo(path, ttft_ms=900), "n": 2}
    events = stream_of(FakeRouter(rejects=FEASIBLE), body, path)
    errors = [event["error"] for event in events if "error" in event]
    assert [error["code"] for error in errors] == ["slo_unattainable"]
    assert errors[0]["feasible"] == {"ttft_ms": 2400.0, "tpot_ms": 35.5}
    assert len(events) == 1 + len(RUNS)


# A structure that fails while its text is made is the client's mistake, told by its field

FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "/generate": ({"guided_regex": "a+"}, "guided_regex"),
    "/v1/completions": (
        {"structured_outputs": {"grammar": 'start: "a"'}},
        "structured_outputs.grammar",
    ),
    "/v1/chat/completions": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.schema",
    ),
}


@every_path
def test_a_failed_structure_is_a_400_before_the_answer_has_begun_and_then_an_event(
    path: str,
) -> None:
    form, field = FORMS[path]
    body = {**BODIES[path], **form}
    for silent, stream in ((0, False), (1, True)):
        router = FakeRouter(error=ERROR, silent=silent)
        response = post(router, {**body, "stream": stream}, path)
        error = refusal(response)
        assert (response.status_code, error["code"]) == (400, "invalid_value")
        assert (error["param"], error["message"]) == (field, f"{field}: {ERROR}")
        assert response.headers["x-should-retry"] == "false"
    *_, last = stream_of(FakeRouter(error=ERROR), body, path)
    assert (last["error"]["param"], last["error"]["type"]) == (field, "invalid_request_error")


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "json_object"}}], ids=str)
def test_of_forced_calls_it_is_told_of_the_tools(fields: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    path = "/v1/chat/completions"
    body = {**BODIES[path], "tools": [tool], **fields}
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        response = post(FakeRouter(error=ERROR), {**body, "tool_choice": choice}, path)
        assert (response.status_code, refusal(response)["param"]) == (400, "tools")


# Who shares cached prefixes with whom, and what an answer says of them


@every_path
def test_keys_share_nothing_unless_they_ask(path: str) -> None:
    salts = [asked(path, {}, key).cache_salt for key in (*KEYS, KEYS[0])]
    assert salts[0] == salts[2] != salts[1]
    assert not any(key in str(salt) for key in KEYS for salt in salts)
    shared = {asked(path, {"cache_salt": "ours"}, key).cache_salt for key in KEYS}
    assert shared == {"salt ours"}
    assert asked(path, {"cache_salt": salts[0]}, KEYS[1]).cache_salt != salts[0]


@every_path
def test_without_keys_all_share_what_has_no_salt(path: str) -> None:
    assert asked(path, {}).cache_salt is None
    assert asked(path, {}).prefix_cache
    assert not asked(path, {"prefix_cache": False}).prefix_cache


def test_cached_tokens_of_a_prompt_count_once_whatever_its_samples() -> None:
    usage = Usage(20)
    for sample, cached in ((1, 9), (0, 4), (0, 3)):  # two prompts, one with two samples
        usage.add(1, replace(METRICS, cached_tokens=cached), sample)
    assert usage.to_json()["prompt_tokens_details"] == {"cached_tokens": 7}
