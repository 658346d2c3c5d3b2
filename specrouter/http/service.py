"""Service: what the endpoints share, and the only path from a body to the router.

Contract: every refusal comes before anything is queued, and uses the client's names of fields. A
request is parsed, tokenized, checked and queued in one job outside the event loop, since each step
may take long and streams must go on meanwhile; only a request whose grammar must be compiled
continues in another job.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import TypeAdapter

from specrouter.config.server import ToolParser
from specrouter.engine.request import PromptLike, Request
from specrouter.engine.serving import ServingRouter
from specrouter.http.bodies import json_data, read_body
from specrouter.http.errors import UnknownModelError, field_names
from specrouter.http.keys import api_keys
from specrouter.http.objective_fields import asked_objective
from specrouter.http.reasoning.formats import ReasoningFormat, reasoning_of
from specrouter.http.reasoning.harmony import Harmony
from specrouter.http.request_fields import RequestFields
from specrouter.http.streams import Answer, respond
from specrouter.http.token_texts import TokenTexts
from specrouter.http.tools.formats import FORMATS, ToolFormat, added_tags, format_of
from specrouter.request.chat_template import ChatTemplate
from specrouter.request.delta_stream import DeltaStream
from specrouter.request.lanes import lane_of
from specrouter.request.params import RequestError, SamplingParams
from specrouter.request.slo_fields import single_token

Body = TypeVar("Body", bound=RequestFields)


@dataclass(frozen=True)
class Submission:
    """Requests that an endpoint makes of a body, and the answer to them."""

    requests: Sequence[Request]
    answer: Answer


_Prepare = Callable[[Body, HttpRequest], Submission]
_Accepted = tuple[Answer, bool]  # True: it is streamed


class Service:
    """State that the endpoints share; `ConfigError` for an invalid chat template."""

    def __init__(self, router: ServingRouter) -> None:
        self.router = router
        self.config = router.config.server
        self.model = router.pool.target
        self.created = int(time.time())
        self.defaults = router.sampling_defaults
        self.openai_defaults = {"temperature": 1.0, **self.defaults}
        self.tokenizer = router.pool.tokenizer
        self.texts = TokenTexts(self.tokenizer)
        self.template = ChatTemplate(
            self.tokenizer, self.config.chat_template, self.config.literal_user_text
        )
        self.reasoning = reasoning_of(self.config.reasoning_parser, self.template.source)
        self.tool_format = _tool_format(self.config.tool_parser, self.reasoning, self.template)
        tags = [tag for one in (self.tool_format, self.reasoning) if one for tag in one.tags]
        self.tag_ids = added_tags(tags, self.tokenizer)
        special = self.texts.special_ids
        self.special_tag_ids = tuple(one for one in self.tag_ids.values() if one in special)
        self._has_keys = bool(api_keys(self.config))
        self._token_id_of = single_token(self.tokenizer)

    def check_model(self, asked: str | None) -> None:
        """Raise `UnknownModelError` for a model that is not served; no name means the target."""
        if asked and asked != self.model:
            reason = f"there is no model {asked[:80]!r}; {self.model!r} is served"
            raise UnknownModelError("model", reason)

    def check_choices(self, prompts: int, samples: int) -> None:
        """Raise `RequestError` of "prompt" or "n" for more texts than one request may have."""
        if prompts * samples > self.config.max_choices:
            reason = (
                f"{prompts} prompts times {samples} samples of each are more than "
                f"{self.config.max_choices} (server.max_choices)"
            )
            raise RequestError("prompt" if prompts > self.config.max_choices else "n", reason)

    def check_room(self) -> None:
        """Raise the error with which the router would refuse a request now.

        Called before prompts are tokenized: an overloaded service does no work for the request.
        """
        self.router.check_room(self.config.max_waiting)

    async def respond(
        self, request: HttpRequest, kind: TypeAdapter[Body], prepare: _Prepare[Body]
    ) -> Response:
        """Answer a request with a body of this `kind`, or raise the error that refuses it."""
        request.state.began_s = time.perf_counter()
        data = await json_data(request)
        lanes, stream = self.router.lanes, self.router.streams.open()
        queue = partial(self._queue, request, prepare, stream)
        try:
            found = await lanes.run(lane_of(len(data)), self._read, data, kind, queue)
            if not isinstance(found, tuple):
                found = await lanes.run("structures", found)
        except BaseException:
            await stream.aclose()
            raise
        return await respond(request, stream, *found)

    def _read(
        self, data: bytes, kind: TypeAdapter[Body], queue: Callable[[Body], _Accepted]
    ) -> _Accepted | Callable[[], _Accepted]:
        """Read and queue a request; return the queueing instead if a grammar must be compiled."""
        body = read_body(data, kind)
        self.check_model(body.model)
        with field_names(body.field_names):
            body.check()
            takes_long = body.has_structure
        return partial(queue, body) if takes_long else queue(body)

    def _queue(
        self, request: HttpRequest, prepare: _Prepare[Body], stream: DeltaStream, body: Body
    ) -> _Accepted:
        with field_names(body.field_names):
            asked = prepare(body, request)
            if body.has_structure:
                asked.answer.structure_field = body.field_names()["structure"]
            self.router.submit_each(asked.requests, stream, self.config.max_waiting)
        return asked.answer, bool(body.stream)

    def envelope(self, request: HttpRequest, prefix: str) -> dict[str, Any]:
        """Return the keys that all objects of an answer begin with; `object` is set later."""
        known = getattr(request.state, "request_id", None)
        return {
            "id": f"{prefix}-{known or uuid.uuid4().hex}",
            "object": "",
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": self.router.fingerprint,
        }

    def cache_salt(self, request: HttpRequest, body: RequestFields) -> str | None:
        """Return the salt under which a request shares cached prefixes.

        It is the requested salt, or else one of its API key, which no client can request; None if
        the service has no keys.
        """
        if body.cache_salt is not None:
            return f"salt {body.cache_salt}"
        if not self._has_keys:
            return None
        key = request.headers.get("authorization", "").partition(" ")[2].strip()
        return f"key {hashlib.sha256(key.encode()).hexdigest()}"

    def requests(
        self,
        request: HttpRequest,
        body: RequestFields,
        params: SamplingParams,
        prompts: Sequence[PromptLike],
        are_tokenized: Sequence[bool] = (False,),
    ) -> list[Request]:
        """Return a request for each prompt, or raise `RequestError`."""
        limit_s = self.config.request_timeout_s
        slo = asked_objective(body.slo, request.headers, self.router.slo_classes, self._token_id_of)
        speculation = body.speculation_override()
        return [
            Request(
                model=body.model,
                prompt=prompt,
                is_tokenized=is_tokenized,
                params=params,
                speculation=speculation,
                slo=slo,
                priority=body.priority or 0,
                timeout_s=limit_s if body.timeout_s is None else min(limit_s, body.timeout_s),
                elapsed_s=time.perf_counter() - request.state.began_s,
            )
            for prompt, is_tokenized in zip(prompts, are_tokenized, strict=True)
        ]


def _tool_format(
    name: ToolParser, reasoning: ReasoningFormat | None, template: ChatTemplate
) -> ToolFormat | Harmony | None:
    """Return how the model writes calls; None if that is unknown, or calls are not parsed."""
    own = reasoning.calls if reasoning else None
    if own is not None and name != "none":
        return own
    return format_of(template.source) if name == "auto" else FORMATS.get(name)
