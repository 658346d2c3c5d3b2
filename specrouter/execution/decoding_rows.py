"""The data of running requests that a cycle needs, by row.

These are limits of length, the sampler's settings, and requests for log-probabilities and drafts.
The state manager allocates and frees the rows.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from processors import Sampler, SamplingSettings
from specrouter.cycle import Ints
from specrouter.execution.logprobs import PromptLogprobs
from specrouter.request.spec import RequestSpec
from statemgr import StateManager


@dataclass(frozen=True, kw_only=True)
class _RowFacts:
    prompt_tokens: int
    most_tokens: int
    logprobs: int | None
    returns_drafts: bool
    sampled: bool


class DecodingRows:
    """The open rows; `sampler` and `prompt_logprobs` have the same rows.

    Args:
        manager: allocates the rows, and has their tokens.
        vocab_size: of the target.
        eos_token_ids: tokens that end a text, unless its request goes on after them.
        window: the most output positions of a row that a cycle uses.
        make_sampler: makes a sampler of `vocab_size` and `window`.
    """

    def __init__(
        self,
        manager: StateManager,
        vocab_size: int,
        eos_token_ids: Collection[int],
        window: int,
        make_sampler: Callable[[int, int], Sampler] = Sampler,
    ) -> None:
        self.sampler = make_sampler(vocab_size, window)
        self.prompt_logprobs = PromptLogprobs()
        self._manager = manager
        self._eos_token_ids = eos_token_ids
        self._facts: dict[int, _RowFacts] = {}

    def open(self, row: int, request: RequestSpec, device: torch.device | None = None) -> None:
        """Begin a row's request; `device`: see `Sampler.open`."""
        params = request.params
        self._facts[row] = _RowFacts(
            prompt_tokens=len(request.token_ids),
            most_tokens=request.most_tokens,
            logprobs=params.logprobs,
            returns_drafts=params.return_drafts,
            sampled=params.temperature > 0,
        )
        settings = sampling_settings(request, self._eos_token_ids)
        self.sampler.open(row, settings, request.token_ids, request.generated, device)
        self.prompt_logprobs.open(row, request.token_ids, params.prompt_logprobs)

    def close(self, row: int) -> None:
        self.sampler.close(row)
        self.prompt_logprobs.close(row)
        self._facts.pop(row, None)  # None: `open` may have failed halfway

    def extend(self, row: int, tokens: Ints) -> None:
        """Commit tokens to a row."""
        facts, length = self._facts[row], int(self._manager.counts[row]) + len(tokens)
        limit = facts.prompt_tokens + facts.most_tokens
        assert length <= limit, "a tree was deeper than the request may go"
        self._manager.extend(row, tokens)
        self.sampler.extend(row, tokens.tolist())

    def output_positions(self, rows: Ints) -> Ints:
        """Return [R]: the position of each row's next token among its output tokens."""
        prompts = [self._facts[row].prompt_tokens for row in rows.tolist()]
        return self._manager.counts[rows] - np.array(prompts, dtype=np.int64)

    def remaining(self, rows: Ints) -> Ints:
        """Return [R]: the tokens that each row may still commit."""
        limits = [self._facts[row].most_tokens for row in rows.tolist()]
        return np.array(limits, dtype=np.int64) - self.output_positions(rows)

    def sampled(self, rows: Ints) -> NDArray[np.bool_]:
        """Return [R]: True for rows that are not greedy."""
        return np.array([self._facts[row].sampled for row in rows.tolist()], dtype=np.bool_)

    def is_sampled(self, row: int) -> bool:
        return self._facts[row].sampled

    def logprobs(self, row: int) -> int | None:
        """Return the number of likeliest tokens whose log-probabilities a row's request asks for.

        None: it asks for none, not even those of its own tokens.
        """
        return self._facts[row].logprobs

    def returns_drafts(self, row: int) -> bool:
        """Return whether a row's request asks for its drafts (`SamplingParams.return_drafts`)."""
        return self._facts[row].returns_drafts


def sampling_settings(request: RequestSpec, eos_token_ids: Collection[int]) -> SamplingSettings:
    """Return a request's sampler settings, with its grammar, if any, in the initial state."""
    params = request.params
    ends = set(params.stop_token_ids) | (set() if params.goes_on_after_eos else set(eos_token_ids))
    return SamplingSettings(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=request.seed,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple(params.logit_bias),
        min_tokens=params.min_tokens,
        end_token_ids=tuple(sorted(ends)),
        bad_words_ids=request.bad_words_ids,
        logits_processors=params.logits_processors,
        stream=request.sample,
        grammar=None if request.grammar is None else request.grammar.start(),
    )
