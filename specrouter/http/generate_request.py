"""The body of `POST /generate`: our own names, and greedy unless asked otherwise."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import SkipJsonSchema

from specrouter import RequestError, SamplingParams
from specrouter.http.request_fields import LogprobCount, RequestFields, TokenIds, Tokens
from specrouter.http.texts import Text


class GenerateRequest(RequestFields):
    """Exactly one of `prompt` and `input_ids`."""

    prompt: Text | None = None
    input_ids: TokenIds | None = None
    max_new_tokens: Tokens | None = None
    max_tokens: SkipJsonSchema[Any] = None  # OpenAI's name: refused, so that it is not overlooked
    logprobs: LogprobCount | None = None

    def source(self) -> str | list[int]:
        """The prompt in the form in which it was given; RequestError unless there is one."""
        if self.prompt is not None and self.input_ids is not None:
            raise RequestError("input_ids", "give either prompt or input_ids, not both")
        if self.prompt is not None:
            return self.prompt
        if self.input_ids is not None:
            return self.input_ids
        raise RequestError("prompt", "missing: give prompt (text) or input_ids (token ids)")

    def sampling_params(self, **own: Any) -> SamplingParams:
        """As of all bodies; RequestError for a length by OpenAI's name, too."""
        if self.max_tokens is not None:
            raise RequestError("max_tokens", "this endpoint calls it max_new_tokens")
        return super().sampling_params(**own)
