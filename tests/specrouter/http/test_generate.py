"""`POST /generate` in front of a fake router: answers, refusals, framing, disconnects."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest

from specrouter import SamplingParams, Speculation, Structure, TokenLogprobs
from specrouter.http.request_fields import MAX_STOP_CHARACTERS
from tests.specrouter.fake_router import METRICS, RUNS, TOKEN_TEXTS, FakeRouter
from tests.specrouter.http.client import UNASKED, cases, post, refusal, stream_of

PATH = "/generate"
LONGEST_STOP, LONG_STOP = "a" * MAX_STOP_CHARACTERS, "a" * (MAX_STOP_CHARACTERS // 2)
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
        "return_drafts": True,
        "receipt": True,
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
    null = {"reuse_outputs": None, "depth": None}
    post(router, {**PROMPT, "priority": -2, "timeout_s": 1.5, "speculation": null})
    post(router, {**PROMPT, "timeout_s": 90})
    post(router, PROMPT)
    assert router.terms == [(-2, 1.5, 3), (0, 60.0, 3), (0, 60.0, 3)]
    assert min(router.elapsed_s) > 0.0, "to read a request takes of its time"


@pytest.mark.parametrize(
    ("stop", "reached"), [("\n\n", ("\n\n",)), ([LONG_STOP] * 2, (LONG_STOP, LONG_STOP))]
)
def test_one_stop_text_needs_no_list_and_several_may_be_long(stop: Any, reached: Any) -> None:
    router = FakeRouter()
    post(router, {**PROMPT, "stop": stop})
    assert router.calls[0][1].stop == reached


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


def test_failed_generation_is_a_500_that_names_the_cause_and_keeps_the_texts() -> None:
    responses = [post(FakeRouter(error="out of memory"), {**PROMPT, "n": n}) for n in (1, 2)]
    for response in responses:
        assert response.status_code == 500
        error = response.json()["error"]
        assert (error["message"], error["type"]) == ("out of memory", "server_error")
    answer, several = (response.json() for response in responses)
    assert (answer["finish_reason"], answer["text"]) == ("error", " ab\nc é")
    assert [choice["finish_reason"] for choice in several["choices"]] == ["length", "error"]


# Refusals: nothing reaches the router


NAN, INF, HALF = float("nan"), float("inf"), "\ud800"
BAD_VALUES: dict[str, Sequence[Any]] = {
    "prompt": (HALF,),
    "input_ids": ([5],),  # beside a prompt
    "temperature": (-0.1, NAN, INF, 10**400),
    "top_p": (NAN, -0.5),
    "top_k": (-2, 1.5),
    "max_new_tokens": (-1, NAN, 2**31),
    "stop": ([""], ["a"] * 65, LONGEST_STOP + "a", [LONGEST_STOP, "b"]),
    "min_p": (1.5, NAN),
    "repetition_penalty": (0, INF),
    "presence_penalty": (2.5, True),
    "frequency_penalty": (-2.5,),
    "logit_bias": ([[5, 1.0]], {"five": 1}, {"-5": 1}, {"5": 101}, *({"5": x} for x in UNFIT)),
    "min_tokens": (-1, 129),  # more than there may be
    "bad_words": ([""],),
    "bad_words_ids": ([[]],),
    "n": (0, 129, 1.5, True),
    "logprobs": (-1, 21, True),
    "prompt_logprobs": (21,),
    "cache_salt": ("", "x" * 1025),
    "priority": (1001, 0.5),
    "timeout_s": (0, INF),
    "speculation": ("on",),
    "speculation.chain": ("small", ["tiny", "big"]),
    "speculation.dept": (4,),
    "speculation.width": ("2", 0, 9),
    "slo": ({}, {"tpot_ms": None}, ["interactive"], "urgent", "", HALF),
    "slo.tpot_ms": (0, NAN, "NaN", INF, 10**400, True),
    "slo.tpot_ratio": (-0.5, 1e308),
    "slo.slo_class": ("coding",),
}
BAD: list[tuple[dict[str, Any], str]] = [
    *(({**PROMPT, **fields}, place) for fields, place in cases(BAD_VALUES)),
    ({}, "prompt"),
    ({"input_ids": [1, "2"]}, "input_ids[1]"),
    ({"input_ids": [True]}, "input_ids[0]"),
    ({**PROMPT, "stop": ["a", 5]}, "stop[1]"),
    ({**PROMPT, "speculation": {"chain": ["small", 4]}}, "speculation.chain[1]"),
    ({**PROMPT, "speculation": {"width": 8, "depth": 9}}, "speculation.width"),
    ({**PROMPT, "bad_words": [HALF]}, "bad_words[0]"),
    ({**PROMPT, "bad_words_ids": [[5, "6"]]}, "bad_words_ids[0][1]"),
    ({**PROMPT, "slo": {"tpot_ratio": 1.2, "tpot_ms": 50}}, "slo.tpot_ratio"),
]


@pytest.mark.parametrize(("body", "param"), BAD)
def test_bad_field_is_a_400_that_names_it(body: dict[str, Any], param: str) -> None:
    error = refusal(post(UNASKED, body))
    assert error["param"] == param
    assert param.partition("[")[0] in error["message"]
    assert UNASKED.calls == []


@pytest.mark.parametrize("body", [b"[]", b"null", b'"def f"', b"3"])
def test_body_that_is_no_object_is_a_400(body: bytes) -> None:
    assert "JSON object" in refusal(post(FakeRouter(), body))["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temprature": 1}, "temprature: unknown; did you mean temperature?"),
        ({"max_tokens": 5}, "max_tokens: this endpoint calls it max_new_tokens"),
        ({"tpot_ms": 50}, 'tpot_ms: belongs in slo: {"slo": {"tpot_ms": ...}}'),
        (
            {"slo": {"tpot": 50}},
            "slo.tpot: unknown; known are "
            "tpot_ms, ttft_ms, e2e_ms, tpot_ratio, stages, on_unattainable",
        ),
    ],
)
def test_an_unknown_field_is_answered_with_the_known_ones(
    fields: dict[str, Any], message: str
) -> None:
    error = refusal(post(UNASKED, {**PROMPT, **fields}))
    assert (error["param"], error["message"]) == (message.partition(":")[0], message)
    assert UNASKED.calls == []


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
