"""Two unequal replicas in simulated time, as `checks.service.cluster_load` has them live.

    python -m checks.service.unequal [--loads 2.0 2.8 3.6] [--seeds 4] [--told 0.65 0.65]
        [--traces DIR]

The machine is this one: the bundled pool's times are measured first, and `--row-ms` is what each
further request adds to a cycle beside them, as messages to other processes do. The slow replica
takes twice as long for everything. `--told`: of the fast and the slow one, what each tells of its
times over what is true. Lengths, objectives and loads are those of the live runs. A line for each
load and policy: what was attained, of each seed and of all, and by replica in the first seed.
"""

import argparse
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from checks.service.cluster_runs import Alone, Run, requests_of
from checks.service.service import tiny_pool
from research.sim.cluster.cluster import ClusterSettings, SimulatedCluster
from research.sim.cluster.replica import SimulatedReplica
from research.sim.machine import Machine
from research.sim.service import SimulatedService
from research.simulate import simulated_machine
from specrouter import ChainRouter, RouterConfig, SamplingParams
from specrouter.bench.replay import LoadRequest, Outcome, replay
from specrouter.cluster.state import ReplicaState
from specrouter.config import RoutingConfig, TreesConfig
from specrouter.config.policies import REPLICA_POLICIES
from specrouter.profile.time_curve import TimeCurve

_ROWS, _ACCEPTANCE, _SLOW = 8, 0.3, 2.0
_PROMPT, _OUTPUT = 400, 100  # tokens of a request alone
_POLICIES: tuple[str, ...] = ("round-robin", "flowguard", "slo")


@dataclass(eq=False)
class TellingReplica(SimulatedReplica):
    """`told`: its times as it tells them, over what is true."""

    told: float = 1.0

    def state(self) -> ReplicaState:
        own = super().state()
        tpot_ms = tuple((rows, ms * self.told) for rows, ms in own.tpot_ms)
        return replace(own, tpot_ms=tpot_ms, prefill_ms=own.prefill_ms * self.told)


@dataclass(frozen=True)
class Unequal:
    """A machine, and one that takes twice as long. `told`: see `TellingReplica`."""

    machine: Machine
    told: tuple[float, float] = (1.0, 1.0)

    def service(self, slow: float) -> SimulatedService:
        made = SimulatedService(
            machine=self.machine.slowed(slow), acceptance=_ACCEPTANCE, trees=TreesConfig()
        )
        made.use("slo")
        return made

    def alone(self, slow: float) -> Alone:
        service = self.service(slow)
        asked = LoadRequest(
            at_s=0.0,
            category="alone",
            token_ids=(0,) * _PROMPT,
            new_tokens=_OUTPUT,
            temperature=0.0,
            seed=1,
        )
        [found] = replay([asked], service, service)
        assert found.answer.ttft_ms is not None, "it was served"
        assert found.answer.tpot_ms is not None, "it was served"
        return Alone(found.answer.ttft_ms / _PROMPT, found.answer.tpot_ms, (0.0, 0.0))

    def requests(self, run: Run, traces: Path | None) -> list[LoadRequest]:
        asked, fast = requests_of(traces, run), self.alone(1.0)
        rate = run.load * (fast.rate(asked) + self.alone(_SLOW).rate(asked))
        found = []
        for one in asked:
            ttft_ms, tpot_ms = fast.objective(one)
            sent = LoadRequest(
                at_s=one.at_s / rate,
                category="any",
                token_ids=one.prompt,
                new_tokens=one.tokens,
                temperature=0.0,
                seed=one.seed,
            )
            found.append(replace(sent, objective_ms=tpot_ms, ttft_ms=ttft_ms))
        return found

    def cluster(self, policy: str) -> SimulatedCluster:
        makes = {
            name: lambda slow=slow, told=told: TellingReplica(self.service(slow), told=told)
            for name, slow, told in zip(("fast", "slow"), (1.0, _SLOW), self.told, strict=True)
        }
        return SimulatedCluster(makes, ClusterSettings(routing=RoutingConfig(policy=policy)))


def measured_machine(row_ms: float) -> Machine:
    """This one, with the bundled pool; `row_ms`: of each further request of a cycle."""
    config = RouterConfig.load(tiny_pool(engine={"max_requests": _ROWS}))
    params = SamplingParams(max_new_tokens=64, ignore_eos=True, seed=1)
    with ChainRouter.from_config(config) as router:
        for count in (1, 4, _ROWS):
            router.generate([list(range(300, 600))] * count, params)
        machine = simulated_machine(router)
    own_ms = machine.stages["cycle"].at(1)
    cycle = TimeCurve(tuple((rows, own_ms + row_ms * (rows - 1)) for rows in range(1, _ROWS + 1)))
    return replace(machine, stages={**machine.stages, "cycle": cycle})


def by_replica(outcomes: Sequence[Outcome], cluster: SimulatedCluster) -> str:
    """Requests, how many were in time, and the medians of TTFT and TPOT."""
    found = []
    for name in ("fast", "slow"):
        here = [one for one, job in zip(outcomes, cluster.jobs, strict=True) if job.place == name]
        if here:
            in_time = fmean(one.is_attained is True for one in here)
            ttft_ms = median(one.answer.ttft_ms or 0.0 for one in here)
            tpot_ms = median(one.answer.tpot_ms or 0.0 for one in here)
            found.append(f"{name} {in_time:.0%} of {len(here)}, {ttft_ms:.0f}, {tpot_ms:.0f} ms")
    return "; ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(prog="checks.service.unequal", description=__doc__)
    parser.add_argument("--loads", nargs="+", type=float, default=[2.0, 2.8, 3.6])
    policies = parser.add_argument("--policies", nargs="+", default=list(_POLICIES))
    policies.choices = REPLICA_POLICIES.names
    parser.add_argument("--told", nargs=2, type=float, default=[0.65, 0.65])
    parser.add_argument("--row-ms", type=float, default=2.0)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--traces", type=Path, help="folder with azure_2023_conv.csv")
    parser.add_argument("--machine", type=Path, help="keeps what was measured there")
    asked = parser.parse_args()
    machine = _kept(asked.machine, asked.row_ms)
    unequal = Unequal(machine, tuple(asked.told))
    for load in asked.loads:
        for policy in asked.policies:
            shares, first = [], ""
            for seed in range(asked.seeds):
                requests = unequal.requests(
                    Run(policy=policy, load=load, count=asked.requests, seed=seed), asked.traces
                )
                cluster = unequal.cluster(policy)
                outcomes = replay(requests, cluster, cluster)
                shares.append(fmean(one.is_attained is True for one in outcomes))
                first = first or by_replica(outcomes, cluster)
            every = " ".join(f"{share:.2f}" for share in shares)
            print(f"{load:g} {policy:12} {fmean(shares):.3f} ({every}) {first}", flush=True)


def _kept(file: Path | None, row_ms: float) -> Machine:
    if file is not None and file.is_file():
        found: Machine = pickle.loads(file.read_bytes())
        return found
    machine = measured_machine(row_ms)
    if file is not None:
        file.write_bytes(pickle.dumps(machine))
    return machine


if __name__ == "__main__":
    main()
