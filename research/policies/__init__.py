"""The published policies. A configuration names them so: `research.policies:PAPER`.

In a process that imports this package they have shorter names as well, such as `paper`.
"""

from research.policies.adaserve import ADASERVE, ADASERVE_SLO_PHASE, EQUAL_GREEDY, SPECINFER
from research.policies.flowguard_printed import FLOWGUARD_PRINTED
from research.policies.paper import PAPER
from research.policies.slos_serve import SLOS_SERVE
from research.policies.specustream import SPECUSTREAM, SPECUSTREAM_FIXED
from specrouter.config.policies import (
    ADMISSION_POLICIES,
    CHAIN_POLICIES,
    NODE_SELECTIONS,
    REPLICA_POLICIES,
)

CHAIN_POLICIES.register("paper", PAPER)
CHAIN_POLICIES.register("specustream", SPECUSTREAM)
CHAIN_POLICIES.register("specustream-fixed", SPECUSTREAM_FIXED)
NODE_SELECTIONS.register("adaserve", ADASERVE)
NODE_SELECTIONS.register("adaserve-slo-phase", ADASERVE_SLO_PHASE)
NODE_SELECTIONS.register("equal-greedy", EQUAL_GREEDY)
NODE_SELECTIONS.register("specinfer", SPECINFER)
ADMISSION_POLICIES.register("slos-serve", SLOS_SERVE)
REPLICA_POLICIES.register("flowguard-printed", FLOWGUARD_PRINTED)
