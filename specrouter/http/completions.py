"""`POST /v1/completions`: OpenAI's endpoint, with vLLM's additions and our own.

Choices are ordered by prompt: choice `prompt * n + sample`. `echo` with `max_tokens` 0 reads the
prompt only: the router makes one token, which is not shown.
"""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import TypeAdapter

from specrouter.http.openai_answer import (
    AnsweredPrompt,
    OpenAIAnswer,
    OpenAIObject,
    ending,
    finite,
    output_of,
)
from specrouter.http.openai_fields import CompletionRequest
from specrouter.http.openapi import generation
from specrouter.http.service import Service, Submission
from specrouter.http.streams import Outputs
from specrouter.http.token_texts import TokenTexts
from specrouter.request.output import Delta, RequestOutput, TokenLogprobs
from specrouter.request.params import SamplingParams

_DEFAULT_TOKENS = 16  # OpenAI's
_BODY = TypeAdapter(CompletionRequest)
_Part = TypeVar("_Part", RequestOutput, Delta)


def add_completions(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/completions",
        **generation(
            "Continuations of one or several prompts",
            OpenAIObject,
            _BODY,
            prompt="def fib(n):",
            max_tokens=32,
            temperature=0,
        ),
    )
    async def completions(request: HttpRequest) -> Response:
        return await service.respond(request, _BODY, partial(_asked, service))


def _asked(service: Service, body: CompletionRequest, request: HttpRequest) -> Submission:
    """Return the requests and the answer of a body, or raise `RequestError`."""
    service.check_choices(len(body.prompts), body.samples)
    salt = service.cache_salt(request, body)
    params = sampling_params(body, salt, service.openai_defaults)
    service.check_room()
    prompts = [_prompt(service, body, place, one) for place, one in enumerate(body.prompts)]
    answer = CompletionAnswer(body, service.envelope(request, "cmpl"), prompts, service.texts)
    ids = [one.token_ids for one in prompts]
    are_tokenized = [one.text is not None for one in prompts]
    requests = service.requests(request, body, params, ids, are_tokenized)
    return Submission(requests, answer)


def sampling_params(
    body: CompletionRequest, cache_salt: str | None, defaults: Mapping[str, Any]
) -> SamplingParams:
    """Return the sampling parameters; `RequestError` names fields as `SamplingParams` does."""
    asked = _DEFAULT_TOKENS if body.asked_tokens is None else body.asked_tokens
    logprobs, prompt_logprobs = body.logprobs, body.prompt_logprobs
    if logprobs is not None and body.echo:
        prompt_logprobs = max(logprobs, prompt_logprobs or 0)
    if logprobs is None and body.samples > (body.n or 1):
        logprobs = 0  # to find the best ones
    structure, _ = body.asked_structure
    return body.sampling_params(
        defaults,
        max_new_tokens=max(1, asked),
        n=body.samples,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structure=structure,
        cache_salt=cache_salt,
    )


def _prompt(
    service: Service, body: CompletionRequest, place: int, given: str | list[int]
) -> AnsweredPrompt:
    if not isinstance(given, str):
        return AnsweredPrompt(given)
    field = f"prompt[{place}]" if isinstance(body.prompt, list) else "prompt"
    service.router.limits.check_text(field, given)
    special = body.add_special_tokens is not False
    return AnsweredPrompt(service.tokenizer(given, add_special_tokens=special)["input_ids"], given)


def _without_tokens(part: _Part) -> _Part:
    logprobs: list[TokenLogprobs] | None = None if part.logprobs is None else []
    return replace(part, text="", token_ids=[], finish_reason="length", logprobs=logprobs)


def _unseen(output: RequestOutput) -> RequestOutput:
    return replace(_without_tokens(output), stop_reason=None, receipt=None)


