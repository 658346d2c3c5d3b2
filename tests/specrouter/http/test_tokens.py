"""Tokens, models and the version."""

from __future__ import annotations

from typing import Any

import pytest

from tests.specrouter.fake_router import FakeRouter, FakeTokenizer
from tests.specrouter.http.client import post, refusal, request

IDS = FakeTokenizer()("ab")["input_ids"]


@pytest.mark.parametrize(
    ("body", "tokens", "pieces"),
    [
        ({"prompt": "ab"}, IDS, None),
        ({"prompt": "ab", "add_special_tokens": False}, IDS[1:], None),
        ({"prompt": "ab", "return_token_strs": True}, IDS, ["<s>", "a", "b"]),
    ],
)
def test_a_text_is_tokenized_as_a_prompt_would_be(
    body: dict[str, Any], tokens: list[int], pieces: list[str] | None
) -> None:
    expected = {"count": len(tokens), "max_model_len": 64, "tokens": tokens, "token_strs": pieces}
    assert post(FakeRouter(), body, "/tokenize").json() == expected


def test_a_chat_is_tokenized_with_its_template() -> None:
    router = FakeRouter()
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    tokens = post(router, chat, "/tokenize").json()["tokens"]
    post(router, chat, "/v1/chat/completions")
    assert tokens == router.calls[0][0]


def test_tokens_are_text_again() -> None:
    assert post(FakeRouter(), {"tokens": IDS}, "/detokenize").json() == {"prompt": "<s>ab"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {}, "prompt"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a", "b": 1}]}, "messages[0].b"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a"}], "chat_template": "b"},
            "chat_template",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [FakeTokenizer.vocab_size]}, "tokens"),
    ],
)
def test_bad_field_is_a_400_that_names_it(path: str, body: dict[str, Any], param: str) -> None:
    response = post(FakeRouter(), body, path)
    assert (response.status_code, refusal(response)["param"]) == (400, param)


def test_models_lists_the_target_as_openai_does() -> None:
    listed = request(FakeRouter(), "GET", "/v1/models").json()
    assert listed["object"] == "list"
    [model] = listed["data"]
    assert (model["id"], model["object"], model["root"]) == ("big", "model", "big")
    assert {"created", "owned_by", "max_model_len"} < set(model)
    assert request(FakeRouter(), "GET", "/v1/models/big").json()["id"] == "big"


def test_no_name_is_that_of_the_model_that_is_served() -> None:
    assert request(FakeRouter(), "GET", "/v1/models/").json()["data"][0]["id"] == "big"
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        assert post(FakeRouter(), {**body, "model": ""}, path).status_code == 200


@pytest.mark.parametrize("name", ["small", "org/name", "%F0%9F"])
def test_another_model_is_a_404(name: str) -> None:
    response = request(FakeRouter(), "GET", f"/v1/models/{name}")
    assert response.status_code == 404
    assert refusal(response)["code"] == "model_not_found"


def test_the_version_is_told() -> None:
    assert request(FakeRouter(), "GET", "/version").json()["version"]
