"""The named policies that benchmarks and simulations compare: what each means by itself.

Each is a router's policy and an admission. Those of papers are as published, and none of them falls
back to something better where it would pay, with one exception: `global-greedy` spends as many
nodes as promise most tokens by survival times profiled cost, which may be none. That is AdaServe's
ablation without objectives, and also the rule that vLLM merged in 2026; it is the strongest of the
baselines, so it is kept as strong as it can be.

Sources: AdaServe (EuroSys '26), sections 5.2, 6.1 and 6.3; SLOs-Serve (arXiv 2504.08784), section
6; what is not in the texts: docs/design.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from specrouter.config import AdmissionName, Selection
from specrouter.slo.serve.prefill_budget import MOST_SPECULATED

# Of baselines: `specrouter.slo.baseline_admission`. No engine can be configured with them.
BaselineAdmission = Literal["prefill-first", "decode-first"]


@dataclass(frozen=True)
class RouterPolicy:
    """What a policy means by itself. The rest of `trees`, its budget say, is the scenario's.

    `settings`: of the scheduler. `is_published`: the budgets and bounds of trees are those that a
    machine file says were published for it.
    """

    policy: str
    selection: Selection
    shape: Literal["adaptive", "adaserve", "fixed", "static"] = "adaptive"
    settings: Mapping[str, Any] = field(default_factory=dict)
    admission: AdmissionName | BaselineAdmission = "fcfs"
    is_published: bool = False

    @property
    def is_live(self) -> bool:
        """Can an engine run it?"""
        return self.admission in get_args(AdmissionName)


def _chain(depth: int, admission: AdmissionName | BaselineAdmission = "fcfs") -> RouterPolicy:
    """Always speculates, as AdaServe's baseline vLLM-Spec does."""
    settings = {"depth": depth, "width": 1}
    return RouterPolicy("ssd-smallest", "whole", "fixed", settings, admission)


def _adaserve(selection: Selection) -> RouterPolicy:
    """Always speculates, with trees of Equations 8 and 9 under the published budgets."""
    return RouterPolicy("ssd-smallest", selection, "adaserve", is_published=True)


def _by_tier() -> RouterPolicy:
    """As deep as any tier may speculate; admission says how deep each does."""
    return _chain(MOST_SPECULATED - 1, "slos-serve")


# The baselines: what AdaServe compares with. `target-only` and `spec-*` read prompts in chunks
# beside the others' tokens; `vllm` and `vllm-spec-*` are the same with prefill first.
BASELINES: Mapping[str, RouterPolicy] = {
    "target-only": RouterPolicy("target-only", "whole", "fixed"),
    "vllm": RouterPolicy("target-only", "whole", "fixed", admission="prefill-first"),
    "sarathi": RouterPolicy("target-only", "whole", "fixed", admission="decode-first"),
    "spec-4": _chain(4),
    "spec-6": _chain(6),
    "spec-8": _chain(8),
    "vllm-spec-4": _chain(4, "prefill-first"),
    "vllm-spec-6": _chain(6, "prefill-first"),
    "vllm-spec-8": _chain(8, "prefill-first"),
    "specinfer": RouterPolicy("ssd-smallest", "whole", "static"),
    "equal-greedy": _adaserve("equal-greedy"),
    "global-greedy": RouterPolicy("adaptive", "global-greedy"),
}
POLICIES: Mapping[str, RouterPolicy] = {
    **BASELINES,
    "adaserve": _adaserve("slo"),
    "adaserve-slo-phase": _adaserve("slo-phase"),
    "slos-serve": _by_tier(),
    "specustream": RouterPolicy("specustream", "whole", "fixed"),
    "specustream-fixed": RouterPolicy("specustream-fixed", "whole", "fixed"),
    "slo": RouterPolicy("adaptive", "goodput", admission="slo"),  # the default
    "goodput": RouterPolicy("adaptive", "goodput"),  # the same, first come, first served
}
