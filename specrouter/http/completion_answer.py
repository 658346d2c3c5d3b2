"""CompletionAnswer: the objects of `/v1/completions`, OpenAI's older form of log-probabilities."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from specrouter.http.openai_answer import OpenAIAnswer, Prompt, ending, finite, output_of
from specrouter.http.openai_fields import CompletionRequest
from specrouter.http.streams import Outputs
from specrouter.http.token_texts import TokenTexts
from specrouter.request.output import Delta, RequestOutput, TokenLogprobs

_Positions = Sequence[TokenLogprobs | None]


class CompletionAnswer(OpenAIAnswer):
    kind = chunk_kind = "text_completion"

    def __init__(
        self,
        body: CompletionRequest,
        envelope: dict[str, Any],
        prompts: Sequence[Prompt],
        texts: TokenTexts,
    ) -> None:
        super().__init__(body, envelope, prompts, texts)
        self._echo = bool(body.echo)
        self._count = body.logprobs
        self._logprobs: dict[int, _LogprobLists] = {}  # by choice
        self._kept = body.n or 1

    def chosen(self, outputs: Outputs) -> Outputs:
        """Of `best_of` samples the likeliest, by mean log-probability."""
        if all(output.index < self._kept for _, output in outputs):
            return outputs
        return [
            one
            for _, samples in groupby(outputs, key=lambda one: one[0])
            for one in sorted(samples, key=lambda one: -_mean_logprob(one[1]))[: self._kept]
        ]

    def says_something(self, choice: Mapping[str, Any]) -> bool:
        return bool(choice["text"])

    def choice(
        self, prompt: int, index: int, part: RequestOutput | Delta, is_first: bool
    ) -> dict[str, Any]:
        echoed = is_first and self._echo
        choice = {
            "index": index,
            "text": self._prompt_text(prompt) + part.text if echoed else part.text,
            "logprobs": self._of_choice(prompt, index, part, echoed),
            **ending(output_of(part)),
        }
        if self.body.prompt_logprobs is not None and is_first:
            choice["prompt_logprobs"] = self.prompt_logprobs(prompt, part.prompt_logprobs)
        if self.body.return_token_ids:
            choice["token_ids"] = list(part.token_ids)
            if is_first:
                choice["prompt_token_ids"] = list(self.prompts[prompt].token_ids)
        return choice

    def _prompt_text(self, at: int) -> str:
        prompt = self.prompts[at]
        return self.texts.of(list(prompt.token_ids)) if prompt.text is None else prompt.text

    def _of_choice(
        self, prompt: int, index: int, part: RequestOutput | Delta, echoed: bool
    ) -> dict[str, Any] | None:
        if self._count is None:
            return None
        tokens, positions = list(part.token_ids), list[TokenLogprobs | None](part.logprobs or ())
        if echoed:
            tokens = [*self.prompts[prompt].token_ids, *tokens]
            positions = [*(part.prompt_logprobs or ()), *positions]
        if index not in self._logprobs:
            self._logprobs[index] = _LogprobLists(self.texts, self._count)
        return self._logprobs[index].to_json(tokens, positions)


class _LogprobLists:
    """Of one choice. Offsets count the characters of the tokens, as far as they are whole."""

    def __init__(self, texts: TokenTexts, count: int) -> None:
        self._texts, self._count = texts, count
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def to_json(self, tokens: Sequence[int], positions: _Positions) -> dict[str, Any]:
        """Of the tokens that come next; a position is None where nothing stands before it."""
        return {
            "tokens": [self._texts.text(token) for token in tokens],
            "token_logprobs": [None if one is None else finite(one.logprob) for one in positions],
            "top_logprobs": [None if one is None else self._top(one) for one in positions],
            "text_offset": list(self._offsets(tokens)),
        }

    def _top(self, position: TokenLogprobs) -> dict[str, float]:
        """The most likely ones and the chosen one; of those with the same text the likeliest."""
        top: dict[str, float] = {}
        for token, logprob in (*position.top[: self._count], (position.token_id, position.logprob)):
            top.setdefault(self._texts.text(token), finite(logprob))
        return top

    def _offsets(self, tokens: Sequence[int]) -> Iterable[int]:
        for token in tokens:
            yield self._offset
            self._offset += len(self._decoder.decode(self._texts.data(token)))


def _mean_logprob(output: RequestOutput) -> float:
    chosen = [finite(one.logprob) for one in output.logprobs or ()]
    return sum(chosen) / max(1, len(chosen))
