"""Common parts of the answers to completions and chats: the envelope, choices and usage.

Contract: an answer belongs to one request. It keeps what a later chunk depends on, so its chunks
are made in the order of the deltas.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specrouter.http.answers import Loose
from specrouter.http.openai_fields import OpenAIRequest
from specrouter.http.streams import Answer, Outputs
from specrouter.http.token_texts import TokenTexts
from specrouter.request.output import Delta, RequestMetrics, RequestOutput, TokenLogprobs

LEAST_LOGPROB = -9999.0  # JSON has no infinity; vLLM sends this instead
_FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


class OpenAIObject(Loose):
    id: str
    """Id of the answer; it contains the request's id."""
    object: str
    """Type of the answer, such as `chat.completion`."""
    created: int
    """Time of the answer, in seconds since 1970."""
    model: str
    """Name of the target."""
    system_fingerprint: str
    """Identifier that changes if the same seed may give another text: with target, dtype or
    version."""
    choices: list[dict[str, Any]]
    """Outputs, each with `index`, its text or message, and `finish_reason`."""
    usage: dict[str, Any]
    """Numbers of prompt and output tokens, and of accepted and rejected draft tokens."""


@dataclass(frozen=True)
class AnsweredPrompt:
    """Prompt of a request; `text` is None if it was given as token ids."""

    token_ids: Sequence[int]
    text: str | None = None


class Usage:
    """Tokens of a request, as OpenAI counts them; it grows while the request runs.

    A prompt counts once for all its samples. `reasoning_tokens` are part of the completion's.
    """

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = self.reasoning_tokens = 0
        self._drafted = self._accepted = self._cached = 0

    def add(self, tokens: int, metrics: RequestMetrics | None, sample: int = 0) -> None:
        """Count new `tokens` and, if their text has ended, the `metrics` of this `sample`."""
        self._completion_tokens += tokens
        if metrics is not None:
            self._drafted += metrics.drafted_tokens
            self._accepted += metrics.accepted_tokens
            self._cached += 0 if sample else metrics.cached_tokens

    def to_json(self) -> dict[str, Any]:
        """Return the usage as OpenAI's object.

        Predictions are draft tokens that the target verified. They count once their text has ended,
        and so do cached tokens of a prompt, which its first sample reports.
        """
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self._accepted,
                "rejected_prediction_tokens": max(0, self._drafted - self._accepted),
                "reasoning_tokens": self.reasoning_tokens,
            },
        }


