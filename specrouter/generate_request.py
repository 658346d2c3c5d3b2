"""The body of `POST /generate`, and what it asks of the router.

Types are checked here, ranges by `SamplingParams` and the router: every way in gives the same
refusals. Unknown fields are accepted, because existing clients send fields that we do not have;
`speculation` is our own, so an unknown key inside it is an error.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict

from specrouter import RequestError, SamplingParams, Speculation


def _encodable(text: str) -> str:
    """JSON can spell half a surrogate pair; no tokenizer can read one."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half a surrogate pair, which is no character") from None
    return text


_Text = Annotated[str, AfterValidator(_encodable)]
_SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams))


class SpeculationRequest(BaseModel):
    """A chain (weakest model first, the target last) and a draft depth; null leaves it open."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    chain: list[str] | None = None
    depth: int | None = None


class GenerateRequest(BaseModel):
    """Exactly one of `prompt` and `input_ids`; a field that is null or absent has its default."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    prompt: _Text | None = None
    input_ids: list[int] | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: _Text | list[_Text] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    speculation: Literal["off"] | SpeculationRequest | None = None
    stream: bool | None = None

    def source(self) -> str | list[int]:
        """The prompt in the form in which it was given; RequestError unless there is one."""
        if self.prompt is not None and self.input_ids is not None:
            raise RequestError("input_ids", "give either prompt or input_ids, not both")
        if self.prompt is not None:
            return self.prompt
        if self.input_ids is not None:
            return self.input_ids
        raise RequestError("prompt", "missing: give prompt (text) or input_ids (token ids)")

    def sampling_params(self) -> SamplingParams:
        """The sampling fields that were given; RequestError names one that is out of range."""
        given = self.model_dump(include=set(_SAMPLING_FIELDS), exclude_none=True)
        stop = given.get("stop", ())
        given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        given["stop_token_ids"] = tuple(given.get("stop_token_ids", ()))
        return SamplingParams(**given)

    def speculation_override(self) -> Literal["off"] | Speculation | None:
        if self.speculation is None or self.speculation == "off":
            return self.speculation
        chain, depth = self.speculation.chain, self.speculation.depth
        return Speculation(chain=None if chain is None else tuple(chain), depth=depth)
