"""TreesConfig: how large the draft trees of a cycle are, and what of them is verified."""

from typing import Literal

from pydantic import Field, model_validator

from modelpool.errors import ConfigError
from specrouter.config.strict import Strict
from specrouter.request.params import MAX_DEPTH, MAX_TREE_TOKENS, MAX_WIDTH

Selection = Literal["goodput", "slo", "slo-phase", "global-greedy", "equal-greedy", "whole"]


class TreesConfig(Strict):
    """How large the trees of a cycle are, and which of their nodes the target verifies.

    Attributes:
        shape: depth and width of the drafts. `adaptive`: those that promise most, cycle by cycle,
            with the prompts that are read in it and the objectives of its requests; `adaserve` and
            `adaserve-v1`: by the number of requests (AdaServe, Equations 8 and 9, and their earlier
            form); `fixed`: as the scheduler's policy says; `static`: SpecInfer's tree.
        selection: `goodput`: maximises the expected rate of tokens that arrive in time; `slo`:
            AdaServe's Algorithm 2 under a budget; `slo-phase`: its first phase only, objectives;
            `global-greedy`: its second only, without objectives; `equal-greedy`: the same share
            for each request; `whole`: all nodes. Left out, adaptive routing takes `goodput`, the
            other policies verify whole trees, or their `nodes`.
        budget_tokens: tokens that the target reads in a cycle, roots and prompts included, for
            `slo`, `global-greedy` and `equal-greedy`. Left out, as many as bring most tokens per
            second by its measured times and the acceptances so far.
        n_max_share: nodes that a request may get towards its objective, times its equal share.
        latency_margin: on the foreseen time of a cycle, where objectives are weighed.
        root_credit: accepted tokens that a tree's root stands for.
        order: who is served first when a budget does not serve all, `slo` only.
        max_depth, min_depth, max_width: bounds of the Equations 8 and 9.
        drafter_tokens: B2 of Equation 9, what a drafter reads in a step; left out, the budget.
        c1, c2: constants of the Equations 8 and 9.
    """

    shape: Literal["adaptive", "adaserve", "fixed", "static"] = "adaptive"
    selection: Selection | None = None
    budget_tokens: int | None = Field(default=None, ge=1)
    n_max_share: float = Field(default=1.2, gt=0, allow_inf_nan=False)
    latency_margin: float = Field(default=1.05, ge=1, allow_inf_nan=False)
    root_credit: float = Field(default=1.0, ge=0, le=1)
    order: Literal["neediest", "easiest"] = "neediest"
    max_depth: int = Field(default=8, ge=1, le=MAX_DEPTH)
    min_depth: int = Field(default=1, ge=1, le=MAX_DEPTH)
    max_width: int = Field(default=3, ge=1, le=MAX_WIDTH)
    drafter_tokens: int | None = Field(default=None, ge=1)
    c1: int = Field(default=0, ge=0)
    c2: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _depths_are_in_order(self) -> "TreesConfig":
        if self.min_depth > self.max_depth:
            raise ConfigError("min_depth", f"must be at most max_depth, which is {self.max_depth}")
        if self.max_depth * self.max_width > MAX_TREE_TOKENS:
            raise ConfigError("max_width", f"times max_depth must be at most {MAX_TREE_TOKENS}")
        return self
