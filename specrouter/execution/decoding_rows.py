"""DecodingRows: what a cycle must know of the requests in the rows.

How far each may go, how its tokens are chosen, and what drafters and log-probabilities need of its
text. Rows are those that the state manager has allocated; it is not told here when they are freed.
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
    """`sampler` and `prompt_logprobs` know the rows that are open here.

    Args:
        eos_token_ids: that end a text, unless its request goes on.
        window: the most output positions of a row that a cycle may look at.
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
        """`device`: see `Sampler.open`."""
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
        self._facts.pop(row, None)  # it may never have been opened whole

    def extend(self, row: int, tokens: Ints) -> None:
        """Commits tokens of a row."""
        facts, length = self._facts[row], int(self._manager.counts[row]) + len(tokens)
        limit = facts.prompt_tokens + facts.most_tokens
        assert length <= limit, "a tree was deeper than the request may go"
        self._manager.extend(row, tokens)
        self.sampler.extend(row, tokens.tolist())

    def output_positions(self, rows: Ints) -> Ints:
        """[R] the position among the output tokens of the next one."""
        prompts = [self._facts[row].prompt_tokens for row in rows.tolist()]
        return self._manager.counts[rows] - np.array(prompts, dtype=np.int64)

    def remaining(self, rows: Ints) -> Ints:
        """[R] tokens that each row may still commit."""
        limits = [self._facts[row].most_tokens for row in rows.tolist()]
        return np.array(limits, dtype=np.int64) - self.output_positions(rows)

    def sampled(self, rows: Ints) -> NDArray[np.bool_]:
        """[R] rows that are not greedy."""
        return np.array([self._facts[row].sampled for row in rows.tolist()], dtype=np.bool_)

    def is_sampled(self, row: int) -> bool:
        return self._facts[row].sampled

    def logprobs(self, row: int) -> int | None:
        """How many log-probabilities beside each output token's are asked for; None: none at all,
        not even its own."""
        return self._facts[row].logprobs

    def returns_drafts(self, row: int) -> bool:
        """Whether it is asked who proposed which token."""
        return self._facts[row].returns_drafts


def sampling_settings(request: RequestSpec, eos_token_ids: Collection[int]) -> SamplingSettings:
    """How a request's tokens are chosen. Its grammar, if it has one, stands at its beginning."""
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
