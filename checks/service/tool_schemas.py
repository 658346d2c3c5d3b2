"""What clients of tools ask for: bounded, so that any model ends it. Standard library and pydantic.

Contract: the wire is tested, not the model's sense: whatever it says is of the schema.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

MODEL = "tiny-8m"
QUESTION = "Anna is 5 years old."


class Person(BaseModel):
    """A person."""

    name: Literal["Anna", "Ben"]
    age: Annotated[int, Field(ge=0, le=120)]
    nickname: Annotated[str, Field(max_length=6)] = ""


def weather(city: Literal["Oslo", "Bergen"], days: Annotated[int, Field(ge=1, le=9)]) -> str:
    """The weather of a city in the next days."""
    return f"{city}: {days} days of rain"
