"""Which published statements about AdaServe hold in the simulator, by what was not published?

    python -m research.studies.statements --traces FOLDER

Acceptance of the drafters, c1 and c2 are not published. Statements (section 6, 4.0 requests/s):
figure 11, continuous batching attains less than 40% where the urgent objective is below the
baseline latency; figure 16, the first phase of selection attains about 80%, both over 90%.
"""

import argparse
from dataclasses import replace
from itertools import product
from pathlib import Path

from research.figures.cell import machine_of
from research.policies.adaserve import ADASERVE, ADASERVE_SLO_PHASE
from research.sim.adaserve_load import URGENT_RATIO, AdaserveLoad
from research.sim.machine import Machine
from research.sim.service import SimulatedService
from specrouter.bench.replay import replay
from specrouter.config import TreesConfig
from specrouter.slo.node_selection import NodeSelection

RATE = 4.0
SHARE = 0.6  # of urgent requests, the paper's
SCALES = (0.8, 1.0)
_NO_MATTER = 0.75  # acceptance, where nobody drafts
ACCEPTANCES, C1, C2 = (0.65, 0.75, 0.85), (0, 4, 8), (0, 1, 2)


def attained(
    machine: Machine,
    policy: str,
    acceptance: float,
    load: AdaserveLoad,
    selection: NodeSelection | None = None,
) -> float:
    """Share of requests in time."""
    service = SimulatedService(machine=machine, acceptance=acceptance, trees=TreesConfig())
    service.use(policy, selection)
    requests = load.requests_for(machine.times[machine.target].at(1))
    return sum(one.is_attained is True for one in replay(requests, service, service)) / len(
        requests
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("machine")
    parser.add_argument("--traces", type=Path, help="folder; left out, arrivals are drawn")
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--acceptances", type=float, nargs="+", default=ACCEPTANCES)
    parser.add_argument("--c1", type=int, nargs="+", default=C1)
    parser.add_argument("--c2", type=int, nargs="+", default=C2)
    asked = parser.parse_args()
    machine = machine_of(asked.machine)

    def load(scale: float) -> AdaserveLoad:
        return AdaserveLoad(
            rate_per_s=RATE,
            requests=asked.requests,
            seed=asked.seed,
            urgent_share=SHARE,
            urgent_ratio=scale,
            traces=asked.traces,
        )

    for scale in SCALES:
        found = attained(machine, "vllm", _NO_MATTER, load(scale))
        print(f"vllm at {scale}: {found:.1%}", flush=True)
    for acceptance, c1, c2 in product(asked.acceptances, asked.c1, asked.c2):
        urgent = load(URGENT_RATIO)
        shares = []
        for policy, trees in (("adaserve-slo-phase", ADASERVE_SLO_PHASE), ("adaserve", ADASERVE)):
            selection = replace(trees, c1=c1, c2=c2)
            found = attained(machine, policy, acceptance, urgent, selection)
            shares.append(f"{policy} {found:.1%}")
        print(f"acceptance {acceptance}, c1 {c1}, c2 {c2}: {', '.join(shares)}", flush=True)


if __name__ == "__main__":
    main()
