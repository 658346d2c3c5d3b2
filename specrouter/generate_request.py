"""The body of `POST /generate`, and what it asks of the router.

Types are checked here, ranges by `SamplingParams` and the router: every way in gives the same
refusals. Unknown fields are accepted, because existing clients send fields that we do not have;
`speculation` and `slo` are our own, so an unknown key inside them is an error. An objective may
also come in headers (`x-slo-tpot-ms`, `x-slo-ttft-ms`), which add to the body's and must not
contradict it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict
from starlette.datastructures import Headers

from specrouter import SLO, RequestError, SamplingParams, Speculation
from specrouter.slo import SloLike, joined


def _encodable(text: str) -> str:
    """JSON can spell half a surrogate pair; no tokenizer can read one."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half a surrogate pair, which is no character") from None
    return text


_Text = Annotated[str, AfterValidator(_encodable)]
_SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams))


_SLO_HEADERS = {"tpot_ms": "x-slo-tpot-ms", "ttft_ms": "x-slo-ttft-ms"}


class SloRequest(BaseModel):
    """An objective by value; what is null is not asked for."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    tpot_ms: float | None = None
    ttft_ms: float | None = None
    tpot_ratio: float | None = None


class SpeculationRequest(BaseModel):
    """A chain (weakest model first, the target last), a draft depth, the token tree's width, and
    how often the first intermediate judges a draft. What is null is left open.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    chain: list[str] | None = None
    depth: int | None = None
    width: int | None = None
    inner_rounds: int | None = None


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
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    bad_words: list[_Text] | None = None
    bad_words_ids: list[list[int]] | None = None
    n: int | None = None
    logprobs: int | None = None
    logits_processors: Any = None
    speculation: Literal["off"] | SpeculationRequest | None = None
    slo: _Text | SloRequest | None = None  # a class of the configuration, or values
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
        if self.logits_processors is not None:
            reason = "is Python code: give it to ChainRouter, or use logit_bias and bad_words"
            raise RequestError("logits_processors", reason)
        given = self.model_dump(include=set(_SAMPLING_FIELDS), exclude_none=True)
        stop = given.get("stop", ())
        given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        return SamplingParams(**given)

    def speculation_override(self) -> Literal["off"] | Speculation | None:
        if self.speculation is None or self.speculation == "off":
            return self.speculation
        asked = self.speculation
        chain = None if asked.chain is None else tuple(asked.chain)
        return Speculation(chain, asked.depth, asked.width, asked.inner_rounds)

    def objective(self, headers: Headers, classes: Mapping[str, SLO]) -> SloLike:
        """What the body and the headers ask for together.

        Raises:
            RequestError: names the field or the header that is no positive number, and the header
                that contradicts the body.
        """
        asked = self.slo
        slo = SLO(**asked.model_dump()) if isinstance(asked, SloRequest) else asked
        added = {
            name: _number_of(headers, header)
            for name, header in _SLO_HEADERS.items()
            if header in headers
        }
        return joined(slo, added, classes, _SLO_HEADERS)


def _number_of(headers: Headers, name: str) -> float:
    given = headers.getlist(name)
    if len(given) > 1:
        raise RequestError(name, "is given more than once")
    try:
        if "_" in given[0]:  # Python would read 1_000
            raise ValueError
        return float(given[0])
    except ValueError:
        raise RequestError(name, f"must be a number, not {given[0][:40]!r}") from None
