"""Chats of many kinds, made by templates: questions, lists, prose, code, edits and quotations."""

import itertools
from collections.abc import Iterator

KINDS = {"prose": (0, 2, 4), "code": (1, 8), "sums": (6, 7)}  # of the ten kinds of chats
_TOPICS = (
    "the tides", "a small bakery", "the history of bridges", "learning to swim", "honey bees",
    "a night train", "public libraries", "growing tomatoes", "the first computers", "old maps",
)  # fmt: skip
_TASKS = (
    "returns the n-th Fibonacci number", "reverses the words of a sentence",
    "counts the vowels of a string", "merges two sorted lists",
    "checks whether a number is prime", "removes duplicates and keeps the order",
    "finds the longest word", "parses a line of a CSV file", "adds two matrices",
    "turns seconds into hours, minutes and seconds",
)  # fmt: skip
_LANGUAGES = ("German", "French", "Spanish", "Italian", "Portuguese")
_NAMES = ("total", "items", "count", "result", "values", "index", "record", "buffer", "node", "key")
_CODE = """def {name}_of(rows):
    {name} = []
    for row in rows:
        if row is not None:
            {name}.append(row.strip().lower())
    return {name}
"""
_NOTE = (
    "On Monday we talked about {topic}. Anna asked who would write the report, and Ben said that "
    "he would, if somebody else took care of the pictures. On Tuesday nobody had time. On "
    "Wednesday the report about {topic} was finished, with {number} pages and two pictures."
)
_MODULE = """import csv
from dataclasses import dataclass


@dataclass
class {kind}:
    name: str
    amount: float
    unit: str = "kg"

    def scaled(self, factor: float) -> "{kind}":
        return {kind}(self.name, self.amount * factor, self.unit)


def read_{noun}(path: str) -> list[{kind}]:
    found = []
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            found.append({kind}(row["name"], float(row["amount"]), row["unit"]))
    return found


def total_{noun}(entries: list[{kind}]) -> float:
    total = 0.0
    for entry in entries:
        total += entry.amount
    return total
"""
_CHANGES = ("`found` to `entries_read`", "`row` to `line`", "`total` to `amount_in_all`",
            "`entry` to `one`", "`path` to `file_name`", "`factor` to `times`")  # fmt: skip
# Of code that comes again nearly whole.
EDITS = tuple(
    f"Rename {change}, and return the whole file:\n\n```python\n"
    f"{_MODULE.format(kind=kind, noun=noun)}```"
    for kind, noun in (("Ingredient", "ingredients"), ("Sample", "samples"))
    for change in _CHANGES
)


def chats() -> Iterator[str]:
    """Messages of a user, one kind after the other, a hundred of them."""
    kinds = (_questions(), _functions(), _lists(), _edits(), _stories(),
             _quotations(), _sums(), _translations(), _tables(), _summaries())  # fmt: skip
    return itertools.chain.from_iterable(zip(*kinds, strict=True))


def _questions() -> Iterator[str]:
    for topic in _TOPICS:
        yield f"What should everybody know about {topic}? Answer in a few sentences."


def _functions() -> Iterator[str]:
    for task in _TASKS:
        yield f"Write a Python function that {task}, with a docstring and two examples."


def _lists() -> Iterator[str]:
    for number, topic in enumerate(_TOPICS, start=5):
        yield f"Give me a numbered list of {number} short facts about {topic}."


def _edits() -> Iterator[str]:
    for name in _NAMES:
        code = _CODE.format(name=name)
        yield f"Rename the variable `rows` to `lines`, and write the whole code again:\n\n{code}"


def _stories() -> Iterator[str]:
    for topic in _TOPICS:
        yield f"Write the beginning of a story in which {topic} and an old friend matter."


def _quotations() -> Iterator[str]:
    for number, topic in enumerate(_TOPICS, start=3):
        note = _NOTE.format(topic=topic, number=number)
        yield f"Repeat the following text word for word:\n\n{note}"


def _sums() -> Iterator[str]:
    for number in range(3, 13):
        yield (
            f"A shop sells {number} boxes of {2 * number} pencils for {number - 1} euros each. How "
            "many pencils are that, and what do all boxes cost? Think step by step."
        )


def _translations() -> Iterator[str]:
    for number, topic in enumerate(_TOPICS):
        language = _LANGUAGES[number % len(_LANGUAGES)]
        yield f'Translate into {language}: "My sister has read three books about {topic}."'


def _tables() -> Iterator[str]:
    for task, name in zip(_TASKS, _NAMES, strict=True):
        yield (
            f'Write three JSON objects, one a line, with the keys "{name}", "unit" and "comment", '
            f"as tests of code that {task}."
        )


def _summaries() -> Iterator[str]:
    for number, topic in enumerate(_TOPICS, start=11):
        note = _NOTE.format(topic=topic, number=number)
        yield f"{note} {note}\n\nSay in two sentences what happened, and quote the last sentence."


def texts(kind: str) -> list[str]:
    """Return the prompts of one of `KINDS`, or `edits`."""
    if kind == "edits":
        return list(EDITS)
    return [text for at, text in enumerate(chats()) if at % 10 in KINDS[kind]]
