"""Configuration of the choice of chains and trees, and of the nodes to verify."""

from pydantic import Field, model_validator

from modelpool.errors import ConfigError
from specrouter.config.policies import CHAIN_POLICIES, ChainPolicyName, NodeSelectionName
from specrouter.config.strict import Strict
from specrouter.request.params import MAX_TREE_TOKENS, Depth, Width


class SchedulerConfig(Strict):
    """The choice of chains and trees.

    Attributes:
        policy: `adaptive`: measured times and acceptance decide; `static`: always `chain`;
            `smallest`: the smallest drafter and the target; `target-only`: no speculation.
        depth: levels of the draft trees. By default `adaptive` chooses, and other policies take 4.
        width: branches on each level; times the depth at most 64. By default `adaptive` chooses,
            and other policies take 1.
        nodes: mean number of a tree's nodes that the target verifies. By default `adaptive`
            chooses, and other policies verify all.
        chain: model names, weakest first, the target last; for `static`.
    """

    policy: ChainPolicyName = "adaptive"
    depth: Depth | None = None
    width: Width | None = None
    nodes: int | None = Field(default=None, ge=1, le=MAX_TREE_TOKENS)
    chain: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _policy_has_what_it_needs(self) -> "SchedulerConfig":
        if self.policy == type(self).model_fields["policy"].default and self.chain is None:
            return self  # the default needs nothing, and is not imported (see `Registry.check`)
        policy = CHAIN_POLICIES.find(self.policy)
        if policy.needs_chain and self.chain is None:
            raise ConfigError("chain", f"the policy {self.policy} needs a chain")
        if self.chain is not None and not policy.takes_chain:
            raise ConfigError("chain", f"the policy {self.policy} takes none")
        if policy.drafts_paths and self.width not in (None, 1):
            raise ConfigError("width", f"the policy {self.policy} drafts paths: it must be 1")
        return self

    @model_validator(mode="after")
    def _tree_is_not_too_large(self) -> "SchedulerConfig":
        if (self.depth or 1) * (self.width or 1) > MAX_TREE_TOKENS:
            raise ConfigError("width", f"depth times width must be at most {MAX_TREE_TOKENS}")
        return self


class TreesConfig(Strict):
    """The choice of the nodes of draft trees that the target verifies.

    Attributes:
        selection: `goodput`: the highest expected rate of tokens that arrive in time (default of
            adaptive routing); `whole`: all nodes, or the policy's `nodes` (default of others);
            `global-greedy`: the likeliest nodes of all requests, without objectives.
        budget_tokens: tokens that the target reads in a cycle, prompts included, for selections
            that have a budget. By default what yields most tokens per second.
    """

    selection: NodeSelectionName | None = None
    budget_tokens: int | None = Field(default=None, ge=1)
