"""The named policies that `load` and `simulate` compare: what each means by itself.

Each is a chain policy, a selection of nodes and an admission. None of the baselines falls back to
something better where it would pay, with one exception: `global-greedy` spends as many nodes as
promise most tokens by survival times profiled cost, which may be none. That is AdaServe's ablation
without objectives, and also the rule that vLLM merged in 2026; it is the strongest of the
baselines, so it is kept as strong as it can be.

Those of papers are as published. `vllm*` and `sarathi` are simulated only.

Sources: AdaServe (EuroSys '26), sections 5.2, 6.1 and 6.3; SLOs-Serve (arXiv 2504.08784), section
6; StreamServe (arXiv 2604.09562), section 3.5; SpecRouter, section 4.2.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from modelpool.errors import ConfigError


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


def _published(name: str) -> str:
    return f"research.policies:{name}"


_PREFILL_FIRST, _DECODE_FIRST = "prefill-first", "decode-first"  # research.sim.baseline_admission
_ALONE = NamedPolicy(chains="target-only", selection="whole")

# `target-only` and `spec-*` read prompts in chunks, in cycles that decode other requests too.
BASELINES: dict[str, NamedPolicy] = {
    "target-only": _ALONE,
    "spec-4": fixed_depth(4),
    "spec-6": fixed_depth(6),
    "spec-8": fixed_depth(8),
    "global-greedy": NamedPolicy(chains="adaptive", selection="global-greedy"),
}
POLICIES: dict[str, NamedPolicy] = {
    **BASELINES,
    "vllm": replace(_ALONE, admission=_PREFILL_FIRST),
    "sarathi": replace(_ALONE, admission=_DECODE_FIRST),
    "vllm-spec-4": replace(fixed_depth(4), admission=_PREFILL_FIRST),
    "vllm-spec-6": replace(fixed_depth(6), admission=_PREFILL_FIRST),
    "vllm-spec-8": replace(fixed_depth(8), admission=_PREFILL_FIRST),
    # Always speculate, the first with SpecInfer's tree, the second with those of Equations 8 and 9.
    "specinfer": NamedPolicy(chains="smallest", selection=_published("SPECINFER")),
    "equal-greedy": NamedPolicy(chains="smallest", selection=_published("EQUAL_GREEDY")),
    "slo": NamedPolicy(chains="adaptive", selection="goodput", admission="slo"),  # the default
    # The same, first come, first served.
    "goodput": NamedPolicy(chains="adaptive", selection="goodput"),
    "paper": NamedPolicy(chains=_published("PAPER"), selection="whole"),
    "adaserve": NamedPolicy(chains="smallest", selection=_published("ADASERVE")),
    "adaserve-slo-phase": NamedPolicy(
        chains="smallest", selection=_published("ADASERVE_SLO_PHASE")
    ),
    # As deep as any tier may speculate; admission says how deep each does.
    # Ten tokens are verified at most, the root included (Appendix D).
    "slos-serve": replace(fixed_depth(9), admission=_published("SLOS_SERVE")),
    "specustream": NamedPolicy(chains=_published("SPECUSTREAM"), selection="whole"),
    "specustream-fixed": NamedPolicy(chains=_published("SPECUSTREAM_FIXED"), selection="whole"),
}
# Which replica a request goes to, in a scenario with a cluster.
ROUTING = {"flowguard-printed": _published("FLOWGUARD_PRINTED")}


def is_live(policy: NamedPolicy) -> bool:
    """An engine can run it, not only the simulator."""
    return policy.admission not in (_PREFILL_FIRST, _DECODE_FIRST)


LIVE = [name for name, policy in POLICIES.items() if is_live(policy)]


def settings_of(names: Sequence[str]) -> Iterator[str]:
    """What `--set` is given for a policy of each kind, as KEY=VALUE.

    Raises:
        ConfigError: a name is unknown, or can only be simulated.
    """
    for name in names:
        if name in ROUTING:
            yield f"cluster.routing.policy={ROUTING[name]}"
            continue
        chosen = POLICIES.get(name)
        if chosen is None or not is_live(chosen):
            raise ConfigError("--policy", f"{name!r} is none of {', '.join((*LIVE, *ROUTING))}")
        yield f"scheduler.policy={chosen.chains}"
        yield f"trees.selection={chosen.selection}"
        yield f"engine.admission={chosen.admission}"
        yield from (f"scheduler.{key}={value}" for key, value in chosen.settings.items())
