"""Registries of the policies that a configuration may name, one for each key."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from specrouter.registry import Registry

CHAIN_POLICIES = Registry(
    "chain policy",
    "specrouter.routing.chain_policy:ChainPolicy",
    {
        "adaptive": "specrouter.routing.adaptive:ADAPTIVE",
        "static": "specrouter.routing.chain_policy:STATIC",
        "smallest": "specrouter.routing.chain_policy:SMALLEST",
        "target-only": "specrouter.routing.chain_policy:TARGET_ONLY",
    },
)
NODE_SELECTIONS = Registry(
    "node selection",
    "specrouter.slo.node_selection:NodeSelection",
    {
        "goodput": "specrouter.slo.node_selection:GOODPUT",
        "global-greedy": "specrouter.slo.node_selection:GLOBAL_GREEDY",
        "whole": "specrouter.slo.node_selection:WHOLE",
    },
)
ADMISSION_POLICIES = Registry(
    "admission policy",
    "specrouter.slo.admission:AdmissionPolicy",
    {
        "slo": "specrouter.slo.serve.measured_pacing:SLO",
        "fcfs": "specrouter.slo.admission:FCFS",
    },
)
REPLICA_POLICIES = Registry(
    "replica policy",
    "specrouter.cluster.policy:ReplicaPolicy",
    {
        "slo": "specrouter.cluster.policy:SLO",
        "flowguard": "specrouter.cluster.policy:FLOWGUARD",
        "join-shortest": "specrouter.cluster.policy:JOIN_SHORTEST",
        "p2c": "specrouter.cluster.policy:P2C",
        "round-robin": "specrouter.cluster.policy:ROUND_ROBIN",
    },
)


def _known(registry: Registry) -> AfterValidator:
    def check(name: str) -> str:
        registry.check(name)
        return name

    return AfterValidator(check)


def _names(registry: Registry) -> Any:
    return Field(examples=list(registry.names))


# Types of the keys that name a policy.
ChainPolicyName = Annotated[str, _known(CHAIN_POLICIES), _names(CHAIN_POLICIES)]
NodeSelectionName = Annotated[str, _known(NODE_SELECTIONS), _names(NODE_SELECTIONS)]
AdmissionPolicyName = Annotated[str, _known(ADMISSION_POLICIES), _names(ADMISSION_POLICIES)]
ReplicaPolicyName = Annotated[str, _known(REPLICA_POLICIES), _names(REPLICA_POLICIES)]
