"""The named policies of the papers, beside those that `bench load` knows, which it then knows too.

Those of papers are as published. `vllm*` and `sarathi` are simulated only.

Sources: AdaServe (EuroSys '26), sections 5.2, 6.1 and 6.3; SLOs-Serve (arXiv 2504.08784), section
6; StreamServe (arXiv 2604.09562), section 3.5; SpecRouter, section 4.2.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from modelpool.errors import ConfigError
from specrouter.bench import named_policies
from specrouter.bench.named_policies import NamedPolicy, fixed_depth
from specrouter.slo.serve.prefill_budget import MOST_SPECULATED


def _published(name: str) -> str:
    return f"research.policies:{name}"


_PREFILL_FIRST, _DECODE_FIRST = "prefill-first", "decode-first"  # research.sim.baseline_admission
_ALONE = named_policies.BASELINES["target-only"]

POLICIES: dict[str, NamedPolicy] = {
    **named_policies.BASELINES,
    "vllm": replace(_ALONE, admission=_PREFILL_FIRST),
    "sarathi": replace(_ALONE, admission=_DECODE_FIRST),
    "vllm-spec-4": replace(fixed_depth(4), admission=_PREFILL_FIRST),
    "vllm-spec-6": replace(fixed_depth(6), admission=_PREFILL_FIRST),
    "vllm-spec-8": replace(fixed_depth(8), admission=_PREFILL_FIRST),
    # Always speculate, the first with SpecInfer's tree, the second with those of Equations 8 and 9.
    "specinfer": NamedPolicy(chains="smallest", selection=_published("SPECINFER")),
    "equal-greedy": NamedPolicy(chains="smallest", selection=_published("EQUAL_GREEDY")),
    **named_policies.POLICIES,
    "paper": NamedPolicy(chains=_published("PAPER"), selection="whole"),
    "adaserve": NamedPolicy(chains="smallest", selection=_published("ADASERVE")),
    "adaserve-slo-phase": NamedPolicy(
        chains="smallest", selection=_published("ADASERVE_SLO_PHASE")
    ),
    # As deep as any tier may speculate; admission says how deep each does.
    "slos-serve": replace(fixed_depth(MOST_SPECULATED - 1), admission=_published("SLOS_SERVE")),
    "specustream": NamedPolicy(chains=_published("SPECUSTREAM"), selection="whole"),
    "specustream-fixed": NamedPolicy(chains=_published("SPECUSTREAM_FIXED"), selection="whole"),
}
# Which replica a request goes to, in a scenario with a cluster.
ROUTING = {"flowguard-printed": _published("FLOWGUARD_PRINTED")}


def is_live(policy: NamedPolicy) -> bool:
    """An engine can run it, not only the simulator."""
    return policy.admission not in (_PREFILL_FIRST, _DECODE_FIRST)


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
            live = [each for each, one in POLICIES.items() if is_live(one)]
            raise ConfigError("--policy", f"{name!r} is none of {', '.join((*live, *ROUTING))}")
        yield f"scheduler.policy={chosen.chains}"
        yield f"trees.selection={chosen.selection}"
        yield f"engine.admission={chosen.admission}"
        yield from (f"scheduler.{key}={value}" for key, value in chosen.settings.items())
