"""`POST /generate`: one prompt, with our own names of fields and the router's metrics."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import TypeAdapter

from specrouter.http.answers import Loose
from specrouter.http.openai_answer import finite, receipt
from specrouter.http.openapi import generation
from specrouter.http.request_fields import GenerateRequest
from specrouter.http.service import Service, Submission
from specrouter.http.streams import Answer, Outputs
from specrouter.http.token_texts import TokenTexts
from specrouter.request.output import CycleDraft, Delta, RequestOutput, TokenLogprobs

_BODY = TypeAdapter(GenerateRequest)


class GenerateAnswerObject(Loose):
    """Answer to a prompt; with `n` above 1, its texts are in `choices`."""

    seed: int
    """Seed of the output; the same request with it gives the same tokens."""
    text: str | None = None
    """Text of the output."""
    token_ids: list[int] | None = None
    """Token ids of the output."""
    finish_reason: str | None = None
    """Reason why the output ended: `eos`, `stop` or `length`."""
    metrics: dict[str, Any] | None = None
    """Times in milliseconds, acceptance length, and the number of cycles of each chain."""
    drafts: list[dict[str, Any]] | None = None
    """Proposers of the tokens and draft tree of each cycle, if `return_drafts` is true. Events of a
    stream have `draft` instead, for their cycle."""
    receipt: dict[str, Any] | None = None
    """Data from which `specrouter verify` computes the text again, if `receipt` is true."""
    choices: list[dict[str, Any]] | None = None
    """Samples by `index`, each with the fields above except `seed`."""


def add_generate(app: FastAPI, service: Service) -> None:
    @app.post(
        "/generate",
        **generation(
            "Continuation of a prompt, with metrics of the request",
            GenerateAnswerObject,
            _BODY,
            prompt="def fib(n):",
            max_new_tokens=32,
        ),
    )
    async def generate(request: HttpRequest) -> Response:
        return await service.respond(request, _BODY, partial(_asked, service))


def _asked(service: Service, body: GenerateRequest, request: HttpRequest) -> Submission:
    """Return the requests and the answer of a body, or raise `RequestError`."""
    structure, _ = body.asked_structure
    prompt, salt = body.source(), service.cache_salt(request, body)
    params = body.sampling_params(service.defaults, structure=structure, cache_salt=salt)
    service.check_choices(1, params.n)
    service.check_room()
    answer = GenerateAnswer(texts=service.texts, numbered=params.n > 1)
    return Submission(service.requests(request, body, params, [prompt]), answer)


@dataclass(kw_only=True)
class GenerateAnswer(Answer):
    """Answer of `/generate`; `numbered` if the prompt has several samples."""

    texts: TokenTexts
    numbered: bool

    def whole(self, outputs: Outputs) -> dict[str, Any]:
        if not self.numbered:
            output = outputs[0][1]
            return {**self._content(output), **_ending(output)}
        choices = [{**self._content(output), **_ending(output)} for _, output in outputs]
        seeds = [choice.pop("seed") for choice in choices]
        return {"choices": choices, "seed": seeds[0]}

    def chunk(self, prompt: int, delta: Delta) -> dict[str, Any]:
        ending = {} if delta.output is None else _ending(delta.output)
        return {**self._content(delta), **ending}

    def partial(self, outputs: Outputs) -> dict[str, Any]:
        return self.whole(outputs)

    def place(self, delta: Delta) -> dict[str, Any]:
        return {"index": delta.index} if self.numbered else {}

    def _content(self, part: Delta | RequestOutput) -> dict[str, Any]:
        number = {"index": part.index} if self.numbered else {}
        content = {**number, "text": part.text, "token_ids": list(part.token_ids)}
        for name in ("logprobs", "prompt_logprobs"):
            positions = getattr(part, name)
            if positions is not None:
                content[name] = [one and self._position(one) for one in positions]
        if isinstance(part, RequestOutput):
            if part.drafts is not None:
                content["drafts"] = [self._draft(one) for one in part.drafts]
        elif part.draft is not None:
            content["draft"] = self._draft(part.draft)
        return content

    def _draft(self, draft: CycleDraft) -> dict[str, Any]:
        return {
            "cycle": draft.cycle,
            "chain": list(draft.chain),
            "proposed_by": list(draft.proposed_by),
            "texts": list(draft.texts),
            "tree": {
                "token_ids": list(draft.tokens),
                "texts": [None if one is None else self.texts.text(one) for one in draft.tokens],
                "parents": list(draft.parents),
                "proposed_by": [draft.chain[place] for place in draft.proposers],
                "probabilities": list(draft.probabilities),
                "accepted": list(draft.accepted),
            },
        }

    def _position(self, position: TokenLogprobs) -> dict[str, Any]:
        top = [self._candidate(token, logprob) for token, logprob in position.top]
        return {**self._candidate(position.token_id, position.logprob), "top": top}

    def _candidate(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token_id": token, "token": self.texts.text(token), "logprob": finite(logprob)}


def _ending(output: RequestOutput) -> dict[str, Any]:
    ending = {
        "finish_reason": output.finish_reason,
        "metrics": output.metrics.to_json(),
        "seed": output.seed,
        **receipt(output),
    }
    return ending if output.stop_reason is None else {**ending, "stop_reason": output.stop_reason}
