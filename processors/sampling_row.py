"""Sampling settings of one row, with the data that they need about its text.

Contract: `SamplingSettings` is what was requested, and does not change. `SamplingRow` holds it in a
form for batches of rows, with the committed text if the settings depend on it. The changes of
scores are in `processors.score_edits`, the choice is in `processors.sampler`.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from processors.grammar import Bits, TokenGrammar
from processors.token_tree import Ints


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Settings of one row; by default greedy, with everything else off.

    Raises `ValueError` for NaN, which no comparison with a limit would notice.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()  # excluded while fewer than min_tokens were chosen
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    # as in `transformers`: (input_ids [1, L], scores [1, V]) -> [1, V]
    logits_processors: tuple[Any, ...] = ()
    stream: int = 0  # distinguishes samples that share a seed, below 2**32
    # At its beginning. `min_tokens` then excludes an end only if another token may follow.
    grammar: TokenGrammar | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        numbers = {name: value for name, value in vars(self).items() if isinstance(value, float)}
        numbers |= {f"the bias of {token}": bias for token, bias in self.logit_bias}
        missing = [name for name, value in numbers.items() if math.isnan(value)]
        if missing:
            raise ValueError(f"{', '.join(missing)}: not a number")


@dataclass
class TokenCounts:
    """Counts of a row's committed text, on one device."""

    in_prompt: Tensor  # [vocab_size] bool
    in_output: Tensor  # [vocab_size] int32
    length: int  # of the counted text


class SamplingRow:
    """An open row: its settings, what follows from them, and its text if they depend on it.

    Attributes:
        biased, biases: [b] ids, and what is added to their scores (float64).
        penalized: a penalty is on, so that `counts` are needed.
        excludes: `excluded` has an id at some position.
        phrases: bad words of several tokens, by their length L: [p, L] each.
        end_bits: the ids that end a text, of a row with a grammar.
        reads_text: a setting depends on the text.
        edits: scores change before the temperature, apart from a grammar.
        warps: ids are excluded after the temperature.
        text: prompt and output so far; empty if no setting depends on it.
    """

    def __init__(
        self,
        settings: SamplingSettings,
        prompt: Sequence[int],
        output: Sequence[int],
        vocab_size: int,
    ) -> None:
        self.settings = settings
        self.biased: Ints = np.array([token for token, _ in settings.logit_bias], dtype=np.int64)
        self.biases = np.array([bias for _, bias in settings.logit_bias], dtype=np.float64)
        self.penalized = (
            settings.repetition_penalty != 1.0
            or settings.presence_penalty != 0.0
            or settings.frequency_penalty != 0.0
        )
        words = set(settings.bad_words_ids)
        self._bad = np.array(sorted(word[0] for word in words if len(word) == 1), dtype=np.int64)
        self._bad_or_end = np.union1d(self._bad, np.array(settings.end_token_ids, dtype=np.int64))
        is_held = settings.grammar is None and settings.min_tokens > 0  # a grammar's mask does it
        self._held_until = settings.min_tokens if is_held else 0
        self.excludes = len(self._bad) > 0 or (is_held and len(settings.end_token_ids) > 0)
        ends = np.isin(np.arange(vocab_size if settings.grammar else 0), settings.end_token_ids)
        self.end_bits: Bits = np.packbits(ends, bitorder="little")
        self.phrases = _by_length(word for word in words if len(word) > 1)
        self.reads_text = (
            self.penalized or len(self.phrases) > 0 or len(settings.logits_processors) > 0
        )
        self.edits = self.reads_text or self.excludes or len(self.biased) > 0
        self.warps = settings.temperature > 0 and (
            settings.top_k > 0 or settings.top_p < 1.0 or settings.min_p > 0.0
        )
        self.text = [*prompt, *output] if self.reads_text else []
        self._prompt_length = len(prompt)
        self._vocab_size = vocab_size
        self._counts: dict[torch.device, TokenCounts] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Add committed output tokens."""
        if self.reads_text:
            self.text.extend(tokens)

    def excluded(self, position: int) -> Ints:
        """Return the ids that are excluded at an output position for any text before it."""
        return self._bad_or_end if position < self._held_until else self._bad

    def counts(self, device: torch.device) -> TokenCounts:
        """Return updated counts of the committed text, for a row that `reads_text` only."""
        with torch.inference_mode(False):  # they also change outside inference mode
            if device not in self._counts:
                in_prompt = torch.zeros(self._vocab_size, dtype=torch.bool)
                in_prompt[self.text[: self._prompt_length]] = True
                self._counts[device] = TokenCounts(
                    in_prompt.to(device, non_blocking=True),
                    torch.zeros(self._vocab_size, dtype=torch.int32, device=device),
                    self._prompt_length,
                )
            counts = self._counts[device]
            new = torch.tensor(self.text[counts.length :], dtype=torch.int64)
            if len(new):
                ones = torch.ones(len(new), dtype=torch.int32, device=device)
                counts.in_output.index_add_(0, new.to(device, non_blocking=True), ones)
                counts.length = len(self.text)
        return counts


def _by_length(phrases: Iterable[tuple[int, ...]]) -> dict[int, Ints]:
    """Group phrases by length, without padding.

    One long phrase beside many short ones takes no more memory than its own ids.
    """
    groups = itertools.groupby(sorted(phrases, key=lambda phrase: (len(phrase), phrase)), key=len)
    return {length: np.array(list(group), dtype=np.int64) for length, group in groups}
