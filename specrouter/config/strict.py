"""Strict: the base of every section of the configuration."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """A frozen section of the configuration; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")