class CompletionAnswer(OpenAIAnswer):
    """Answer of `/v1/completions`, with OpenAI's older form of log-probabilities."""

    kind = chunk_kind = "text_completion"

    body: CompletionRequest

    @cached_property
    def _logprobs(self) -> defaultdict[int, _LogprobLists]:
        """Lists of log-probabilities, by choice."""
        hidden = frozenset() if self.body.skip_special_tokens is False else self.texts.special_ids
        return defaultdict(partial(_LogprobLists, self.texts, self.body.logprobs or 0, hidden))

    def whole(self, outputs: Outputs) -> dict[str, Any]:
        if self.body.asked_tokens == 0:
            outputs = [(at, _unseen(output)) for at, output in outputs]
        return super().whole(outputs)

    def chunk(self, prompt: int, delta: Delta) -> dict[str, Any] | None:
        if self.body.asked_tokens == 0:  # only the prompt is shown
            if delta.output is None:
                return None
            output = _unseen(delta.output)
            shown = output.prompt_logprobs
            delta = replace(_without_tokens(delta), output=output, prompt_logprobs=shown)
        return super().chunk(prompt, delta)

    def chosen(self, outputs: Outputs) -> Outputs:
        """Return the `n` likeliest of each prompt's samples, by mean log-probability."""
        kept = self.body.n or 1
        if all(output.index < kept for _, output in outputs):
            return outputs
        return [
            one
            for _, samples in groupby(outputs, key=lambda one: one[0])
            for one in sorted(samples, key=lambda one: -_mean_logprob(one[1]))[:kept]
        ]

    def says_something(self, choice: Mapping[str, Any]) -> bool:
        return bool(choice["text"])

    def choice(
        self, prompt: int, index: int, part: RequestOutput | Delta, is_first: bool
    ) -> dict[str, Any]:
        echoed = is_first and bool(self.body.echo)
        choice = {
            "index": index,
            "text": self._prompt_text(prompt) + part.text if echoed else part.text,
            "logprobs": self._of_choice(prompt, index, part, echoed),
            **ending(output_of(part)),
        }
        if self.body.return_token_ids:
            choice["token_ids"] = list(part.token_ids)
        return {**choice, **self.of_prompt(prompt, part)} if is_first else choice

    def _prompt_text(self, at: int) -> str:
        prompt = self.prompts[at]
        return self.texts.of(list(prompt.token_ids)) if prompt.text is None else prompt.text

    def _of_choice(
        self, prompt: int, index: int, part: RequestOutput | Delta, echoed: bool
    ) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        read, positions = AnsweredPrompt(()), list[TokenLogprobs | None](part.logprobs or ())
        if echoed:
            read = replace(self.prompts[prompt], text=self._prompt_text(prompt))
            positions = [*(part.prompt_logprobs or ()), *positions]
        return self._logprobs[index].to_json(read, part.token_ids, positions)


class _LogprobLists:
    """Lists of log-probabilities of one choice; offsets count complete characters.

    Args:
        texts: the texts of tokens.
        count: alternatives of each token.
        hidden: ids that the output's text leaves out.
    """

    def __init__(self, texts: TokenTexts, count: int, hidden: Collection[int]) -> None:
        self._texts, self._count, self._hidden = texts, count, hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def to_json(
        self, read: AnsweredPrompt, tokens: Sequence[int], positions: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any]:
        """Return the lists for the next tokens.

        Args:
            read: the prompt with its text, if it is echoed before them; else empty.
            tokens: the next ones of the output.
            positions: of both; None for a token with nothing before it.
        """
        return {
            "tokens": [self._texts.text(token) for token in (*read.token_ids, *tokens)],
            "token_logprobs": [None if one is None else finite(one.logprob) for one in positions],
            "top_logprobs": [None if one is None else self._top(one) for one in positions],
            "text_offset": [*self._offsets_in(read), *self._offsets(tokens)],
        }

    def _top(self, position: TokenLogprobs) -> dict[str, float]:
        """Return the most likely tokens and the chosen one; of equal texts, the likeliest."""
        top: dict[str, float] = {}
        for token, logprob in (*position.top[: self._count], (position.token_id, position.logprob)):
            top.setdefault(self._texts.text(token), finite(logprob))
        return top

    def _offsets_in(self, prompt: AnsweredPrompt) -> Iterable[int]:
        """Yield offsets in the prompt's text, which lacks what the tokenizer added."""
        text = prompt.text or ""
        for token in prompt.token_ids:
            yield self._offset
            shown = self._texts.text(token)
            if token in self._texts.special_ids and not text.startswith(shown, self._offset):
                continue
            width = len(self._decoder.decode(self._texts.data(token)))
            begins_with_space = self._offset == 0 and shown[:1] == " " != text[:1]
            self._offset += width - begins_with_space  # SentencePiece adds this space

    def _offsets(self, tokens: Sequence[int]) -> Iterable[int]:
        for token in tokens:
            yield self._offset
            if token not in self._hidden:
                self._offset += len(self._decoder.decode(self._texts.data(token)))


def _mean_logprob(output: RequestOutput) -> float:
    chosen = [finite(one.logprob) for one in output.logprobs or ()]
    return sum(chosen) / max(1, len(chosen))
