"""Fields: the base of every object in a request's body that may hold fields unknown here."""

from pydantic import BaseModel, ConfigDict


class Fields(BaseModel):
    """Its values are not converted: a number is not read from text.

    The text below a field is its description in the API's schema.
    """

    model_config = ConfigDict(
        frozen=True, strict=True, extra="ignore", use_attribute_docstrings=True
    )
