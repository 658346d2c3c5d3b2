"""Prompts of a trace: a text of the arrival's kind, cut or repeated to its length.

Contract: the same seed gives the same prompts. A text is known by the name of its file and by the
"category" of its line; a category of the trace that knows none of them takes any.
"""

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from specrouter.bench.prompts import BUILT_IN, Texts, Tokenize, load_prompts
from specrouter.bench.traces import Arrival

# Of a trace's category, the files or categories of prompts, the best first.
_KNOWN_AS: Mapping[str, tuple[str, ...]] = {
    "coding": ("humaneval", "code", "coding"),
    "chat": ("mt_bench", "chat", "prose"),
    "summarization": ("summarization", "summarisation", "prose"),
    "gsm8k": ("gsm8k", "math"),
    "humaneval": ("humaneval", "code", "coding"),
    "mt_bench": ("mt_bench", "chat", "prose"),
    "mgsm": ("mgsm_de", "math-multilingual", "math"),
}


def load_labelled(files: Sequence[Path]) -> Texts:
    """Texts by file name and by category, so most are there twice; the built-in ones without files.

    Raises `ConfigError`, as `load_prompts` does.
    """
    if not files:
        return BUILT_IN
    texts: dict[str, list[str]] = {}
    for file in files:
        found = load_prompts([file])[file.stem]
        for text, category in zip(found, _categories(file), strict=True):
            for label in {file.stem, category} - {None}:
                texts.setdefault(str(label), []).append(text)
    return texts


def texts_for(category: str, texts: Texts) -> Sequence[str]:
    """Those that suit a category of a trace."""
    for label in (*_KNOWN_AS.get(category, ()), category):
        if label in texts:
            return texts[label]
    return list(dict.fromkeys(itertools.chain.from_iterable(texts.values())))


def fill_prompts(
    arrivals: Sequence[Arrival], texts: Texts, tokenize: Tokenize, seed: int
) -> list[tuple[int, ...]]:
    """Token ids of each arrival's prompt, as many as it says."""
    draw = random.Random(f"prompts {seed}")
    by_category = {a.category: texts_for(a.category, texts) for a in arrivals}
    chosen = [draw.choice(by_category[arrival.category]) for arrival in arrivals]
    ids = {text: tuple(tokenize(text)) for text in set(chosen)}
    return [
        fitted(ids[text], arrival.input_tokens)
        for text, arrival in zip(chosen, arrivals, strict=True)
    ]


def fitted(token_ids: Sequence[int], length: int) -> tuple[int, ...]:
    """The beginning of a prompt that is too long; one that is too short, again and again."""
    return tuple(itertools.islice(itertools.cycle(token_ids), length))


def _categories(file: Path) -> list[str | None]:
    lines = file.read_text(encoding="utf-8").split("\n")
    found = [json.loads(line).get("category") for line in lines if line.strip()]
    return [category if isinstance(category, str) and category else None for category in found]
