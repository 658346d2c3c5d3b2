"""Requests that a fuzzer sends: whole ones from the service's own schema, and raw ones.

Contract: strategies only; nothing is sent here. Schemathesis makes bodies that fit the schema and
bodies that do not. Most of those would be refused for one field, so others take a body that would
be served and graft a few generated fields onto it. Raw requests are what no schema describes:
bytes, deep nesting, huge numbers, halves of surrogate pairs, wrong content types and methods.
Whatever would be served asks for few tokens.
"""

import json
from collections.abc import Mapping
from typing import Any

import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.core import NOT_SET

from checks.service.fuzz_answer import SERVED, Sent

_MOST_TOKENS = 8
_MOST_SAMPLES = 4
_JSON = {"content-type": "application/json"}
_PATHS = (*SERVED, "/health", "/metrics", "/v1/models", "/version", "/openapi.json", "/nowhere")
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW")
_TYPES = (
    "application/json", "application/json; charset=utf-16", "text/plain", "", "application/xml",
    "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "\xff", "json",
)  # fmt: skip
_HUGE = (10**400, -(10**400), 2**63, 2**64, 2**31, 1e308, -0.0, 5e-324, float("inf"), float("nan"))


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
    return st.one_of(_deep_bodies(), _huge_bodies(), _surrogate_bodies(), _broken_bodies())


@st.composite
def _deep_bodies(draw: st.DrawFn) -> bytes:
    depth = draw(st.sampled_from((10, 500, 5_000, 100_000)))
    opening, closing = draw(st.sampled_from((("[", "]"), ('{"a":', "}"))))
    inner = "1" if opening != "[" else ""
    nested = opening * depth + inner + closing * depth * draw(st.booleans())
    path = draw(st.sampled_from(tuple(SERVED)))
    name = draw(st.sampled_from(("prompt", "guided_json", "messages", "logit_bias", "anything")))
    others = json.dumps(SERVED[path])[1:-1]
    return f'{{{others}, "{name}": {nested}}}'.encode()


@st.composite
def _huge_bodies(draw: st.DrawFn) -> bytes:
    body: dict[str, Any] = dict(SERVED[draw(st.sampled_from(tuple(SERVED)))])
    numbers = (
        "temperature", "top_p", "top_k", "min_p", "seed", "n", "logprobs", "min_tokens",
        "timeout_s", "priority", "repetition_penalty", "presence_penalty", "prompt", "tokens",
    )  # fmt: skip
    for name in draw(st.lists(st.sampled_from(numbers), min_size=1, max_size=3)):
        body[name] = draw(st.sampled_from(_HUGE))
    return encoded(body)


@st.composite
def _surrogate_bodies(draw: st.DrawFn) -> bytes:
    """As escapes, which JSON allows, and as bytes, which are no UTF-8."""
    text = draw(st.sampled_from(("\ud800", "a\udfff", "\udc00\ud800")))
    path = draw(st.sampled_from(tuple(SERVED)))
    name = draw(st.sampled_from(("prompt", "stop", "model", "user", "guided_regex", text)))
    body = {**SERVED[path], name: text}
    if draw(st.booleans()):
        return json.dumps(body).encode()
    return json.dumps(body, ensure_ascii=False).encode(errors="surrogatepass")


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
