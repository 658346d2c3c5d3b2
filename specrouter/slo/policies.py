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
    shape: Literal["costmodel", "adaserve", "fixed", "static"] = "costmodel"
    settings: Mapping[str, Any] = field(default_factory=dict)


def _fixed(depth: int) -> RouterPolicy:
    return RouterPolicy("adaptive", "whole", "fixed", {"depth": depth, "width": 1})


# The baselines: what AdaServe compares with. The others answer to objectives.
BASELINES: Mapping[str, RouterPolicy] = {
    "target-only": RouterPolicy("target-only", "whole", "fixed"),
    "fixed-4": _fixed(4),
    "fixed-6": _fixed(6),
    "fixed-8": _fixed(8),
    "static-tree": RouterPolicy("adaptive", "whole", "static"),
    "equal-greedy": RouterPolicy("adaptive", "equal-greedy"),
    "global-greedy": RouterPolicy("adaptive", "global-greedy"),
}
POLICIES: Mapping[str, RouterPolicy] = {
    **BASELINES,
    "adaserve": RouterPolicy("adaptive", "slo", "adaserve"),
    "slo": RouterPolicy("adaptive", "slo"),
    "costmodel": RouterPolicy("adaptive", "costmodel"),  # the default
}
