"""Objectives in bodies: stages, their ends, and what becomes of what cannot be attained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from specrouter import SLO
from specrouter.http.objective_fields import MAX_STAGES, MAX_TOKEN_CHARACTERS
from specrouter.request.objective import SloLike, Stage
from tests.specrouter.fake_router import FakeRouter, FakeTokenizer
from tests.specrouter.http.client import BODIES, UNASKED, Headers, cases, post, refusal

END = ord("]") + 100  # the fake tokenizer's id
THINKING: dict[str, Any] = {"tpot_ms": 20, "until_token": "]"}
ANSWER = {"tpot_ms": 60}
STAGES = (Stage(20.0, until_token=END), Stage(60.0))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("slo", "headers", "asked"),
    [
        ({"stages": [ANSWER]}, [], SLO(stages=(Stage(60.0),))),
        ({"stages": [THINKING, ANSWER]}, [], SLO(stages=STAGES)),
        ({"stages": [{**THINKING, "until_token": END}, ANSWER]}, [], SLO(stages=STAGES)),
        (
            {"stages": [{"tpot_ms": 20, "until_tokens": 8, "until_token": None}, ANSWER]},
            [],
            SLO(stages=(Stage(20.0, until_tokens=8), Stage(60.0))),
        ),
        (
            {"stages": [THINKING, ANSWER], "e2e_ms": 9000},
            [("x-slo-ttft-ms", "900")],
            SLO(stages=STAGES, e2e_ms=9000.0, ttft_ms=900.0),
        ),
        (
            {"tpot_ms": 40, "on_unattainable": "reject"},
            [],
            SLO(tpot_ms=40.0, on_unattainable="reject"),
        ),
        (
            {"tpot_ms": 40, "on_unattainable": "reject"},
            [("x-slo-ttft-ms", "900")],
            SLO(tpot_ms=40.0, ttft_ms=900.0, on_unattainable="reject"),
        ),
        ({"tpot_ms": 40, "on_unattainable": None, "stages": None}, [], SLO(tpot_ms=40.0)),
        (
            {"on_unattainable": "reject"},
            [("x-slo-ttft-ms", "900")],
            SLO(ttft_ms=900.0, on_unattainable="reject"),
        ),
        (
            {"on_unattainable": "reject"},
            [("x-slo-tpot-ms", "40"), ("x-slo-e2e-ms", "9000")],
            SLO(tpot_ms=40.0, e2e_ms=9000.0, on_unattainable="reject"),
        ),
        ({}, [("x-slo-tpot-ms", "40")], SLO(tpot_ms=40.0)),
    ],
)
def test_every_endpoint_takes_stages_and_what_becomes_of_the_unattainable(
    slo: Any, headers: Headers, asked: SloLike, stream: bool, path: str
) -> None:
    router = FakeRouter()
    response = post(router, {**BODIES[path], "slo": slo, "stream": stream}, path, headers)
    assert response.status_code == 200, response.text
    assert router.slos == [asked]


FIRST = "slo.stages[0]"


# Values of a first stage that are refused, before a good last one.
BAD_STAGE: dict[str, Sequence[Any]] = {
    "tpot_ms": (None, -1, float("nan")),
    "until": (8,),
    "until_tokens": (0, 2.5),
    "until_token": (-1, True, "", "]]", "\ud800", "]" * (MAX_TOKEN_CHARACTERS + 1)),
}
BAD: list[tuple[dict[str, Any], str]] = [
    *(
        ({"stages": [{"tpot_ms": 20, **fields}, ANSWER]}, f"{FIRST}.{name}")
        for fields, name in cases(BAD_STAGE)
    ),
    ({"stages": []}, "slo.stages"),
    ({"stages": [ANSWER] * (MAX_STAGES + 1)}, "slo.stages"),
    ({"stages": {"tpot_ms": 20}}, "slo.stages"),
    ({"stages": [20]}, FIRST),
    ({"stages": [{}]}, f"{FIRST}.tpot_ms"),
    ({"stages": [THINKING, {"tpot_ms": 0}]}, "slo.stages[1].tpot_ms"),
    ({"stages": [{**THINKING, "until_tokens": 8}, ANSWER]}, f"{FIRST}.until_token"),
    ({"stages": [ANSWER, ANSWER]}, FIRST),
    ({"stages": [THINKING]}, f"{FIRST}.until_token"),
    ({"stages": [ANSWER], "tpot_ms": 20}, "slo.tpot_ms"),
    ({"stages": [ANSWER], "tpot_ratio": 2}, "slo.tpot_ratio"),
    ({"on_unattainable": "reject"}, "slo"),
    ({"tpot_ms": 40, "on_unattainable": "refuse"}, "slo.on_unattainable"),
    ({"tpot_ms": 40, "on_unattainable": True}, "slo.on_unattainable"),
]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("slo", "named"), BAD)
def test_a_bad_objective_is_a_400_that_names_the_field(slo: Any, named: str, path: str) -> None:
    error = refusal(post(UNASKED, {**BODIES[path], "slo": slo}, path))
    assert error["param"] == named
    assert error["message"].startswith(f"{named}: ")
    assert UNASKED.calls == []


@pytest.mark.parametrize(
    ("slo", "value"),
    [
        ({"stages": [ANSWER]}, "60"),
        ({"tpot_ms": 40, "on_unattainable": "reject"}, "60"),
        ({"tpot_ratio": 2, "on_unattainable": "reject"}, "60"),
        ({"on_unattainable": "reject"}, "-60"),
        ({"on_unattainable": "reject"}, "nan"),
    ],
)
def test_a_header_that_contradicts_the_body_or_is_no_number_is_named(slo: Any, value: str) -> None:
    body = {**BODIES["/generate"], "slo": slo}
    error = refusal(post(FakeRouter(), body, headers=[("x-slo-tpot-ms", value)]))
    assert error["param"] == "x-slo-tpot-ms"


def test_an_end_that_is_several_tokens_is_told_how_many() -> None:
    body = {**BODIES["/generate"], "slo": {"stages": [{**THINKING, "until_token": "end"}, ANSWER]}}
    error = refusal(post(FakeRouter(), body))
    assert "'end' is 3 tokens" in error["message"]


def test_an_end_that_the_tokenizer_does_not_know_is_refused() -> None:
    beyond = chr(FakeTokenizer.vocab_size)  # it gives the last id to whatever comes after it
    body = {**BODIES["/generate"], "slo": {"stages": [{**THINKING, "until_token": beyond}, ANSWER]}}
    error = refusal(post(FakeRouter(), body))
    assert error["param"] == f"{FIRST}.until_token"
    assert "does not know" in error["message"]


def test_an_unknown_key_of_a_stage_is_answered_with_the_known_ones() -> None:
    body = {**BODIES["/generate"], "slo": {"stages": [{"tpot": 50}]}}
    message = refusal(post(FakeRouter(), body))["message"]
    assert message == f"{FIRST}.tpot: unknown; known are tpot_ms, until_tokens, until_token"
