"""Configuration of the choice of chains and trees, and of the nodes to verify."""

from pydantic import Field, model_validator

from modelpool.errors import ConfigError
from specrouter.config.policies import CHAIN_POLICIES, ChainPolicyName, NodeSelectionName
from specrouter.config.strict import Strict
from specrouter.request.params import MAX_TREE_TOKENS, Depth, Width


class SchedulerConfig(Strict):
    """The choice of chains and draft trees.

    Attributes:
        policy: `adaptive`: by measured times and acceptance; `static`: always `chain`; `smallest`:
            the smallest drafter and the target; `target-only`: no speculation.
        depth: levels of draft trees. By default chosen by `adaptive`, else 4.
        width: alternatives per level; depth times width is at most 64. By default chosen by
            `adaptive`, else 1.
        nodes: mean number of verified nodes per tree. By default chosen by `adaptive`, else all.
        chain: model names for `static`, weakest first, the target last.
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
        selection: `goodput`: highest expected rate of tokens in time (default for `adaptive`);
            `whole`: all nodes, or the policy's `nodes` (default for others); `global-greedy`:
            likeliest nodes of all requests, regardless of objectives.
        budget_tokens: tokens that the target reads in a cycle, prompts included, for selections
            with a budget. By default the number that gives the most tokens per second.
    """

    selection: NodeSelectionName | None = None
    budget_tokens: int | None = Field(default=None, ge=1)
