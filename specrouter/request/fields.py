"""Building blocks of request bodies: base classes of their objects, and types of their values.

Contract: values are not converted (a number is not read from text). The text below a field is its
description in the API's schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from specrouter.request.params import RequestError


class Fields(BaseModel):
    """An object whose unknown fields are ignored: existing clients send some."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="ignore", use_attribute_docstrings=True
    )


class KeptFields(Fields):
    """An object whose unknown fields are kept: they may reach the chat template."""

    model_config = ConfigDict(extra="allow")


class OwnFields(Fields):
    """An object that no other server has: an unknown field is a mistake, and refused."""

    model_config = ConfigDict(extra="forbid")


class InnerFields(Fields):
    """An object within a body: an unknown field is refused unless it is null, false or empty."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nothings(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {k: one for k, one in given.items() if k in known or not asks_for_nothing(one)}


def field_names(base: type[Fields] = Fields) -> Iterator[str]:
    """Yield the field names of all objects in all bodies, as clients know them."""
    for body in base.__subclasses__():
        yield from (field.alias or name for name, field in body.model_fields.items())
        yield from field_names(body)


def _encodable(text: str) -> str:
    """Refuse half a surrogate pair: JSON can spell it, but no tokenizer can read it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half a surrogate pair, which is no character") from None
    return text


MOST = 2**31 - 1  # largest integer: beyond any model's length and vocabulary

Text = Annotated[str, AfterValidator(_encodable)]
Refused = SkipJsonSchema[Any]  # the type of a field that is `refused`
Count = Annotated[int, Field(ge=0, le=MOST)]
Tokens = Annotated[int, Field(ge=1, le=MOST)]
TokenId = Annotated[int, Field(ge=0, le=MOST)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def refused(reason: str, neutral: Any = None) -> Any:
    """Define a field that is refused unless it is `neutral`, null, false or an empty list."""
    return Field(default=None, json_schema_extra={"refused": reason, "neutral": neutral})


def asks_for_nothing(value: Any) -> bool:
    return value is None or value is False or value == []


def check_refused(body: Fields) -> None:
    """Raise `RequestError` for a field that is `refused`."""
    for name, reason, neutral in _refusals(type(body)):
        asked = getattr(body, name)
        if not asks_for_nothing(asked) and asked != neutral:
            raise RequestError(name, reason)


@cache
def _refusals(body: type[Fields]) -> list[tuple[str, str, Any]]:
    """Return name, reason and neutral value of each field that is `refused`."""
    extras = {name: field.json_schema_extra for name, field in body.model_fields.items()}
    return [
        (name, str(extra["refused"]), extra["neutral"])
        for name, extra in extras.items()
        if isinstance(extra, dict) and "refused" in extra
    ]
