"""Objectives in bodies: stages, their ends, and what becomes of what cannot be attained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from specrouter import SLO
from specrouter.request.objective import SloLike, Stage
from specrouter.request.slo_fields import MAX_STAGES, MAX_TOKEN_CHARACTERS
from tests.specrouter.fake_router import FakeRouter, FakeTokenizer
from tests.specrouter.http.client import BODIES, UNASKED, Headers, cases, post, refusal

END = ord("]") + 100  # the fake tokenizer's id
THINKING: dict[str, Any] = {"tpot_ms": 20, "until_token": "]"}
ANSWER = {"tpot_ms": 60}
COUNTED = {"tpot_ms": 20, "until_tokens": 8, "until_token": None}
REJECT = {"on_unattainable": "reject"}
TPOT, TTFT, E2E = "x-slo-tpot-ms", "x-slo-ttft-ms", "x-slo-e2e-ms"
STAGES = (Stage(20.0, until_token=END), Stage(60.0))


@pytest.mark.parametrize(
    ("slo", "headers", "asked"),
    [
        (None, {}, None),
        ("interactive", {}, "interactive"),
        ({"tpot_ms": 40, "ttft_ms": None}, {}, SLO(tpot_ms=40)),
        (None, {"X-SLO-TPOT-MS": " 4.5e1 ", TTFT: "900"}, SLO(tpot_ms=45, ttft_ms=900)),
        ({"tpot_ms": 40}, {TPOT: "40.0", E2E: "5000"}, SLO(tpot_ms=40, e2e_ms=5000)),
        ("coding", {TTFT: "900"}, SLO(tpot_ratio=1.2, ttft_ms=900, slo_class="coding")),
        ({}, {TPOT: "40"}, SLO(tpot_ms=40)),
        ({"stages": [ANSWER]}, {}, SLO(stages=(Stage(60.0),))),
        ({"stages": [THINKING, ANSWER]}, {}, SLO(stages=STAGES)),
        ({"stages": [{**THINKING, "until_token": END}, ANSWER]}, {}, SLO(stages=STAGES)),
        ({"stages": [COUNTED, ANSWER]}, {}, SLO(stages=(Stage(20.0, 8), Stage(60.0)))),
        (
            {"stages": [THINKING, ANSWER], "e2e_ms": 9000},
            {TTFT: "900"},
            SLO(stages=STAGES, e2e_ms=9000.0, ttft_ms=900.0),
        ),
        ({"tpot_ms": 40, **REJECT}, {}, SLO(tpot_ms=40.0, on_unattainable="reject")),
        (REJECT, {TTFT: "900"}, SLO(ttft_ms=900.0, on_unattainable="reject")),
        ({"tpot_ms": 40, "on_unattainable": None, "stages": None}, {}, SLO(tpot_ms=40.0)),
    ],
)
def test_an_objective_comes_from_the_body_the_headers_or_both(
    slo: Any, headers: dict[str, str], asked: SloLike
) -> None:
    router = FakeRouter()
    for path, body in BODIES.items():
        response = post(router, {**body, "slo": slo}, path, [*headers.items()])
        assert response.status_code == 200, response.text
    assert router.slos == [asked] * len(BODIES)


FIRST = "slo.stages[0]"


# Values of a first stage that are refused, before a good last one.
BAD_STAGE: dict[str, Sequence[Any]] = {
    "tpot_ms": (None, -1, float("nan")),
    "until": (8,),
    "until_tokens": (0,),
    "until_token": (-1, "", "]]", "\ud800", "]" * (MAX_TOKEN_CHARACTERS + 1)),
}
BAD: list[tuple[dict[str, Any], str]] = [
    *(
        ({"stages": [{"tpot_ms": 20, **fields}, ANSWER]}, f"{FIRST}.{name}")
        for fields, name in cases(BAD_STAGE)
    ),
    ({"stages": []}, "slo.stages"),
    ({"stages": [ANSWER] * (MAX_STAGES + 1)}, "slo.stages"),
    ({"stages": [20]}, FIRST),
    ({"stages": [THINKING, {"tpot_ms": 0}]}, "slo.stages[1].tpot_ms"),
    ({"stages": [{**THINKING, "until_tokens": 8}, ANSWER]}, f"{FIRST}.until_token"),
    ({"stages": [ANSWER, ANSWER]}, FIRST),
    ({"stages": [THINKING]}, f"{FIRST}.until_token"),
    ({"stages": [ANSWER], "tpot_ms": 20}, "slo.tpot_ms"),
    ({"on_unattainable": "reject"}, "slo"),
    ({"tpot_ms": 40, "on_unattainable": "refuse"}, "slo.on_unattainable"),
]


@pytest.mark.parametrize(("slo", "named"), BAD)
def test_a_bad_objective_is_a_400_that_names_the_field(slo: Any, named: str) -> None:
    for path, body in BODIES.items():
        error = refusal(post(UNASKED, {**body, "slo": slo}, path))
        assert error["param"] == named
        assert error["message"].startswith(f"{named}: ")
    assert UNASKED.calls == []


NO_NUMBERS = ("0", "-1", "nan", "inf", "1e400", "fast", "", "1_000", "5 ms")


@pytest.mark.parametrize(
    ("slo", "headers", "named"),
    [
        *((None, [(name, value)], name) for name in (TPOT, TTFT, E2E) for value in NO_NUMBERS),
        (REJECT, [(TPOT, "-60")], TPOT),
        ({"tpot_ms": 40}, [(TPOT, "41")], TPOT),
        ({"stages": [ANSWER]}, [(TPOT, "60")], TPOT),
        ("coding", [(TPOT, "48")], TPOT),
        ("urgent", [(TPOT, "40")], "slo"),
        (None, [(TPOT, "40"), (TPOT, "40")], TPOT),
    ],
)
def test_a_header_that_is_no_number_or_contradicts_the_body_is_a_400_that_names_it(
    slo: Any, headers: Headers, named: str
) -> None:
    error = refusal(post(UNASKED, {**BODIES["/generate"], "slo": slo}, headers=headers))
    assert error["param"] == named
    assert error["message"].startswith(f"{named}: ")
    assert UNASKED.calls == []


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("end", "'end' is 3 tokens"),
        (chr(FakeTokenizer.vocab_size), "does not know"),  # it has the last id for what is beyond
    ],
)
def test_an_end_that_is_no_single_known_token_is_refused(end: str, said: str) -> None:
    body = {**BODIES["/generate"], "slo": {"stages": [{**THINKING, "until_token": end}, ANSWER]}}
    error = refusal(post(FakeRouter(), body))
    assert error["param"] == f"{FIRST}.until_token"
    assert said in error["message"]
