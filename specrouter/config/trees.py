"""TreesConfig: what of a cycle's draft trees is verified."""

from pydantic import Field, field_validator

from specrouter.config.policies import NODE_SELECTIONS
from specrouter.config.strict import Strict


class TreesConfig(Strict):
    """Which nodes of the draft trees the target verifies.

    Attributes:
        selection: `goodput`: maximises the expected rate of tokens that arrive in time;
            `global-greedy`: the likeliest nodes of all requests, without objectives; `whole`: all
            nodes; or one's own, as `package.module:NAME`. Left out, adaptive routing takes
            `goodput`, and the other policies verify whole trees, or their `nodes`.
        budget_tokens: tokens that the target reads in a cycle, roots and prompts included, for
            selections that have a budget. Left out, as many as bring most tokens per second by its
            measured times and the acceptances so far.
    """

    selection: str | None = None
    budget_tokens: int | None = Field(default=None, ge=1)

    @field_validator("selection")
    @classmethod
    def _selection_is_registered(cls, selection: str | None) -> str | None:
        if selection is not None:
            NODE_SELECTIONS.find(selection)
        return selection
