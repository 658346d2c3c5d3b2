"""`POST /generate` in front of a fake router: answers, refusals, framing, disconnects."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest

from specrouter import SLO, SamplingParams, Speculation, Structure, TokenLogprobs
from specrouter.http.generate_request import GenerateRequest
from specrouter.http.request_fields import MAX_STOP_CHARACTERS
from specrouter.request.objective import Objective, SloLike
from tests.specrouter.fake_router import METRICS, RUNS, TOKEN_TEXTS, FakeRouter
from tests.specrouter.http.client import UNASKED, Headers, cases, post, refusal, stream_of

PATH = "/generate"
LONGEST_STOP = "a" * MAX_STOP_CHARACTERS
UNFIT = ("1", None, -math.inf)  # for a number
PROMPT: dict[str, Any] = {"prompt": "def f"}

# Answers


def test_generate_answers_with_text_tokens_ending_metrics_and_seed() -> None:
    router = FakeRouter()
    response = post(router, PROMPT)
    assert response.status_code == 200
    assert response.json() == {
        "text": " ab\nc é",
        "token_ids": [5, 6, 7, 8],
        "finish_reason": "length",
        "metrics": METRICS.to_json(),
        "seed": 7,
    }
    assert router.calls == [("def f", SamplingParams(), None)]
    assert router.open_requests == 0


def test_every_sampling_field_reaches_the_router() -> None:
    router = FakeRouter()
    fields: dict[str, Any] = {
        "max_new_tokens": 3,
        "temperature": 0.5,
        "top_k": 40,
        "top_p": 0.9,
        "seed": 11,
        "stop": ["x", "y"],
        "stop_token_ids": [4],
        "ignore_eos": True,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": -1,
        "frequency_penalty": 0.5,
        "logit_bias": {"9": -100, "3": 2.5},
        "min_tokens": 2,
        "bad_words": ["bad", "worse"],
        "bad_words_ids": [[1, 2], [3]],
        "n": 2,
        "logprobs": 5,
        "prompt_logprobs": 3,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "prefix_cache": False,
        "cache_salt": "ours",
    }
    form = {"response_format": {"type": "json_object"}}
    speculation = {"chain": ["small", "big"], "depth": 2, "width": 3}
    post(router, {"input_ids": [1, 2], **fields, **form, "speculation": speculation})
    override = Speculation(chain=("small", "big"), depth=2, width=3)
    # A salt that is asked for is none that the service gives.
    reached = fields | {"cache_salt": "salt ours"}
    expected = SamplingParams(**reached, structure=Structure("json_object"))
    assert router.calls == [([1, 2], expected, override)]
    assert router.calls[0][1].logit_bias == ((3, 2.5), (9, -100.0))
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    # HTTP cannot carry code, and which special tokens are shown the service knows by itself.
    assert known - set(fields) == {"structure", "logits_processors", "shown_special_token_ids"}


def test_priority_time_and_the_bound_on_waiting_reach_the_router() -> None:
    router = FakeRouter(server={"max_waiting": 3, "request_timeout_s": 60})
    post(router, {**PROMPT, "priority": -2, "timeout_s": 1.5})
    post(router, {**PROMPT, "timeout_s": 90})
    post(router, PROMPT)
    assert router.terms == [(-2, 1.5, 3), (0, 60.0, 3), (0, 60.0, 3)]


def test_one_stop_string_needs_no_list() -> None:
    router = FakeRouter()
    post(router, {**PROMPT, "stop": "\n\n"})
    assert router.calls[0][1].stop == ("\n\n",)


def test_stop_texts_may_be_long() -> None:
    router = FakeRouter()
    stops = ["a" * (MAX_STOP_CHARACTERS // 2), "b" * (MAX_STOP_CHARACTERS // 2)]
    post(router, {**PROMPT, "stop": stops})
    assert router.calls[0][1].stop == tuple(stops)


def test_speculation_can_be_switched_off() -> None:
    router = FakeRouter()
    post(router, {**PROMPT, "speculation": "off"})
    assert router.calls[0][2] == "off"


def test_the_schema_shows_our_name_for_the_length_alone() -> None:
    shown = GenerateRequest.model_json_schema()["properties"]
    assert "max_new_tokens" in shown
    assert "max_tokens" not in shown


@pytest.mark.parametrize("stream", [False, True])
def test_openais_name_for_the_length_is_refused_with_ours(stream: bool) -> None:
    router = FakeRouter()
    error = refusal(post(router, {**PROMPT, "max_tokens": 5, "stream": stream}))
    assert error["message"] == "max_tokens: this endpoint calls it max_new_tokens"
    assert error["param"] == "max_tokens"
    assert router.calls == []


def test_several_samples_are_choices_by_index_with_one_seed() -> None:
    router = FakeRouter()
    response = post(router, {**PROMPT, "n": 3})
    assert response.status_code == 200
    choice = {
        "text": " ab\nc é",
        "token_ids": [5, 6, 7, 8],
        "finish_reason": "length",
        "metrics": METRICS.to_json(),
    }
    choices = [{"index": index, **choice} for index in range(3)]
    assert response.json() == {"choices": choices, "seed": 7}
    assert router.open_requests == 0


def test_logprobs_have_the_text_of_each_token_and_no_infinity() -> None:
    answer = post(FakeRouter(), {**PROMPT, "logprobs": 2}).json()
    top = [
        {"token_id": 5, "token": " a", "logprob": -0.25},
        {"token_id": 6, "token": "b", "logprob": -9999.0},
    ]
    assert answer["logprobs"] == [
        {"token_id": token, "token": TOKEN_TEXTS[token], "logprob": -token / 4, "top": top}
        for token in answer["token_ids"]
    ]


@pytest.mark.parametrize("unlikely", [-math.inf, -1e30, math.nan])
def test_a_logprob_that_json_cannot_hold_is_the_least(
    unlikely: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def logprobs(ids: list[int], _: int) -> list[TokenLogprobs]:
        return [TokenLogprobs(token, unlikely) for token in ids]

    monkeypatch.setattr("tests.specrouter.fake_router.logprobs_of", logprobs)
    answer = post(FakeRouter(), {**PROMPT, "logprobs": 0}).json()
    assert [position["logprob"] for position in answer["logprobs"]] == [-9999.0] * 4


def test_logprobs_of_zero_are_those_of_the_tokens_alone() -> None:
    answer = post(FakeRouter(), {**PROMPT, "logprobs": 0, "n": 2}).json()
    for choice in answer["choices"]:
        assert [position["token_id"] for position in choice["logprobs"]] == choice["token_ids"]
        assert all(position["top"] == [] for position in choice["logprobs"])


def test_a_failed_sample_is_a_500_and_the_others_keep_their_text() -> None:
    response = post(FakeRouter(error="out of memory"), {**PROMPT, "n": 2})
    assert response.status_code == 500
    answer = response.json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "error"]
    assert answer["error"]["message"] == "out of memory"


def test_failed_generation_is_a_500_that_names_the_cause_and_keeps_the_text() -> None:
    response = post(FakeRouter(error="out of memory"), PROMPT)
    assert response.status_code == 500
    answer = response.json()
    assert answer["finish_reason"] == "error"
    assert answer["text"] == " ab\nc é"
    assert answer["error"]["message"] == "out of memory"
    assert answer["error"]["type"] == "server_error"


def test_unforeseen_exception_is_a_500_in_the_same_shape() -> None:
    response = post(FakeRouter(crash=True), PROMPT)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"


# Objectives


TPOT, TTFT, E2E = "x-slo-tpot-ms", "x-slo-ttft-ms", "x-slo-e2e-ms"


@pytest.mark.parametrize(
    ("slo", "headers", "asked"),
    [
        (None, [], None),
        ("interactive", [], "interactive"),
        ({"tpot_ms": 40, "ttft_ms": None}, [], SLO(tpot_ms=40)),
        ({"tpot_ratio": 1.2, "ttft_ms": 300.5}, [], SLO(ttft_ms=300.5, tpot_ratio=1.2)),
        (None, [(TPOT, "40")], SLO(tpot_ms=40)),
        ({"e2e_ms": 5000}, [], SLO(e2e_ms=5000)),
        ({"tpot_ms": 40}, [(E2E, "5000")], SLO(tpot_ms=40, e2e_ms=5000)),
        (None, [("X-SLO-TPOT-MS", " 4.5e1 "), (TTFT, "900")], SLO(tpot_ms=45, ttft_ms=900)),
        ({"tpot_ms": 40}, [(TTFT, "900")], SLO(tpot_ms=40, ttft_ms=900)),
        ({"tpot_ms": 40}, [(TPOT, "40.0")], SLO(tpot_ms=40)),
        ("coding", [(TTFT, "900")], SLO(tpot_ratio=1.2, ttft_ms=900, slo_class="coding")),
        ("interactive", [(TPOT, "50")], SLO(tpot_ms=50, ttft_ms=1000, slo_class="interactive")),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_objective_comes_from_the_body_the_headers_or_both(
    slo: Any, headers: Headers, asked: SloLike, stream: bool
) -> None:
    router = FakeRouter()
    response = post(router, {**PROMPT, "slo": slo, "stream": stream}, headers=headers)
    assert response.status_code == 200
    assert router.slos == [asked]


@pytest.mark.parametrize("header", [TPOT, TTFT, E2E])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e400", "fast", "", "1_000", "5 ms"])
def test_a_header_that_is_no_positive_number_is_a_400_that_names_it(
    header: str, value: str
) -> None:
    assert_objective_refused({}, [(header, value)], header)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("slo", "headers", "named"),
    [
        pytest.param({"tpot_ms": 40}, [(TPOT, "41")], TPOT, id="values and header"),
        pytest.param({"ttft_ms": 40}, [(TTFT, "41")], TTFT, id="values and other header"),
        pytest.param({"e2e_ms": 40}, [(E2E, "41")], E2E, id="values and end-to-end header"),
        pytest.param({"tpot_ratio": 1.2}, [(TPOT, "48")], TPOT, id="ratio and header"),
        pytest.param("interactive", [(TPOT, "49")], TPOT, id="class and header"),
        pytest.param("interactive", [(TTFT, "999")], TTFT, id="class and other header"),
        pytest.param("coding", [(TPOT, "48")], TPOT, id="class with a ratio and header"),
        pytest.param(None, [(TPOT, "40"), (TPOT, "40")], TPOT, id="header twice"),
        pytest.param("urgent", [(TPOT, "40")], "slo", id="unknown class and header"),
    ],
)
def test_a_header_that_contradicts_the_body_is_a_400_that_names_it(
    slo: Any, headers: Headers, named: str, stream: bool
) -> None:
    assert_objective_refused({"slo": slo, "stream": stream}, headers, named)


def assert_objective_refused(fields: dict[str, Any], headers: Headers, named: str) -> None:
    response = post(UNASKED, {**PROMPT, **fields}, headers=headers)
    assert response.status_code == 400
    error = refusal(response)
    assert error["param"] == named
    assert error["message"].startswith(f"{named}: ")
    assert UNASKED.calls == []


def test_the_metrics_carry_the_objective_and_whether_it_was_attained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judged = dataclasses.replace(
        METRICS, objective=Objective(12.5, None, "coding"), attained=True, tpot_ms_every_10=(9.5,)
    )
    monkeypatch.setattr("tests.specrouter.fake_router.METRICS", judged)
    metrics = post(FakeRouter(), PROMPT).json()["metrics"]
    asked = {"tpot_ms": 12.5, "ttft_ms": None, "slo_class": "coding", "e2e_ms": None}
    assert metrics["objective"] == {**asked, "stages": [], "on_unattainable": "best_effort"}
    assert (metrics["attained"], metrics["tpot_ms_every_10"]) == (True, [9.5])


# Refusals: nothing reaches the router


NAN, INF, HALF = float("nan"), float("inf"), "\ud800"
BAD_VALUES: dict[str, Sequence[Any]] = {
    "prompt": (3, ["a"], HALF),
    "input_ids": ("abc", [5]),  # beside a prompt
    "temperature": ("hot", -0.1, NAN, INF, 10**400),
    "top_p": (NAN, -0.5),
    "top_k": (-2, 1.5),
    "max_new_tokens": (-1, "8", NAN, 2**31),
    "seed": ("x",),
    "stop": (5, [""], ["a"] * 65, LONGEST_STOP + "a", [LONGEST_STOP, "b"]),
    "ignore_eos": ("yes",),
    "stream": (1,),
    "min_p": ("0.1", 1.5, NAN),
    "repetition_penalty": (0, [1.1], INF),
    "presence_penalty": (2.5, True),
    "frequency_penalty": (-2.5, "1"),
    "logit_bias": ([[5, 1.0]], {"five": 1}, {"-5": 1}, {"5": 101}, *({"5": x} for x in UNFIT)),
    "min_tokens": (-1, "2", 129),  # more than there may be
    "bad_words": ("bad", [""]),
    "bad_words_ids": ([[]],),
    "n": (0, 129, 1.5, "2", True),
    "logprobs": (-1, 21, True),
    "prompt_logprobs": (21,),
    "priority": (1001, 0.5),
    "timeout_s": (0, INF),
    "speculation": ("on",),
    "speculation.chain": ("small", ["tiny", "big"]),
    "speculation.depth": ("4",),
    "speculation.dept": (4,),
    "speculation.width": ("2", 0, 9),
    "speculation.inner_rounds": (2,),
    "slo": ({}, {"tpot_ms": None}, 50, ["interactive"], "urgent", "", HALF),
    "slo.tpot_ms": (0, -1, NAN, "NaN", INF, 10**400, True, [50]),
    "slo.ttft_ms": (0, NAN),
    "slo.tpot_ratio": (-0.5, "1.2", 1e308),
    "slo.tpot": (50,),
    "slo.slo_class": ("coding",),
    "logits_processors": (["f"], []),
    "allowed_token_ids": ([5],),
    "truncate_prompt_tokens": (5,),
    "guided_whitespace_pattern": (" ",),
}
BAD: list[tuple[dict[str, Any], str]] = [
    *(({**PROMPT, **fields}, place) for fields, place in cases(BAD_VALUES)),
    ({}, "prompt"),
    ({"input_ids": [1, "2"]}, "input_ids[1]"),
    ({"input_ids": [True]}, "input_ids[0]"),
    ({**PROMPT, "stop": ["a", 5]}, "stop[1]"),
    ({**PROMPT, "stop_token_ids": [None]}, "stop_token_ids[0]"),
    ({**PROMPT, "speculation": {"chain": ["small", 4]}}, "speculation.chain[1]"),
    ({**PROMPT, "speculation": {"width": 8, "depth": 9}}, "speculation.width"),
    ({**PROMPT, "bad_words": ["bad", 5]}, "bad_words[1]"),
    ({**PROMPT, "bad_words": [HALF]}, "bad_words[0]"),
    ({**PROMPT, "bad_words_ids": [5]}, "bad_words_ids[0]"),
    ({**PROMPT, "bad_words_ids": [[5, "6"]]}, "bad_words_ids[0][1]"),
    ({**PROMPT, "bad_words_ids": [[-1]]}, "bad_words_ids[0][0]"),
    ({**PROMPT, "slo": {"tpot_ratio": 1.2, "tpot_ms": 50}}, "slo.tpot_ratio"),
]


@pytest.mark.parametrize(("body", "param"), BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_field_is_a_400_that_names_it(body: dict[str, Any], param: str, stream: bool) -> None:
    response = post(UNASKED, {"stream": stream, **body})
    error = refusal(response)
    assert response.status_code == 400
    assert error["param"] == param
    assert param.partition("[")[0] in error["message"]
    assert UNASKED.calls == []


@pytest.mark.parametrize("body", [b"[]", b"null", b'"def f"', b"3"])
def test_body_that_is_no_object_is_a_400(body: bytes) -> None:
    assert "JSON object" in refusal(post(FakeRouter(), body))["message"]


def test_message_says_where_the_json_is_malformed() -> None:
    error = refusal(post(FakeRouter(), b'{"prompt": oops}'))
    assert error["code"] == "invalid_json"
    assert "character 11" in error["message"]


def test_a_union_is_refused_with_all_that_it_allows() -> None:
    message = refusal(post(FakeRouter(), {**PROMPT, "stop": 5}))["message"]
    assert "valid string" in message
    assert "valid list" in message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"speculation": {"dept": 3}},
            "speculation.dept: unknown; known are chain, depth, width, reuse_outputs",
        ),
        (
            {"slo": {"tpot": 50}},
            "slo.tpot: unknown; known are "
            "tpot_ms, ttft_ms, e2e_ms, tpot_ratio, stages, on_unattainable",
        ),
    ],
)
def test_an_unknown_field_of_our_own_objects_is_answered_with_the_known_ones(
    body: dict[str, Any], message: str
) -> None:
    assert refusal(post(FakeRouter(), {**PROMPT, **body}))["message"] == message


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("temprature", "temprature: unknown; did you mean temperature?"),
        ("depth", "depth: unknown; see /docs"),
    ],
)
def test_an_unknown_field_is_a_400_that_names_it(field: str, message: str) -> None:
    response = post(FakeRouter(), {**PROMPT, field: 1})
    assert (response.status_code, refusal(response)["param"]) == (400, field)
    assert refusal(response)["message"] == message


# Streaming


def test_stream_is_one_event_per_run_then_the_ending_then_done() -> None:
    response = post(FakeRouter(), {**PROMPT, "stream": True})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    ending = {"finish_reason": "length", "metrics": METRICS.to_json(), "seed": 7}
    last = json.dumps({"text": " é", "token_ids": [8], **ending}, ensure_ascii=False)
    assert response.content.decode() == (
        'data: {"text": " a", "token_ids": [5]}\n\n'
        'data: {"text": "b\\nc", "token_ids": [6, 7]}\n\n'
        f"data: {last}\n\n"
        "data: [DONE]\n\n"
    )


def test_a_stream_of_several_samples_numbers_its_events() -> None:
    events = stream_of(FakeRouter(), {**PROMPT, "n": 3}, PATH)
    assert len(events) == 3 * len(RUNS)
    for index in range(3):
        own = [event for event in events if event["index"] == index]
        assert "".join(event["text"] for event in own) == " ab\nc é"
        assert ["finish_reason" in event for event in own] == [False, False, True]


def test_a_stream_has_the_logprobs_of_each_run() -> None:
    events = stream_of(FakeRouter(), {**PROMPT, "logprobs": 1}, PATH)
    for event in events:
        assert [position["token_id"] for position in event["logprobs"]] == event["token_ids"]
        assert all(len(position["top"]) == 1 for position in event["logprobs"])
        assert "index" not in event


def test_an_error_of_one_sample_does_not_end_the_others() -> None:
    events = stream_of(FakeRouter(error="the engine broke"), {**PROMPT, "n": 2}, PATH)
    assert [event["index"] for event in events if "error" in event] == [1]
    assert [event["index"] for event in events if "finish_reason" in event] == [0]


@pytest.mark.parametrize(
    ("ends", "status", "code"), [("timeout", 408, "timeout"), ("cancelled", 503, "shutting_down")]
)
def test_a_text_that_was_cut_short_is_an_error_beside_what_there_is(
    ends: Any, status: int, code: str
) -> None:
    response = post(FakeRouter(ends=ends), PROMPT)
    assert response.status_code == status
    assert (response.json()["error"]["code"], response.json()["text"]) == (code, " ab\nc é")
    *_, last = stream_of(FakeRouter(ends=ends), PROMPT, PATH)
    assert last["error"]["code"] == code


# Clients that leave
