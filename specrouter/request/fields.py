"""What requests are made of: the bases of objects in bodies, the types and ranges of values, which
`SamplingParams` has too, and the refusal of one.

Contract: values are not converted (a number is not read from text). The text below a field is its
description in the API's schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema


class RequestError(ValueError):
    """A request that cannot be served as it stands. Raised before anything is queued."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason

    def at(self, field: str, reason: str) -> Self:
        """The same refusal, told otherwise."""
        return type(self)(field, reason)


class Fields(BaseModel):
    """An object that may hold fields unknown here: existing clients send some."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="ignore", use_attribute_docstrings=True
    )


class KeptFields(Fields):
    """Unknown fields are kept: they reach the chat template."""

    model_config = ConfigDict(extra="allow")


class OwnFields(Fields):
    """An object that no other server knows: an unknown field is a mistake, and refused."""

    model_config = ConfigDict(extra="forbid")


def field_names(base: type[Fields] = Fields) -> Iterator[str]:
    """Of all objects in all bodies, as clients know them."""
    for body in base.__subclasses__():
        yield from (field.alias or name for name, field in body.model_fields.items())
        yield from field_names(body)


def _encodable(text: str) -> str:
    """JSON can spell half a surrogate pair; no tokenizer can read one."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half a surrogate pair, which is no character") from None
    return text


MOST = 2**31 - 1  # of a whole number: beyond any model's length and vocabulary
MAX_SAMPLES = 128
MAX_LOGPROBS = 20

Text = Annotated[str, AfterValidator(_encodable)]
Refused = SkipJsonSchema[Any]  # the type of a field that is `refused`
Count = Annotated[int, Field(ge=0, le=MOST)]
Tokens = Annotated[int, Field(ge=1, le=MOST)]
TokenId = Annotated[int, Field(ge=0, le=MOST)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Samples = Annotated[int, Field(ge=1, le=MAX_SAMPLES)]
LogprobCount = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False)]
TopP = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
MinP = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
# Outside of it, penalised logits overflow.
RepetitionPenalty = Annotated[float, Field(ge=1e-6, le=1e6)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]


def refused(reason: str, neutral: Any = None) -> Any:
    """A field that is refused whatever it holds but null, false, and what asks for nothing."""
    return Field(default=None, json_schema_extra={"refused": reason, "neutral": neutral})


def check_refused(body: Fields) -> None:
    """Raises `RequestError` for a field that is `refused`."""
    for name, reason, neutral in _refusals(type(body)):
        asked = getattr(body, name)
        if asked is not None and asked is not False and asked not in ([], neutral):
            raise RequestError(name, reason)


@cache
def _refusals(body: type[Fields]) -> list[tuple[str, str, Any]]:
    """Name, reason and neutral value of each field that is `refused`."""
    extras = {name: field.json_schema_extra for name, field in body.model_fields.items()}
    return [
        (name, str(extra["refused"]), extra["neutral"])
        for name, extra in extras.items()
        if isinstance(extra, dict) and "refused" in extra
    ]
