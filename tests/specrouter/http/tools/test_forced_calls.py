"""Forced calls by real models: of their schemas, whoever drafts, unless the limit cuts them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest

from specrouter import ChainRouter
from specrouter.http.tools.forced_calls import forced_calls
from specrouter.http.tools.formats import FORMATS
from specrouter.http.tools.tool_use import asked_tools
from specrouter.request.structure import Structure
from test_support.families import NAMES
from tests.specrouter.http.client import answer_of, configured, post, refusal

PATH = "/v1/chat/completions"
SCHEMAS: Mapping[str, dict[str, Any]] = {
    "paint": {
        "type": "object",
        "properties": {
            "colour": {"enum": ["red", "green"]},
            "name": {"type": "string", "maxLength": 6},
            "size": {"type": "integer", "minimum": 1, "maximum": 12},
        },
        "required": ["colour", "size"],
    },
    "place": {  # as pydantic writes an object within another
        "$defs": {
            "Point": {
                "type": "object",
                "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 9}},
                "required": ["x"],
            }
        },
        "properties": {
            "points": {"type": "array", "items": {"$ref": "#/$defs/Point"}, "maxItems": 2},
            "open": {"type": ["boolean", "null"]},
        },
        "required": ["points"],
    },
    'say "no"': {"type": "object", "properties": {}},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
REQUIRED: dict[str, Any] = {**CHAT, "tool_choice": "required", "parallel_tool_calls": False}


@pytest.fixture(params=["hermes", "llama3_json"])
def router(
    small_router: ChainRouter, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> ChainRouter:
    return configured(small_router, monkeypatch, tool_parser=request.param)


def choices(router: ChainRouter, **fields: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = answer_of(router, PATH, {**REQUIRED, **fields})["choices"]
    return found


def calls_of(choice: dict[str, Any]) -> list[tuple[str, str]]:
    calls = choice["message"].get("tool_calls", [])
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def assert_valid(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def function_choice(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


def check_sampled(router: ChainRouter, samples: int) -> None:
    """Of each function, and of all together, with each kind of chain."""
    chains = (NAMES[:1], ("ngram",), NAMES[:2], ("ngram",))
    forced = (*map(function_choice, SCHEMAS), "required")
    for seed, (drafters, choice) in enumerate(zip(chains, forced, strict=True)):
        override = {"chain": [*drafters, NAMES[-1]], "depth": 4}
        fields: dict[str, Any] = {"tool_choice": choice, "n": samples, "seed": seed}
        fields["temperature"] = (1.0, 1.3, 0.7, 1.0)[seed]
        routed = choices(router, speculation=override, **fields)
        alone = choices(router, speculation="off", **fields)
        assert len(routed) == samples
        assert [calls_of(one) for one in routed] == [calls_of(one) for one in alone]
        for one in routed:
            assert one["finish_reason"] == "tool_calls"
            assert one["message"]["content"] is None
            assert len(calls_of(one)) == 1
            assert_valid(calls_of(one))


def test_sampled_calls_are_of_their_schemas_and_the_same_without_speculation(
    router: ChainRouter,
) -> None:
    check_sampled(router, 1)


@pytest.mark.exact
def test_200_sampled_calls_are_of_their_schemas_and_the_same_without_speculation(
    router: ChainRouter,
) -> None:
    check_sampled(router, 50)  # in each of two formats


@pytest.mark.parametrize(
    "router", ["hermes", pytest.param("llama3_json", marks=pytest.mark.exact)], indirect=True
)
def test_one_that_is_cut_by_the_limit_says_length(router: ChainRouter) -> None:
    named = function_choice("paint")
    whole = choices(router, temperature=0, tool_choice=named)[0]
    assert whole["finish_reason"] == "tool_calls"
    [(name, arguments)] = calls_of(whole)
    assert name == "paint"
    found = [
        choices(router, temperature=0, tool_choice=named, max_tokens=limit)[0]
        for limit in range(1, 60, 24)
    ]
    for choice in found:
        if choice["finish_reason"] != "length":
            assert calls_of(choice) == calls_of(whole)
        for cut_name, cut in calls_of(choice):
            assert (cut_name, arguments[: len(cut)]) == (name, cut)
    assert found[0]["finish_reason"] == "length"


def test_one_call_is_made_unless_the_model_goes_on_by_itself(router: ChainRouter) -> None:
    fields: dict[str, Any] = {"n": 6, "seed": 5, "max_tokens": 300, "parallel_tool_calls": None}
    named: dict[str, Any] = {"tools": TOOLS[2:]}  # without arguments: few tokens
    alone, routed = (
        choices(router, **fields, **named, speculation=speculation)
        for speculation in ("off", {"chain": ["ngram", NAMES[-1]], "depth": 4})
    )
    assert [calls_of(choice) for choice in alone] == [calls_of(choice) for choice in routed]
    assert [len(calls_of(choice)) for choice in alone] == [1] * 6  # it is a model of noise


@pytest.mark.parametrize(
    "schema", [{"type": "strin"}, {"$ref": "#/$defs/none"}, {"pattern": "("}, False]
)
def test_a_schema_that_cannot_be_compiled_is_refused_by_its_place(
    router: ChainRouter, schema: Any
) -> None:
    parameters = {"properties": {"a": schema}, "required": ["a"]}
    bad = {"type": "function", "function": {"name": "bad", "parameters": parameters}}
    body = {**REQUIRED, "tools": [*TOOLS, bad]}
    response = post(router, body, PATH)
    place = "tools[3].function.parameters"
    assert (response.status_code, refusal(response)["param"]) == (400, place)
    assert post(router, {**body, "tool_choice": "auto", "max_tokens": 1}, PATH).status_code == 200


@pytest.mark.parametrize("name", FORMATS)
def test_a_form_is_compiled_once_for_all_its_functions(name: str) -> None:
    use = asked_tools(TOOLS, "required", None)
    assert use is not None
    compiled: list[Structure] = []
    structure = forced_calls(use, FORMATS[name], compiled.append, {})
    assert compiled == [structure]
