"""Service: what the endpoints share, and the one way from a body to the router.

Contract: everything about a request that can be refused is refused before anything is queued,
with the client's names of fields. Prompts are tokenized in a thread, since a long one takes long
and streams must go on meanwhile.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import Request

from specrouter.config.server import ToolParser
from specrouter.engine.request_args import PromptLike, RequestArgs
from specrouter.engine.serving import ServingRouter
from specrouter.http.chat_template import ChatTemplate
from specrouter.http.errors import UnknownModelError
from specrouter.http.keys import api_keys, cache_salt
from specrouter.http.objective_fields import asked_objective
from specrouter.http.openai_answer import Envelope
from specrouter.http.request_fields import RequestFields
from specrouter.http.streams import Deltas
from specrouter.http.token_texts import TokenTexts
from specrouter.http.tools.formats import FORMATS, ToolFormat, format_of, special_tags
from specrouter.request.lanes import text_lane
from specrouter.request.params import RequestError, SamplingParams
from specrouter.request.stages import single_token

Result = TypeVar("Result")


class Service:
    """Raises `ConfigError` for a chat template that is none."""

    def __init__(self, router: ServingRouter) -> None:
        self.router = router
        self.config = router.config.server
        self.model = router.pool.target
        self.created = int(time.time())
        self.tokenizer = router.pool.tokenizer
        self.texts = TokenTexts(self.tokenizer)
        self.template = ChatTemplate(self.tokenizer, self.config.chat_template)
        self.tool_format = _tool_format(self.config.tool_parser, self.template)
        self.tool_tag_ids = special_tags(self.tool_format, self.tokenizer)
        self._has_keys = bool(api_keys(self.config))
        self._token_id_of = single_token(self.tokenizer)

    def check_model(self, asked: str | None) -> None:
        """None and an empty name ask for what is served. Raises `UnknownModelError`."""
        if asked and asked != self.model:
            raise UnknownModelError(asked, self.model)

    def check_choices(self, prompts: int, samples: int) -> None:
        """Raises `RequestError` for more texts than one request may ask for, of "prompt" or "n"."""
        if prompts * samples > self.config.max_choices:
            reason = (
                f"{prompts} prompts times {samples} samples of each are more than "
                f"{self.config.max_choices} (server.max_choices)"
            )
            raise RequestError("prompt" if prompts > self.config.max_choices else "n", reason)

    def check_room(self) -> None:
        """Raises what the router would refuse a request with that comes now.

        For before its prompts are read: a service with too much to do does nothing for it.
        """
        self.router.check_room(self.config.max_waiting)

    async def tokenized(
        self, characters: int, job: Callable[..., Result], *arguments: Any
    ) -> Result:
        """What `job` makes of texts of so many characters in all, beside the event loop."""
        lane = text_lane(characters)
        is_large = lane == "long_texts"
        return await self.router.lanes.run(lane, job, *arguments, is_large=is_large)

    def envelope(self, request: Request, prefix: str) -> Envelope:
        known = getattr(request.state, "request_id", None)
        identity = f"{prefix}-{known or uuid.uuid4().hex}"
        return Envelope(identity, int(time.time()), self.model, self.router.fingerprint)

    def deltas(
        self,
        request: Request,
        body: RequestFields,
        prompts: Sequence[PromptLike],
        params: SamplingParams,
    ) -> Deltas:
        """Nothing is queued, nor refused by the router, before the first one is asked for."""
        limit_s = self.config.request_timeout_s
        params = replace(params, cache_salt=cache_salt(request, params.cache_salt, self._has_keys))
        first = RequestArgs(
            prompt=prompts[0],
            params=params,
            speculation=body.speculation_override(),
            slo=asked_objective(
                body.slo, request.headers, self.router.slo_classes, self._token_id_of
            ),
            priority=body.priority or 0,
            timeout_s=limit_s if body.timeout_s is None else min(limit_s, body.timeout_s),
        )
        asked = [replace(first, prompt=prompt) for prompt in prompts]
        deltas = self.router.astream_each(asked, self.config.max_waiting)
        if params.structure is None:
            return deltas
        return _blaming(deltas, body.structure_field())


async def _blaming(deltas: Deltas, field: str) -> Deltas:
    """The same; a request whose structure has failed blames the client's `field`."""
    async with aclosing(deltas):
        async for number, delta in deltas:
            output = delta.output
            if output is not None and output.error_field == "structure":
                delta = replace(delta, output=replace(output, error_field=field))
            yield number, delta


def _tool_format(name: ToolParser, template: ChatTemplate) -> ToolFormat | None:
    """How the model writes calls; None where that is not known, or not to be read."""
    if name == "auto":
        return format_of(template.source)
    return FORMATS.get(name)
