"""SchedulerConfig: how chains and trees are chosen."""

from typing import Literal

from pydantic import Field, model_validator

from modelpool.errors import ConfigError
from specrouter.config.strict import Strict
from specrouter.request.params import MAX_DEPTH, MAX_TREE_TOKENS, MAX_WIDTH

Policy = Literal[
    "adaptive",
    "paper",
    "static",
    "ssd-smallest",
    "target-only",
    "specustream",
    "specustream-fixed",
]
STREAMED: tuple[Policy, ...] = ("specustream", "specustream-fixed")


class SchedulerConfig(Strict):
    """How chains and trees are chosen.

    Attributes:
        policy: `adaptive`: measured times and acceptances decide; `paper`: SpecRouter's formula and
            hard rejection; `static`: always `chain`, such as the best one that
            `specrouter bench chains` finds; `ssd-smallest`: the smallest drafter and the target;
            `target-only`: no speculation; `specustream`: StreamServe's depth of each request, with
            the smallest drafter or `chain`, and `specustream-fixed`: the same with acceptance rates
            in its flow vector.
        depth: levels of the drafted token trees. Left out, `adaptive` chooses it, `specustream` has
            at most 20, and the other policies take 4.
        width: branches on each level; times the depth at most 64. Left out, `adaptive` chooses it,
            and the other policies take 1.
        nodes: of a request's tree, in the mean, that the target verifies: the most probable ones.
            Left out, `adaptive` chooses it, and the other policies verify whole trees.
        chain: of `static` and `specustream`: names, weakest first, the target last.
    """

    policy: Policy = "adaptive"
    depth: int | None = Field(default=None, ge=1, le=MAX_DEPTH)
    width: int | None = Field(default=None, ge=1, le=MAX_WIDTH)
    nodes: int | None = Field(default=None, ge=1, le=MAX_TREE_TOKENS)
    chain: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _fixed_policies_have_a_chain(self) -> "SchedulerConfig":
        if self.policy == "static" and self.chain is None:
            raise ValueError("the policy static needs a chain")
        if self.chain is not None and self.policy not in ("static", *STREAMED):
            raise ValueError("a chain goes with the policies static and specustream")
        return self

    @model_validator(mode="after")
    def _streamed_drafts_are_paths(self) -> "SchedulerConfig":
        if self.policy in STREAMED and self.width not in (None, 1):
            raise ConfigError("width", f"the policy {self.policy} drafts paths: it must be 1")
        return self

    @model_validator(mode="after")
    def _tree_is_not_too_large(self) -> "SchedulerConfig":
        if (self.depth or 1) * (self.width or 1) > MAX_TREE_TOKENS:
            raise ConfigError("width", f"depth times width must be at most {MAX_TREE_TOKENS}")
        return self
