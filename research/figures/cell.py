"""A cell of a figure: one policy on one simulated machine under one workload, and what came of it.

Contract: a cell is plain values, and its key names it for good: a finished one need not be run
again. The same cell gives the same result.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from research.bench import traces
from research.bench.traces import Arrival
from research.figures.cluster_cell import WHOLE, ClusterKind, overload_of, routing_of
from research.figures.examples import figure_3, shares_of, speed_up
from research.sim.adaserve_load import URGENT_RATIO, AdaserveLoad
from research.sim.cluster.cluster import SimulatedCluster
from research.sim.machine import MACHINES, Machine, load_machine
from research.sim.replicas import Replicas
from research.sim.scenarios import SCENARIOS, scenario_requests
from research.sim.service import SimulatedService
from specrouter.bench.replay import LoadRequest, ReplayOutcome, figures, replay
from specrouter.config import TreesConfig

_OVERLOAD = 4.0  # times the capacity
ATTAINED = 0.9  # of requests, that capacity asks for
PRECISION = 0.02  # of a capacity
_MOST_DOUBLINGS = 8
_AZURE = {"ChatBot": "azure_2023_conv.csv", "Coder": "azure_2023_code.csv"}
_LIKE = {"Summarizer": "ChatBot", "Mixed": "ChatBot", "Reasoning": "ChatBot", "ToolLLM": "Coder"}

Measure = Literal["load", "capacity", "selection", "example", "speed-up", "routing", "overload"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Attributes:
    workload: `adaserve`, `adaserve-fluctuating`, or one of `SCENARIOS`.
    rate: requests per second, of each replica; where capacity is measured, to begin with.
    acceptance: of a drafter's best token.
    traces: folder of the published traces; None: arrivals are drawn.
    routing: policy of a cluster, whose replicas are `cluster`; None: SLOs-Serve's hand-over.
    """

    machine: str
    workload: str
    policy: str
    rate: float
    requests: int
    seed: int = 0
    acceptance: float = 0.75
    measure: Measure = "load"
    urgent_share: float | None = None
    urgent_ratio: float = URGENT_RATIO
    replicas: int = 1
    attained: float = ATTAINED
    traces: str | None = None
    routing: str | None = None
    cluster: ClusterKind = WHOLE

    @property
    def key(self) -> str:
        """Of traces only whether they are used: they may lie elsewhere next time."""
        named = {**asdict(self), "traces": self.traces is not None}
        if self.routing is None:  # as keys were before there were clusters
            del named["routing"], named["cluster"]
        return json.dumps(named, sort_keys=True)

    @property
    def variant(self) -> str:
        """What a cluster is called in a figure."""
        return self.cluster.name

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(each.name for each in fields(cls))


@cache
def machine_of(name: str) -> Machine:
    return load_machine(MACHINES / f"{name}.yaml")


def run_cell(cell: Cell) -> dict[str, Any]:
    """Of a load its figures; of a capacity requests per second and replica, and what was tried."""
    if cell.measure == "selection":
        machine = machine_of(cell.machine)
        return shares_of(machine, cell.policy, cell.acceptance, _requests(cell, machine, cell.rate))
    if cell.measure == "speed-up":
        return speed_up(machine_of(cell.machine), cell.policy, cell.requests, cell.seed)
    if cell.measure == "example":
        return figure_3(cell.policy)
    if cell.measure == "capacity":
        tried: dict[float, float] = {}

        def attained(rate: float) -> float:
            tried[rate] = _attainment(outcomes_of(cell, rate))
            return tried[rate]

        found = capacity(attained, cell.rate, cell.attained)
        return {"capacity": found, "tried": sorted(tried.items())}
    if cell.measure == "overload":
        return _overload(cell)
    if cell.measure == "routing":
        cluster, outcomes = _clustered(cell, _requests(cell, machine_of(cell.machine), cell.rate))
        return {"attained": _attainment(outcomes), **routing_of(cluster, outcomes)}
    outcomes = outcomes_of(cell, cell.rate)
    attainment = _attainment(outcomes)
    return {**figures(outcomes), "attained": attainment, "load": in_system(outcomes)}


