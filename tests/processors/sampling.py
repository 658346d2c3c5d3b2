"""Rows to choose for, places in their texts, and what `transformers` makes of scores there."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from processors.contexts import Contexts
from processors.sampler import Sampler
from processors.sampling_row import SamplingSettings

VOCAB = 50
GREEDY = SamplingSettings()
PROMPT = (3, 4, 5, 6)
OUTPUT = (7, 7, 8)
WORDS = ((9,), (7, 8, 10), (8, 10), (8, 11), (20, 21), (3, 4, 5, 6, 7, 7, 8, 12))
FULL = SamplingSettings(
    temperature=0.8,
    top_k=12,
    top_p=0.9,
    seed=3,
    min_p=0.05,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias=((7, 2.0), (30, -5.0)),
    min_tokens=5,
    end_token_ids=(0, 1),
    bad_words_ids=WORDS,
)


class Shift:
    """A processor whose result depends on the whole text."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.roll(int(input_ids.sum()) % 7, dims=-1)


class Broken:
    def __init__(self, result: Any = None) -> None:
        self._result = result

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        scores.zero_()
        if self._result is None:
            raise RuntimeError("broken")
        return self._result


def random_logits(count: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    drawn = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(count, VOCAB, generator=drawn, dtype=torch.float64)).to(dtype)


def edited(logits: Tensor, s: SamplingSettings, prompt: Sequence[int], output: list[int]) -> Tensor:
    """[1, V] what `transformers` makes of [1, V] before the temperature."""
    text = torch.tensor([[*prompt, *output]], dtype=torch.int64)
    scores: Tensor = logits.double().clone()
    for token, bias in s.logit_bias:
        scores[:, token] += bias
    scores = RepetitionPenaltyLogitsProcessor(s.repetition_penalty)(text, scores)
    counts = torch.tensor(np.bincount(output, minlength=VOCAB)).double()
    scores = scores - s.frequency_penalty * counts - s.presence_penalty * counts.clamp(max=1)
    if s.bad_words_ids:
        scores = NoBadWordsLogitsProcessor([list(word) for word in s.bad_words_ids])(text, scores)
    if s.end_token_ids:
        ends = list(s.end_token_ids)
        scores = MinNewTokensLengthLogitsProcessor(len(prompt), s.min_tokens, ends)(text, scores)
    return scores


def warped(logits: Tensor, s: SamplingSettings) -> Tensor:
    """[1, V] what `transformers` makes of [1, V]: temperature, top-k, top-p, min-p."""
    scores: Tensor = logits.double() / s.temperature
    nothing = torch.zeros(1, 0, dtype=torch.int64)
    if s.top_k:
        scores = TopKLogitsWarper(s.top_k)(nothing, scores)
    if s.top_p < 1.0:
        scores = TopPLogitsWarper(s.top_p)(nothing, scores)
    if s.min_p > 0.0:
        scores = cast(Any, MinPLogitsWarper(s.min_p))(nothing, scores)
    return scores


def open_rows(*rows: SamplingSettings, prompt: Sequence[int] = ()) -> Sampler:
    sampler = Sampler(VOCAB, window=16)
    for row, one in enumerate(rows):
        sampler.open(row, one, prompt)
    return sampler


def contexts_at(
    rows: list[int], positions: list[int], paths: list[list[int]] | None = None
) -> Contexts:
    """`paths`: of any lengths; the rest of each line is filled with what must not matter."""
    if paths is None:
        return Contexts(
            rows=np.array(rows),
            positions=np.array(positions),
            depths=np.zeros(len(rows), dtype=np.int64),
        )
    depths = [len(path) for path in paths]
    filled = torch.full((len(rows), max(depths) + 1), -1)
    for line, path in zip(filled, paths, strict=True):
        line[: len(path)] = torch.tensor(path, dtype=torch.int64)
    return Contexts(
        rows=np.array(rows), positions=np.array(positions), depths=np.array(depths), paths=filled
    )


def scores_of(
    one: SamplingSettings,
    logits: Tensor,
    position: int,
    path: list[int] | None = None,
    prompt: Sequence[int] = PROMPT,
    output: Sequence[int] = OUTPUT,
) -> Tensor:
    """[V] of a row that is alone."""
    sampler = Sampler(VOCAB, window=16)
    sampler.open(0, one, prompt, output)
    paths = None if path is None else [path]
    return sampler.scores(logits, contexts_at([0], [position], paths))[0]
