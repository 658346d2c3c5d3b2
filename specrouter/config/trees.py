"""TreesConfig: what of a cycle's draft trees is verified."""

from pydantic import Field

from specrouter.config.policies import NodeSelectionName
from specrouter.config.strict import Strict


class TreesConfig(Strict):
    """Which nodes of the draft trees the target verifies.

    Attributes:
        selection: `goodput`: the highest expected rate of tokens that arrive in time (default of
            adaptive routing); `whole`: all nodes, or the policy's `nodes` (default of others);
            `global-greedy`: the likeliest nodes of all requests, without objectives.
        budget_tokens: tokens that the target reads in a cycle, prompts included, for selections
            that have a budget. By default what yields most tokens per second.
    """

    selection: NodeSelectionName | None = None
    budget_tokens: int | None = Field(default=None, ge=1)
