"""How answers are encoded: what takes long beside the event loop, and every event in one line."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from specrouter import RequestOutput
from specrouter.http import streams
from specrouter.http.completions import CompletionAnswer
from specrouter.request.output import CycleDraft
from tests.specrouter.fake_router import METRICS, FakeRouter
from tests.specrouter.http.client import noted, post, stream_of

PATH = "/v1/completions"
PROMPT = {"prompt": [5, 6] * 500, "prompt_logprobs": 1, "echo": True, "logprobs": 1}
TEXT = {"prompt": "ab" * 50_000, "return_token_strs": True}


@pytest.mark.parametrize(
    ("path", "body", "entries"),
    [
        (PATH, PROMPT, '"rank":'),
        (PATH, {**PROMPT, "stream": True}, '"rank":'),
        ("/tokenize", TEXT, '"a"'),
    ],
)
def test_long_lists_are_encoded_entry_by_entry_beside_the_event_loop(
    path: str, body: dict[str, Any], entries: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """json lets no other thread run meanwhile, nor the loop's."""
    encoded = noted(monkeypatch, streams, "encoded")
    assert post(FakeRouter(), body, path).text.count(entries) >= 999
    assert not any(call.in_loop for call in encoded)
    lengths = [len(call.result) for call in encoded]
    assert max(lengths) < sum(lengths) / 10


def test_answers_with_drafts_are_made_beside_the_event_loop() -> None:
    threads = list[bool]()

    class Noted(CompletionAnswer):
        def __init__(self) -> None: ...

        def whole(self, outputs: streams.Outputs) -> dict[str, Any]:
            threads.append(threading.current_thread() is threading.main_thread())
            return {}

    plain = RequestOutput(text="", token_ids=[], finish_reason="length", metrics=METRICS, seed=7)
    for output in (plain, replace(plain, drafts=[CycleDraft(chain=("big",))])):
        asyncio.run(streams._answer_of([(0, output)], Noted()))
    assert threads == [True, False]


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"a": None, "b": [{"é": 1}] * 100, "c": []},
        [[None, {"a": [{}, {"b": "\u2028"}] * 70}], "c", {"d": [[1]] * 65}],
        {"a": list(range(20_000)), "b": ["é,]"] * (2 * streams._SLICE), "c": [[]] * 9000},
    ],
)
def test_what_is_encoded_in_parts_is_the_same(value: Any) -> None:
    assert streams._in_parts(value) == streams.encoded(value)


def test_no_character_ends_the_line_of_an_event() -> None:
    """httpx's clients take more characters for the end of a line than the format does."""
    text = "a\x85b\u2028c\u2029d\x0be\x1cf\n"
    router = FakeRouter(runs=[(text, [5])] * 3)
    fields: dict[str, Any] = {"prompt": [5, 6], "echo": True, "logprobs": 0}
    content = post(router, {**fields, "stream": True}, PATH).content.decode()
    assert all(line.startswith("data: ") for line in content.splitlines() if line)
    texts = [chunk["choices"][0]["text"] for chunk in stream_of(router, fields, PATH)]
    assert texts == [f" ab{text}", text, text]
