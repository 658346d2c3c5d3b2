"""Whatever a client sends, the answer is never a 500: a real router's checks, on an engine without
models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from specrouter.http.app import create_app
from specrouter.http.openai_fields import ChatRequest, CompletionRequest
from specrouter.http.request_fields import GenerateRequest
from specrouter.http.tokens import DetokenizeRequest, TokenizeChat, TokenizeText
from test_support.factories import make_tokenizer
from tests.pure import few
from tests.specrouter.fake_router import router_without_models
from tests.specrouter.http.client import send

BODIES: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/generate": (GenerateRequest, {"prompt": "a"}),
    "/v1/completions": (CompletionRequest, {"prompt": "a"}),
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "a"}]}),
    "/tokenize": (TokenizeText, {"prompt": "a"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [5]}),
}
SCALARS = st.one_of(
    st.sampled_from(["", "a", "off", "\ud800", "\0", "😀", "text", "stop", "1e5", "a" * 5000]),
    st.sampled_from([None, True, False, -1, 0, 1, 2, 5, 20, 129, 2**31, 2**63, 2**64, -(10**400)]),
    st.sampled_from([0.0, -0.5, 0.7, 1e-300, 1e308, float("nan"), float("inf"), float("-inf")]),
)
NESTED_KEYS = st.sampled_from(
    ["a", "5", "\ud800", "type", "n", "text", "role", "content", "json_schema", "schema", "json",
     "regex", "choice", "chain", "depth", "width", "tpot_ms", "ttft_ms", "include_usage",
     "function", "arguments", "tool_calls", "name", "messages", "tokenize", "properties",
     "self", "turns", "tools", "conversations", "bos_token"]
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(NESTED_KEYS, inner, max_size=4)
    ),
    max_leaves=8,
)
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool", "robot", 3])
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": ROLES, "content": st.one_of(VALUES, st.just("a"))},
        optional={"tool_calls": VALUES, "name": VALUES},
    ),
    max_size=3,
)
GOOD = {
    "model": st.sampled_from(["big", "small"]),
    "prompt": st.sampled_from(["a b", ["a", "b"], [5, 6], [[5], [6, 7]], [10**6], [[]]]),
    "messages": MESSAGES,
    "stream": st.booleans(),
    "n": st.integers(1, 3),
    "echo": st.booleans(),
    "max_tokens": st.integers(0, 4),
    "max_new_tokens": st.integers(0, 4),
    "stream_options": st.just({"include_usage": True, "continuous_usage_stats": True}),
    "timeout_s": st.just(20),
}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastAPI]:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    with pytest.MonkeyPatch.context() as patch:
        router, engine = router_without_models(make_tokenizer(directory), patch)
        engine.max_request_tokens = 40
        with router:
            yield create_app(router)


def fields_of(path: str) -> st.SearchStrategy[dict[str, Any]]:
    """A body that is good but for some fields."""
    model, good = BODIES[path]
    names = {*model.model_fields, *(TokenizeChat.model_fields if path == "/tokenize" else ())}
    few = {"max_new_tokens" if path == "/generate" else "max_tokens": 3}
    optional = {name: st.one_of(VALUES, GOOD.get(name, VALUES)) for name in names}
    chosen = st.lists(st.sampled_from(sorted(names)), max_size=4, unique=True)
    strategy: st.SearchStrategy[dict[str, Any]] = chosen.flatmap(
        lambda some: st.fixed_dictionaries({name: optional[name] for name in some})
    ).map(lambda fields: {**good, **few, **fields})
    return strategy


def assert_well_answered(app: FastAPI, path: str, content: bytes) -> None:
    response = send(app, "POST", path, content, [("Content-Type", "application/json")])
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code == 200:
        assert "generation_failed" not in response.text
    else:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]


@pytest.mark.parametrize("path", BODIES)
def test_any_values_of_known_fields(app: FastAPI, path: str) -> None:
    @settings(
        max_examples=few(60),
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(fields_of(path))
    def check(body: dict[str, Any]) -> None:
        assert_well_answered(app, path, json.dumps(body).encode())

    check()


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b'"a"',
        b"\xff",
        b'{"prompt": "a", "tokens": [5], "messages": [' + b"[" * 5000,
        b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "guided_json": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}",
        b'{"messages": [{"role": "user", "content": ' + b"[" * 900 + b"]" * 900 + b"}]}",
    ],
)
def test_any_bytes(app: FastAPI, path: str, content: bytes) -> None:
    assert_well_answered(app, path, content)
