"""The named policies that `bench load` compares: what each means by itself.

Each is a chain policy, a selection of nodes and an admission. None of the baselines falls back to
something better where it would pay, with one exception: `global-greedy` spends as many nodes as
promise most tokens by survival times profiled cost, which may be none. That is AdaServe's ablation
without objectives, and also the rule that vLLM merged in 2026; it is the strongest of the
baselines, so it is kept as strong as it can be.

The published policies are in `research.policies`, which adds their names to these.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class NamedPolicy:
    """What a policy means by itself. The rest of `trees`, its budget say, is the scenario's.

    Attributes:
        chains: `scheduler.policy`; `settings`: further keys of that section.
        selection: `trees.selection`.
        admission: `engine.admission`.
    """

    chains: str
    selection: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    admission: str = "fcfs"


def fixed_depth(depth: int) -> NamedPolicy:
    """Always speculates, as AdaServe's baseline vLLM-Spec does."""
    settings = {"depth": depth, "width": 1}
    return NamedPolicy(chains="smallest", selection="whole", settings=settings)


# `target-only` and `spec-*` read prompts in chunks, in cycles that decode other requests too.
BASELINES: dict[str, NamedPolicy] = {
    "target-only": NamedPolicy(chains="target-only", selection="whole"),
    "spec-4": fixed_depth(4),
    "spec-6": fixed_depth(6),
    "spec-8": fixed_depth(8),
    "global-greedy": NamedPolicy(chains="adaptive", selection="global-greedy"),
}
POLICIES: dict[str, NamedPolicy] = {
    **BASELINES,
    "slo": NamedPolicy(chains="adaptive", selection="goodput", admission="slo"),  # the default
    # The same, first come, first served.
    "goodput": NamedPolicy(chains="adaptive", selection="goodput"),
}
