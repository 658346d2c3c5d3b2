"""Prompts: read from files, mixed by category, and dealt to rounds.

Contract: a category is a file (or a kind of built-in prompt). Every round has every category, and
all contenders of a round get the same prompts and seeds.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from modelpool.errors import ConfigError

Texts = Mapping[str, Sequence[str]]  # by category
Tokenize = Callable[[str], Sequence[int]]  # returns a text's ids, as in a prompt of the model

_FIELDS = ("prompt", "question", "text")

BUILT_IN: Texts = {
    "code": (
        "def fibonacci(n):\n",
        "import os\n\nclass Cache:\n    def __init__(self",
        'def is_prime(n: int) -> bool:\n    """Says whether n is a prime number."""\n',
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self",
    ),
    "mathematics": (
        "Question: Tom has 5 apples and buys 3 more. How many apples does he have?\nAnswer:",
        "Question: A train goes 60 miles in an hour. How far does it go in 3 hours?\nAnswer:",
        "Question: Anna reads 12 pages a day. How many pages does she read in a week?\nAnswer:",
        "Question: A box holds 24 eggs. How many eggs are in 5 boxes and a half?\nAnswer:",
    ),
    "prose": (
        "This proposal adds a new syntax for",
        "The sea was calm that morning, and the fishermen",
        "The main reason why people learn a foreign language is",
        "In the first years of the century, most of the town",
    ),
}


class Tokenizer(Protocol):
    def __call__(self, text: str) -> Any: ...
    def decode(self, token_ids: Any) -> Any: ...


@dataclass(frozen=True)
class BenchPrompt:
    category: str
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Work:
    """Prompts that are served together, with `new_tokens` output tokens each."""

    prompts: tuple[BenchPrompt, ...]
    seeds: tuple[int, ...]
    new_tokens: int
    temperature: float

    @property
    def category(self) -> str | None:
        """Category of all prompts; None if they differ."""
        known = {prompt.category for prompt in self.prompts}
        return known.pop() if len(known) == 1 else None


def load_prompts(files: Sequence[Path]) -> Texts:
    """Return texts by file name. Raises `ConfigError` for a file that is unreadable or has none."""
    if not files:
        return BUILT_IN
    texts: dict[str, list[str]] = {}
    for file in files:
        texts.setdefault(file.stem, []).extend(text_of(*one) for one in read_entries(file))
    return texts


def tokenize(texts: Texts, tokenizer: Tokenizer, limit: int) -> dict[str, list[BenchPrompt]]:
    """Return the prompts by category; those above `limit` tokens lose their beginning."""
    return {
        category: [_tokenized(category, text, tokenizer, limit) for text in found]
        for category, found in texts.items()
    }


def deal(
    prompts: Mapping[str, Sequence[BenchPrompt]],
    round_number: int,
    batch: int,
    new_tokens: int,
    temperature: float,
) -> list[Work]:
    """Return the work of one round, with enough batches for all categories.

    The categories take turns, and each cycles through its own prompts.
    """
    categories = list(prompts.values())
    count = -(-len(categories) // batch) * batch
    seeds = range(10_000 * round_number, 10_000 * round_number + count)
    first = round_number * count
    places = (divmod(index, len(categories)) for index in range(first, first + count))
    chosen = [categories[which][turn % len(categories[which])] for turn, which in places]
    return [
        Work(tuple(chosen[at : at + batch]), tuple(seeds[at : at + batch]), new_tokens, temperature)
        for at in range(0, count, batch)
    ]


def _tokenized(category: str, text: str, tokenizer: Tokenizer, limit: int) -> BenchPrompt:
    ids = tuple(tokenizer(text)["input_ids"])
    if len(ids) > limit:
        ids = ids[-limit:]
        text = str(tokenizer.decode(list(ids)))
    return BenchPrompt(category, text, ids)


def read_entries(file: Path) -> list[tuple[str, Any]]:
    """Return a file's JSON lines, each with its place in words. Raises `ConfigError` if empty."""
    try:
        # Not `splitlines`: JSON may contain other line ends, such as U+2028.
        lines = file.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError("--prompts", f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError("--prompts", f"{file} is not UTF-8 text") from error
    found = []
    for number, line in enumerate(lines, 1):
        where = f"line {number} of {file}"
        try:
            found += [(where, json.loads(line))] if line.strip() else []
        except ValueError as error:
            raise ConfigError("--prompts", f"{where} is not JSON") from error
    if not found:
        raise ConfigError("--prompts", f"{file} holds no prompts")
    return found


def text_of(where: str, entry: Any) -> str:
    """Return the text of an entry of `read_entries`. Raises `ConfigError` if it has none."""
    found = None
    if isinstance(entry, dict):
        turns = entry.get("turns")
        candidates = [entry.get(name) for name in _FIELDS]
        candidates += turns[:1] if isinstance(turns, list) else []
        found = next((text for text in candidates if isinstance(text, str) and text), None)
    if found is None:
        raise ConfigError("--prompts", f"{where} has none of {', '.join(_FIELDS)}, turns[0]")
    return found
