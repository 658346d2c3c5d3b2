"""The API's schema says what every field and answer means."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from specrouter.http.app import create_app
from specrouter.http.openapi import TAGS
from tests.specrouter.fake_router import FakeRouter
from tests.specrouter.http.client import BODIES, post, request

SCHEMA: dict[str, Any] = create_app(FakeRouter()).openapi()  # type: ignore[arg-type]


OPERATIONS: list[tuple[str, str, dict[str, Any]]] = [
    (method, path, operation)
    for path, methods in SCHEMA["paths"].items()
    for method, operation in methods.items()
]
WITHOUT_BODY = {"/router/restart"}


def test_every_field_of_every_object_is_described() -> None:
    bare = [
        f"{name}.{field}"
        for name, schema in SCHEMA["components"]["schemas"].items()
        for field, one in schema.get("properties", {}).items()
        if not one.get("description", "").strip()
    ]
    assert bare == []
    assert len(SCHEMA["components"]["schemas"]["ChatRequest"]["properties"]) > 40


@pytest.mark.parametrize(("method", "path", "operation"), OPERATIONS)
def test_every_endpoint_has_a_group_a_summary_and_an_answer(
    method: str, path: str, operation: dict[str, Any]
) -> None:
    assert set(operation["tags"]) <= {tag["name"] for tag in TAGS}
    assert operation["summary"]
    assert operation["responses"]["200"]["content"]
    has_body = method == "post" and path not in WITHOUT_BODY
    assert has_body == ("requestBody" in operation), path


POSTS = [
    (path, operation)
    for method, path, operation in OPERATIONS
    if method == "post" and path not in WITHOUT_BODY
]


@pytest.mark.parametrize(("path", "operation"), POSTS)
def test_examples_are_answered(path: str, operation: dict[str, Any]) -> None:
    content = operation["requestBody"]["content"]["application/json"]
    assert content["schema"]
    response = post(FakeRouter(), content["example"], path)
    assert response.status_code == 200, response.text
    conforms(response.json(), operation)


GETS = [
    (path, operation)
    for method, path, operation in OPERATIONS
    if method == "get" and path != "/metrics"  # it is no JSON; see test_prometheus
]


@pytest.mark.parametrize(("path", "operation"), GETS)
def test_answers_are_as_described(path: str, operation: dict[str, Any]) -> None:
    response = request(FakeRouter(), "GET", path.replace("{model_id}", "big"))
    assert response.status_code == 200
    conforms(response.json(), operation)


def conforms(answer: Any, operation: dict[str, Any]) -> None:
    schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.validate(answer, {**schema, "components": SCHEMA["components"]})


def test_the_schema_documents_every_refusal_and_no_422() -> None:
    for path in BODIES:
        documented = set(SCHEMA["paths"][path]["post"]["responses"])
        assert {"200", "400", "401", "404", "408", "413", "503"} <= documented
        assert "422" not in documented


@pytest.mark.parametrize(
    ("path", "good", "bad"),
    [
        ("/generate", {"prompt": "a", "logit_bias": {"5": 1}}, {"prompt": "a", "top_p": 1.5}),
        ("/v1/completions", {"prompt": [[1, 2]], "stop": None}, {"prompt": "a", "logprobs": 21}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
            {"messages": [{"role": "robot", "content": "a"}]},
        ),
        ("/tokenize", {"prompt": "a"}, {"prompt": 3}),
    ],
)
def test_the_schema_tells_a_good_body_from_a_bad_one(
    path: str, good: dict[str, Any], bad: dict[str, Any]
) -> None:
    body = SCHEMA["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    check = jsonschema.Draft202012Validator({**body, "components": SCHEMA["components"]})
    assert check.is_valid(good)
    assert not check.is_valid(bad)
    assert post(FakeRouter(), good, path).status_code == 200
    assert post(FakeRouter(), bad, path).status_code == 400
