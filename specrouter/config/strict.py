"""Strict: the base of every section of the configuration."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Unknown keys are errors, and nothing changes once it is checked."""

    model_config = ConfigDict(frozen=True, extra="forbid")
