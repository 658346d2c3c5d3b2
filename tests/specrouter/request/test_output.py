"""Outputs and deltas are shown in a line, and print as their text."""

from __future__ import annotations

from dataclasses import replace

from specrouter import Delta
from specrouter.notebook import Comparison, Text
from specrouter.request.output import CycleDraft
from tests.request_outputs import request_output

LONG = "a line of text\n" * 100
CHAIN = ("small", "big")


def text() -> Text:
    output = request_output(list(range(24)), {"e2e_ms": 100.0, "chains": {CHAIN: 3}})
    drafts = [CycleDraft(chain=CHAIN, tokens=(1,) * 20)] * 50
    return Text(**{**vars(output), "text": LONG, "drafts": drafts})


def test_an_output_is_shown_in_one_short_line_with_what_matters() -> None:
    shown = repr(text())
    assert shown.startswith("Text('a line of text\\na line")
    assert shown.endswith("', 24 tokens, length, 240.0 tokens/s)")
    assert len(shown) < 120
    assert str(text()) == LONG
    failed = request_output([], {}, error="the target failed")
    assert repr(failed) == "RequestOutput('', 0 tokens, error, error='the target failed')"


def test_a_delta_is_shown_in_one_short_line_the_last_with_its_output() -> None:
    delta = Delta(text="a, b", token_ids=[1, 2, 3], draft=CycleDraft(chain=CHAIN))
    assert (repr(delta), str(delta)) == ("Delta('a, b', 3 tokens)", "a, b")
    assert repr(replace(delta, index=2)) == "Delta('a, b', 3 tokens, index=2)"
    last = Delta(finish_reason="length", output=text())
    assert repr(last) == f"Delta('', 0 tokens, {text()!r})"


def test_a_comparison_is_shown_in_one_short_line() -> None:
    shown = repr(Comparison(text(), text(), (2.0,) * 8))
    assert shown.startswith("Comparison(equal, 2.00 times as fast with speculation (2.00 to 2.00)")
    assert "Text('a line" in shown
    assert len(shown) < 250
