"""Reasoning and structures by real models: the same text whoever drafts, streamed or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specrouter import ChainRouter
from tests.specrouter.http.client import answer_of, configured, stream_of

PATH = "/v1/chat/completions"
TEMPLATES = {
    "harmony": "{{ messages[0].content }}<|start|>assistant{# <|channel|><|message|> #}",
    "think": "{{ messages[0].content }}{# </think> #}",
}


@pytest.mark.parametrize("form", TEMPLATES)
def test_a_choice_behind_reasoning_is_one_text(
    small_router: ChainRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    (tmp_path / "template").write_text(TEMPLATES[form])
    router = configured(small_router, monkeypatch, chat_template=tmp_path / "template")
    choices = [" yes and so on", " no, not at all"]
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hi"}],
        "structured_outputs": {"choice": choices},
        "max_tokens": 48,
        "temperature": 0.7,
        "seed": 5,
        "n": 4,
    }
    found = []
    for speculation in ("off", {"depth": 4, "width": 2}):
        answer = answer_of(router, PATH, {**body, "speculation": speculation})
        found.append([one["message"] for one in answer["choices"]])
    assert found[0] == found[1]
    streamed = stream_of(router, body, PATH)
    ended = 0
    for index, message in enumerate(found[0]):
        deltas = [
            choice["delta"]
            for chunk in streamed
            for choice in chunk["choices"]
            if choice["index"] == index
        ]
        for field in ("content", "reasoning"):
            whole = message.get(field) or ""
            assert "".join(delta.get(field) or "" for delta in deltas) == whole
        ended += message["content"] in choices
        assert any(one.startswith(message["content"] or "") for one in choices)
    assert ended or form == "harmony"  # a small model seldom spells its tags
