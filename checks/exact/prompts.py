"""Prompts of the checks: a folder of JSONL files, or the few that stand here.

Each line is an object with `category` and `prompt`. A clone of the repository has no such
folder, so nothing may need one.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

_CODE = """def is_prime(n: int) -> bool:
    \"\"\"Return whether n is a prime number.

    >>> is_prime(7)
    True
    \"\"\"
"""
_CLASS = """class Stack:
    \"\"\"A stack of integers.\"\"\"

    def __init__(self):
        self.items = []

    def push(self, item):
"""
_MATH = (
    "Question: A farmer has 12 hens. Each hen lays 5 eggs a week, and he sells them for $0.50 "
    "each. How many dollars does he make in 4 weeks?\nAnswer:"
)
_TRAIN = (
    "Question: A train travels 60 miles in the first hour and 45 miles in the second. How far "
    "does it travel in both hours?\nAnswer: In both hours the train travels 60 + 45 ="
)
_PEP = "Abstract\n========\n\nThis PEP proposes a change to the way in which the standard library"
_SUMMARY = (
    "Summarize: The river had risen for three days. On the fourth the bridge was closed, and "
    "people who worked on the other side took the long way round by the mill. Nobody was hurt. "
    "When the water fell, the mayor promised a higher bridge, as mayors before him had done.\n"
    "Summary:"
)
_TEXTS = (
    ("code", _CODE),
    ("math", _MATH),
    ("prose", _PEP),
    ("chat", "Write a short letter to a friend about a week by the sea."),
    ("translation", "Translate German to English: Der Zug hat heute Verspätung, weil es schneit."),
    ("qa", "Question: Which planet is closest to the sun?\nAnswer:"),
    ("summarization", _SUMMARY),
    ("code", _CLASS),
    ("math", _TRAIN),
    ("prose", "The function returns the number of elements for which the"),
    ("chat", "What should I pack for a hike of two days in the mountains in autumn?"),
    ("translation", "Frage: Wie viele Äpfel hat Anna, wenn sie 3 von 10 verschenkt?\nAntwort:"),
    ("code", "import os\nimport sys\n\n\ndef main():\n    for name in os.listdir("),
    ("math", "Question: What is 15% of 240?\nAnswer: 15% of 240 is"),
    ("other", "a"),
    ("other", "0, 1, 1, 2, 3, 5, 8, 13, 21,"),
)


@dataclass(frozen=True)
class Prompt:
    category: str
    text: str


def load_prompts(folder: Path | None, count: int) -> list[Prompt]:
    """At most `count` prompts, the categories in turn, in an order that never changes."""
    prompts = [Prompt(*each) for each in _TEXTS] if folder is None else list(_read(folder))
    if not prompts:
        raise ValueError(f"no prompts in {folder}")
    categories: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        categories.setdefault(prompt.category, []).append(prompt)
    rounds = itertools.zip_longest(*categories.values())
    turns = [prompt for turn in rounds for prompt in turn if prompt is not None]
    return turns[:count]


def encode(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, limit: int
) -> list[tuple[int, ...]]:
    """Token ids of each prompt, cut to its first `limit`."""
    return [tuple(tokenizer(prompt.text)["input_ids"][:limit]) for prompt in prompts]


def _read(folder: Path) -> Iterator[Prompt]:
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            yield Prompt(entry["category"], entry["prompt"])
