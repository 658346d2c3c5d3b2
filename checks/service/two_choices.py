"""Data of the evaluation: questions with two answers, and whole texts."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_NAMES = ("Anna", "Tom", "Maria", "Ben")
_CODE = ("for i in range(10", "def add(a, b", "print(len(items", "return max(values")
_TEXTS = (
    "The sea was calm that morning, and the fishermen went out early.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1)\n",
    "Question: Tom has 5 apples and buys 3 more. How many has he?\nAnswer: 8",
    "import os\n\nclass Cache:\n    def __init__(self):\n        self.items = {}\n",
    "A café in Zürich sells 12 kinds of tea: green, black, white and nine others.",
)


def choice_questions() -> list[dict[str, Any]]:
    """Forty of them; `label` is the place of the right choice."""
    sums = [
        (f"Question: {name} has {a} apples and buys {b} more.\nAnswer: {name} has", a + b)
        for name in _NAMES
        for a, b in ((2, 3), (5, 4), (1, 6), (3, 3), (7, 1), (4, 4), (2, 7))
    ]
    questions = [
        {"text": text, "choices": [f" {total} apples.", f" {total + 5} pears."], "label": 0}
        for text, total in sums
    ]
    for start in _CODE:
        for right, wrong in (("):", ")}"), ("):\n    ", "]]\n    "), ("))", "((")):
            questions.append({"text": start, "choices": [wrong, right], "label": 1})
    return questions


def whole_texts() -> list[dict[str, Any]]:
    return [{"text": text * repeats} for text in _TEXTS for repeats in (1, 3)]


def write_lines(path: Path, items: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(item)}\n" for item in items), encoding="utf-8")
