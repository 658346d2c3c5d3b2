"""The named policies that benchmarks and simulations compare: what each means by itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from specrouter.config import Selection


@dataclass(frozen=True)
class RouterPolicy:
    """What a policy means by itself. The rest of `trees`, its budget say, is the scenario's.

    `settings`: of the scheduler.
    """

    policy: str
    selection: Selection
    shape: Literal["adaptive", "adaserve", "fixed", "static"] = "adaptive"
    settings: Mapping[str, Any] = field(default_factory=dict)


def _chain(depth: int) -> RouterPolicy:
    """Always speculates, as AdaServe's baseline vLLM-Spec does."""
    return RouterPolicy("ssd-smallest", "whole", "fixed", {"depth": depth, "width": 1})


# The baselines: what AdaServe compares with. The others answer to objectives.
BASELINES: Mapping[str, RouterPolicy] = {
    "target-only": RouterPolicy("target-only", "whole", "fixed"),
    "spec-4": _chain(4),
    "spec-6": _chain(6),
    "spec-8": _chain(8),
    "static-tree": RouterPolicy("ssd-smallest", "whole", "static"),
    "equal-greedy": RouterPolicy("adaptive", "equal-greedy"),
    "global-greedy": RouterPolicy("adaptive", "global-greedy"),
}
POLICIES: Mapping[str, RouterPolicy] = {
    **BASELINES,
    "adaserve": RouterPolicy("adaptive", "slo", "adaserve"),
    "slo": RouterPolicy("adaptive", "slo"),
    "goodput": RouterPolicy("adaptive", "goodput"),  # the default
}