def capacity(attained: Callable[[float], float], begin: float, wanted: float) -> float:
    """The largest rate at which enough is attained, by bisection; 0 where none is."""
    low, high = 0.0, begin
    for _ in range(_MOST_DOUBLINGS):
        if attained(high) < wanted:
            break
        low, high = high, 2.0 * high
    for _ in range(_MOST_DOUBLINGS if not low else 0):
        middle = high / 2.0
        if attained(middle) >= wanted:
            low = middle
            break
        high = middle
    while low and high / low > 1.0 + PRECISION:
        middle = (low + high) / 2.0
        if attained(middle) >= wanted:
            low = middle
        else:
            high = middle
    return low


def outcomes_of(cell: Cell, rate: float) -> list[ReplayOutcome]:
    machine = machine_of(cell.machine)
    requests = _requests(cell, machine, rate)
    if cell.routing is not None:
        return _clustered(cell, requests)[1]
    make = _service(cell, machine)
    service = make() if cell.replicas == 1 else Replicas(make, cell.replicas)
    service.use(cell.policy)
    return replay(requests, service, service)


def _service(cell: Cell, machine: Machine) -> Callable[[], SimulatedService]:
    batch_tokens = _batch_tokens(cell, machine)
    return lambda: SimulatedService(
        machine=machine, acceptance=cell.acceptance, trees=TreesConfig(), batch_tokens=batch_tokens
    )


def _clustered(
    cell: Cell, requests: Sequence[LoadRequest]
) -> tuple[SimulatedCluster, list[ReplayOutcome]]:
    assert cell.routing is not None, "it is a cluster"
    machine = machine_of(cell.machine)

    def made(factor: float) -> SimulatedService:
        service = _service(cell, machine.slowed(factor))()
        service.use(cell.policy)
        return service

    cluster = cell.cluster.cluster(cell.routing, cell.replicas, made, cell.seed, requests[-1].at_s)
    return cluster, replay(requests, cluster, cluster)


def _overload(cell: Cell) -> dict[str, Any]:
    """At the cell's rate, which should be a capacity, and at `_OVERLOAD` times that."""
    machine = machine_of(cell.machine)
    requests = _requests(cell, machine, cell.rate)
    fast = [replace(one, at_s=one.at_s / _OVERLOAD) for one in requests]
    cluster, outcomes = _clustered(cell, fast)
    return overload_of(_clustered(cell, requests)[1], outcomes, cluster)


def _requests(cell: Cell, machine: Machine, rate: float) -> list[LoadRequest]:
    folder = None if cell.traces is None else Path(cell.traces)
    if cell.workload.startswith("adaserve"):
        load = AdaserveLoad(
            rate_per_s=rate * cell.replicas,
            requests=cell.requests,
            seed=cell.seed,
            urgent_share=cell.urgent_share,
            urgent_ratio=cell.urgent_ratio,
            is_fluctuating=cell.workload == "adaserve-fluctuating",
            traces=folder,
        )
        return load.requests_for(machine.times[machine.target].at(1))
    scenario = SCENARIOS[cell.workload]
    arrivals = () if folder is None else _azure(folder, cell.workload)
    return scenario_requests(
        scenario, machine.batch_times, rate * cell.replicas, cell.requests, cell.seed, arrivals
    )


@cache
def _azure(folder: Path, workload: str) -> Sequence[Arrival]:
    file = _AZURE[_LIKE.get(workload, workload)]
    return tuple(traces.read_trace(folder / file, 30.0))


def _batch_tokens(cell: Cell, machine: Machine) -> int | None:
    """Of Sarathi-Serve: the largest batch within the tightest TPOT. AdaServe's workload, where
    nothing bounds TTFT, has the machine's chunk: so small a batch would only make prompts wait."""
    if cell.workload.startswith("adaserve"):
        return None
    return max(1, machine.batch_times.tokens_within(SCENARIOS[cell.workload].tightest_tpot_ms))


def _attainment(outcomes: Sequence[ReplayOutcome]) -> float:
    """Of all that arrive and can be judged."""
    judged = [one.is_attained for one in outcomes if one.is_attained is not None]
    return sum(judged) / len(judged)


def in_system(outcomes: Sequence[ReplayOutcome], points: int = 40) -> dict[str, list[float]]:
    """Requests that have come and not ended, at equal steps of time: those that attained their
    objectives, and the others."""
    end_s = max(one.end_s for one in outcomes)
    at_s = [end_s * (place + 0.5) / points for place in range(points)]

    def count(attained: bool) -> list[float]:
        chosen = [one for one in outcomes if (one.is_attained is True) == attained]
        return [float(sum(one.sent_s <= now < one.end_s for one in chosen)) for now in at_s]

    return {"at_s": at_s, "attained": count(True), "others": count(False)}
