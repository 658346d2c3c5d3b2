"""The body of `POST /generate`: our own names, and greedy unless asked otherwise.

Contract: no existing client sends it fields that are not here, so an unknown one is a mistake.
"""

from __future__ import annotations

from specrouter.http.fields import LogprobCount, OwnFields, Refused, Text, TokenIds, Tokens, refused
from specrouter.http.request_fields import RequestFields
from specrouter.request.params import RequestError


class GenerateRequest(RequestFields, OwnFields):
    """Exactly one of `prompt` and `input_ids`. Unknown fields are refused."""

    model: Text | None = None
    """The target's name; another one is answered with 404."""
    prompt: Text | None = None
    """A text; either it or `input_ids`."""
    input_ids: TokenIds | None = None
    """Token ids; either they or `prompt`."""
    max_new_tokens: Tokens | None = None
    """Tokens of the output, at most; 128 by default."""
    logprobs: LogprobCount | None = None
    """Log-probabilities of the output's tokens, with so many alternatives."""
    return_drafts: bool | None = None
    """Of every cycle: who proposed which token, and the drafted tree that the target verified."""
    # OpenAI's name: refused, so that it is not overlooked.
    max_tokens: Refused = refused("this endpoint calls it max_new_tokens")

    def source(self) -> str | list[int]:
        """The prompt in the form in which it was given; RequestError unless there is one."""
        if self.prompt is not None and self.input_ids is not None:
            raise RequestError("input_ids", "give either prompt or input_ids, not both")
        if self.prompt is not None:
            return self.prompt
        if self.input_ids is not None:
            return self.input_ids
        raise RequestError("prompt", "missing: give prompt (text) or input_ids (token ids)")