class OpenAIAnswer(Answer):
    """Answer in OpenAI's format.

    `kind` is its `object`, `chunk_kind` that of its chunks; `envelope` has the keys that all of
    them begin with, among them `object`.
    """

    kind: str
    chunk_kind: str

    def __init__(
        self,
        body: OpenAIRequest,
        envelope: dict[str, Any],
        prompts: Sequence[AnsweredPrompt],
        texts: TokenTexts,
    ) -> None:
        self.body = body
        self.prompts = prompts
        self.texts = texts
        self._envelope = envelope
        self._chunk_head = {**envelope, "object": self.chunk_kind}
        self._usage = Usage(sum(len(prompt.token_ids) for prompt in prompts))
        self._begun: set[int] = set()
        self._prompt_logprobs: dict[int, list[Any]] = {}  # by prompt
        self._is_single = len(prompts) * body.samples == 1
        self._metrics: RequestMetrics | None = None  # those of a single text that has ended
        options = body.stream_options
        self._has_usage = options is not None and bool(options.include_usage)
        self._has_continuous_usage = options is not None and bool(options.continuous_usage_stats)

    def whole(self, outputs: Outputs) -> dict[str, Any]:
        for _, output in outputs:
            self._usage.add(len(output.token_ids), output.metrics, output.index)
            self._metrics = output.metrics
        choices = [
            self.choice(at, index, output, is_first=True)
            for index, (at, output) in enumerate(self.chosen(outputs))
        ]
        return {
            **self._envelope,
            "object": self.kind,
            "choices": choices,
            **self._ending(),
        }

    def chunk(self, prompt: int, delta: Delta) -> dict[str, Any] | None:
        output = delta.output
        metrics = None if output is None else output.metrics
        self._usage.add(len(delta.token_ids), metrics, delta.index)
        self._metrics = metrics
        index = prompt * (self.body.n or 1) + delta.index
        is_first = index not in self._begun
        self._begun.add(index)
        choice = self.choice(prompt, index, delta, is_first)
        said = self.says_something(choice)
        if not (said or is_first or output or delta.logprobs or self.body.return_token_ids):
            return None  # half a character, or what may become a stop text or a call
        chunk = {**self._chunk_head, "choices": [choice]}
        if self._has_continuous_usage:
            chunk["usage"] = self._usage.to_json()
        elif self._has_usage:
            chunk["usage"] = None
        return chunk

    def last_chunk(self) -> dict[str, Any] | None:
        if not self._has_usage:
            return None
        return {**self._chunk_head, "choices": [], **self._ending()}

    def _ending(self) -> dict[str, Any]:
        """Return the usage, and for a single text its metrics, as vLLM does."""
        usage = {"usage": self._usage.to_json()}
        if not self._is_single or self._metrics is None:
            return usage
        names = ("speculative_decoding", "sampling")
        return {**usage, "metrics": {name: getattr(self._metrics, name) for name in names}}

    def chosen(self, outputs: Outputs) -> Outputs:
        """Return the outputs that the client gets, in the order of prompts."""
        return outputs

    @abstractmethod
    def choice(
        self, prompt: int, index: int, part: RequestOutput | Delta, is_first: bool
    ) -> dict[str, Any]:
        """Return a choice of an answer or a chunk; `is_first` is true once for each index."""

    @abstractmethod
    def says_something(self, choice: Mapping[str, Any]) -> bool:
        """Return whether the choice of a chunk has new text or calls."""

    def of_prompt(self, prompt: int, part: RequestOutput | Delta) -> dict[str, Any]:
        """Return what the request asks for about the prompt: ids and log-probabilities.

        Log-probabilities have vLLM's form: by id, the most likely tokens and the prompt's own. They
        are made once for each prompt, and its samples share them.
        """
        found: dict[str, Any] = {}
        count, positions = self.body.prompt_logprobs, part.prompt_logprobs
        if count is not None:
            if prompt not in self._prompt_logprobs and positions is not None:
                self._prompt_logprobs[prompt] = [
                    None if one is None else self._by_id(one, count) for one in positions
                ]
            found["prompt_logprobs"] = positions and self._prompt_logprobs[prompt]
        if self.body.return_token_ids:
            found["prompt_token_ids"] = list(self.prompts[prompt].token_ids)
        return found

    def _by_id(self, position: TokenLogprobs, count: int) -> dict[str, Any]:
        own = (position.token_id, position.logprob)
        ranks = {token: rank for rank, (token, _) in enumerate(position.top, start=1)}
        return {
            str(token): {
                "logprob": finite(logprob),
                "rank": ranks.get(token),
                "decoded_token": self.texts.text(token),
            }
            for token, logprob in (own, *position.top[:count])
        }


def output_of(part: RequestOutput | Delta) -> RequestOutput | None:
    """Return the output that a choice ends with, or None if it goes on."""
    return part.output if isinstance(part, Delta) else part


def ending(output: RequestOutput | None) -> dict[str, Any]:
    """Return how a choice ends, with null reasons if it goes on."""
    if output is None:
        return {"finish_reason": None, "stop_reason": None}
    reason = _FINISH_REASONS[output.finish_reason]
    return {"finish_reason": reason, "stop_reason": output.stop_reason, **receipt(output)}


def receipt(output: RequestOutput) -> dict[str, Any]:
    """Return the receipt under its key, or nothing if none was requested."""
    return {} if output.receipt is None else {"receipt": output.receipt.model_dump(mode="json")}


def finite(logprob: float) -> float:
    """Return the log-probability, at least `LEAST_LOGPROB`: JSON has no infinity."""
    return max(logprob, LEAST_LOGPROB) if math.isfinite(logprob) else LEAST_LOGPROB
