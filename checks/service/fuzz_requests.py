"""Requests that a fuzzer sends: whole ones from the service's own schema, and raw ones.

Contract: strategies only; nothing is sent here. Schemathesis makes bodies that fit the schema and
bodies that do not. Most of those would be refused for one field, so others take a body that would
be served and graft a few generated fields onto it. Raw requests are what no schema describes:
bytes, what `hostile` has (deep nesting, huge numbers, halves of surrogate pairs), wrong content
types and methods.
Whatever would be served asks for few tokens.
"""

import json
import random
from collections.abc import Mapping
from typing import Any

import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.core import NOT_SET

from checks.service.fuzz_answer import SERVED, Sent
from checks.service.hostile import hostile_request

_MOST_TOKENS = 8
_MOST_SAMPLES = 4
_JSON = {"content-type": "application/json"}
_PATHS = (*SERVED, "/health", "/metrics", "/v1/models", "/version", "/openapi.json", "/nowhere")
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW")
_TYPES = (
    "application/json", "application/json; charset=utf-16", "text/plain", "", "application/xml",
    "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "\xff", "json",
)  # fmt: skip


def every_request(schema: schemathesis.BaseSchema) -> "st.SearchStrategy[Sent]":
    """A third each: by the schema, grafted, raw."""
    operations = [result.ok() for result in schema.get_all_operations()]
    cases = st.one_of([_cases(operation) for operation in operations])
    bodies = [one for one in operations if one.path in SERVED]
    grafted = st.one_of([_grafted(operation) for operation in bodies])
    return st.one_of(cases, grafted, raw_requests())


def _cases(operation: Any) -> "st.SearchStrategy[Sent]":
    modes = [GenerationMode.POSITIVE]
    if operation.body or operation.query:
        modes.append(GenerationMode.NEGATIVE)
    made = [operation.as_strategy(generation_mode=mode) for mode in modes]
    return st.one_of(made).map(_of_case)


def _of_case(case: Any) -> Sent:
    body = None if case.body is NOT_SET else bounded(case.body)
    headers = {**(_JSON if body is not None else {}), **dict(case.headers or {})}
    content = b"" if body is None else encoded(body)
    return Sent(case.method, case.formatted_path, _headers(headers), content)


@st.composite
def _grafted(draw: st.DrawFn, operation: Any) -> Sent:
    """A request that would be served, with one to four fields of a generated one."""
    mode = draw(st.sampled_from((GenerationMode.POSITIVE, GenerationMode.NEGATIVE)))
    generated = draw(operation.as_strategy(generation_mode=mode)).body
    body = dict(SERVED[operation.path])
    if isinstance(generated, dict) and generated:
        names = draw(st.lists(st.sampled_from(sorted(generated)), min_size=1, max_size=4))
        body.update({name: generated[name] for name in names})
    return Sent("POST", operation.path, _headers(_JSON), encoded(bounded(body)))


def raw_requests() -> "st.SearchStrategy[Sent]":
    wrong = st.one_of(_odd_bodies(), st.binary(max_size=300))
    headers = st.builds(_typed, st.sampled_from(_TYPES), _header_values())
    json_headers = st.just(_headers(_JSON))
    plain = st.just(encoded(SERVED["/v1/completions"]))
    return st.one_of(
        st.builds(
            Sent, st.sampled_from(_METHODS), st.sampled_from(_PATHS), st.one_of(headers), wrong
        ),
        st.builds(Sent, st.just("POST"), st.sampled_from(tuple(SERVED)), json_headers, wrong),
        st.builds(Sent, st.just("POST"), st.just("/v1/completions"), headers, plain),
    )


def _odd_bodies() -> "st.SearchStrategy[bytes]":
    draws = st.integers(0, 2**32 - 1).map(random.Random)
    return st.one_of(draws.map(hostile_request).map(lambda one: one.content), _broken_bodies())


@st.composite
def _broken_bodies(draw: st.DrawFn) -> bytes:
    """A good body, cut or with a few bytes changed."""
    whole = bytearray(encoded(SERVED[draw(st.sampled_from(tuple(SERVED)))]))
    for place in draw(st.lists(st.integers(0, len(whole) - 1), max_size=3)):
        whole[place] = draw(st.integers(0, 255))
    return bytes(whole[: draw(st.integers(0, len(whole)))])


def _header_values() -> "st.SearchStrategy[dict[str, str]]":
    names = (
        "x-slo-tpot-ms", "x-slo-ttft-ms", "x-slo-e2e-ms", "x-request-id", "authorization", "accept",
        "origin",
    )  # fmt: skip
    text = st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=40)
    values = st.one_of(text, st.sampled_from(("nan", "inf", "-1", "1e999", "0", "50", "1_0")))
    return st.dictionaries(st.sampled_from(names), values, max_size=3)


def _typed(content_type: str, others: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return _headers({"content-type": content_type, **others})


def _headers(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((name, str(value)) for name, value in headers.items())


def bounded(body: Any) -> Any:
    """The same, but what would be served asks for few tokens and samples."""
    if not isinstance(body, dict):
        return body
    limits = {
        "max_tokens": _MOST_TOKENS, "max_completion_tokens": _MOST_TOKENS,
        "max_new_tokens": _MOST_TOKENS, "n": _MOST_SAMPLES, "best_of": _MOST_SAMPLES,
        "min_tokens": _MOST_TOKENS,
    }  # fmt: skip
    small = dict(body)
    for name, most in limits.items():
        value = small.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and most < value < 2**20:
            small[name] = 1 + value % most
    asks = ("max_tokens", "max_completion_tokens", "max_new_tokens")
    if all(small.get(name) is None for name in asks):
        small["max_tokens" if "messages" in small else "max_new_tokens"] = _MOST_TOKENS
    return small


def encoded(body: Any) -> bytes:
    return json.dumps(body, default=repr).encode()
