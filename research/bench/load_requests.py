"""The requests of a load benchmark: at each rate the same for all policies.

Contract: pure but for files that are read. The same options, point, round and times alone give the
same requests. A prompt is a text of its arrival's kind, cut or repeated to its length; a text is
known by the name of its file and by the "category" of its line. Raises `ConfigError` for what does
not fit the trace or the models.
"""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from modelpool.errors import ConfigError
from research.bench import traces
from research.bench.options import LoadOptions
from research.bench.traces import Arrival
from specrouter.bench.prompts import BUILT_IN, Texts, Tokenize, read_entries, text_of
from specrouter.bench.replay import LoadRequest

_SEEDS_OF_A_ROUND = 100_000
# Of a trace's category, the files or categories of prompts, the best first.
_KNOWN_AS: Mapping[str, tuple[str, ...]] = {
    "coding": ("humaneval", "code", "coding"),
    "chat": ("mt_bench", "chat", "prose"),
    "summarization": ("summarization", "summarisation", "prose"),
}


@dataclass(frozen=True)
class Point:
    """One of the sweep. `arrivals` are the requests that all its policies get."""

    scale: float
    arrivals: tuple[Arrival, ...]

    def to_json(self) -> dict[str, Any]:
        rate = traces.rate_per_s(self.arrivals)
        return {
            "scale": self.scale,
            "requests_per_s": rate if rate < float("inf") else None,
        }


def read_arrivals(options: LoadOptions) -> list[Arrival]:
    """The requests that are asked for, before any rescaling."""
    if options.poisson is not None:
        return traces.poisson(
            options.poisson, options.requests, options.trace_baseline_ms, options.seed
        )
    assert options.trace is not None, "the options have one of both"
    found = traces.read_trace(options.trace, options.trace_baseline_ms)
    return traces.excerpt(found, options.skip, options.requests)


def sweep(trace: Sequence[Arrival], options: LoadOptions, limit: int) -> list[Point]:
    """A point for each scale.

    Args:
        limit: tokens of a request.
    """
    if options.output_tokens is not None and options.output_tokens >= limit:
        raise ConfigError("--output-tokens", f"must be below the model's length of {limit}")
    resized = traces.resized(trace, options.length_scale, options.output_tokens, limit)
    return [Point(x, tuple(traces.stretched(resized, x))) for x in options.scale]


@dataclass(frozen=True)
class Alone:
    """What a request takes on the target only while nothing else runs.

    `tpot_ms` of a token; `reading`: pairs of a prompt's tokens and its TTFT in ms, rising; none
    where no objective needs it.
    """

    tpot_ms: float
    reading: tuple[tuple[int, float], ...] = ()

    def ttft_ms(self, prompt_tokens: int) -> float | None:
        """On the line through `reading`; None without it."""
        if not self.reading:
            return None
        tokens, took_ms = np.array(self.reading).T
        return float(np.interp(prompt_tokens, tokens, took_ms))


@dataclass(frozen=True)
class RequestSource:
    """`tokenize` and `texts` make the prompts that `options` ask for."""

    tokenize: Tokenize
    texts: Texts
    options: LoadOptions

    def requests(self, point: Point, number: int, alone: Alone | None) -> list[LoadRequest]:
        """Of round `number`, from 0 on; without objectives where `alone` is not known yet."""
        options = self.options
        prompts = fill_prompts(point.arrivals, self.texts, self.tokenize, options.seed)
        first_seed = options.seed + number * _SEEDS_OF_A_ROUND
        return [
            self._with_objectives(
                LoadRequest(
                    at_s=arrival.at_s,
                    category=arrival.category,
                    token_ids=prompt,
                    new_tokens=arrival.output_tokens,
                    temperature=options.temperature,
                    seed=first_seed + index,
                ),
                arrival.slo_ratio,
                alone,
            )
            for index, (arrival, prompt) in enumerate(zip(point.arrivals, prompts, strict=True))
        ]

    def _with_objectives(
        self, request: LoadRequest, ratio: float | None, alone: Alone | None
    ) -> LoadRequest:
        """`ratio`: of the time of a token."""
        if alone is None:
            return request
        e2e_ms, slowdown = self.options.e2e_ms, self.options.ttft_slowdown
        ttft_ms = None if slowdown is None else alone.ttft_ms(len(request.token_ids))
        if slowdown is not None and ttft_ms is not None:
            ttft_ms *= slowdown
        return replace(
            request,
            objective_ms=None if ratio is None else ratio * alone.tpot_ms,
            e2e_ms=e2e_ms,
            ttft_ms=ttft_ms,
        )


def load_labelled(files: Sequence[Path]) -> Texts:
    """Texts by file name and by category, so most are there twice; the built-in ones without files.

    The order of labels is the files': what suits no category is drawn from all texts in it. Raises
    `ConfigError`, as `load_prompts` does.
    """
    if not files:
        return BUILT_IN
    texts: dict[str, list[str]] = {}
    for file in files:
        for where, entry in read_entries(file):
            text, category = text_of(where, entry), entry.get("category")
            has_own = isinstance(category, str) and category not in ("", file.stem)
            for label in (file.stem, category) if has_own else (file.stem,):
                texts.setdefault(label, []).append(text)
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
