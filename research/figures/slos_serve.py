"""SLOs-Serve's capacity, burst and replica figures (arXiv 2504.08784), section 6."""

from dataclasses import replace

from research.figures.cell import Cell
from research.figures.figure import Axis, Figure, Scope
from research.sim.scenarios import SCENARIOS

_POLICIES = ("vllm", "vllm-spec-4", "sarathi", "slos-serve", "slo")
_OPT = ("slos-serve-opt-6.7b", "slos-serve-opt-13b", "slos-serve-opt-30b")
_ON_OPT = ("ChatBot", "Coder", "Summarizer", "Mixed")
_CAPACITY = (("capacity", "capacity, requests/s at 90% attained"),)
_ASSUMED = (
    "Lengths are log-normals fitted to Table 4's means and deviations; without traces chatting is "
    "Poisson and coding comes in gamma gaps (coefficient of variation 3). Unknown: the drafter's "
    "acceptance (0.7), the timeout of the loop, the safety margin of TPOTs (0.1). ToolLLM and "
    "Reasoning run on OPT-6.7B's first term, the latter scaled by the bytes of weights."
)


def _policies(scope: Scope) -> tuple[str, ...]:
    return scope.pick(_POLICIES, ("vllm", "sarathi", "slo"))


def _base(scope: Scope) -> Cell:
    return Cell(
        machine=_OPT[0],
        workload="ChatBot",
        policy="slo",
        rate=1.0,
        requests=30 if scope.is_quick else scope.requests,
        acceptance=0.7,
        measure="capacity",
        traces=scope.traces,
    )


def _capacity(scope: Scope) -> list[Cell]:
    places = [
        (machine, scenario)
        for scenario, found in SCENARIOS.items()
        for machine in (_OPT if scenario in _ON_OPT else (found.machine,))
    ]
    return [
        replace(_base(scope), machine=machine, workload=scenario, policy=policy, seed=seed)
        for machine, scenario in scope.pick(places, places[:1])
        for policy in _policies(scope)
        for seed in scope.all_seeds
    ]


def _burst(scope: Scope) -> list[Cell]:
    base = replace(_base(scope), workload="Coder", rate=4.5, measure="load")
    return [replace(base, policy=policy) for policy in _policies(scope)]


def _replicas(scope: Scope) -> list[Cell]:
    cells = [
        replace(_base(scope), workload=scenario, replicas=replicas, policy=policy, seed=seed)
        for scenario in scope.pick(("ChatBot", "Coder"), ("ChatBot",))
        for replicas in scope.pick((1, 2, 3, 4), (1, 2))
        for policy in scope.pick(("vllm", "slos-serve", "slo"), ("slo",))
        for seed in scope.all_seeds
    ]
    return [replace(cell, requests=cell.requests * cell.replicas) for cell in cells]


def _example(scope: Scope) -> list[Cell]:
    return [
        Cell(
            machine="figure-3",
            workload="figure-3",
            policy=policy,
            rate=0.0,
            requests=7,
            measure="example",
        )
        for policy in ("vllm", "sarathi", "slos-serve", "slo")
    ]


FIGURES = (
    Figure(
        name="slos-serve-3",
        title="SLOs-Serve figure 3: four prompts beside three requests that decode",
        cells=_example,
        axis=Axis(
            "workload", "", (("new", "new requests in time"), ("old", "earlier requests in time"))
        ),
        published=(
            "prefill first breaks all TPOTs, decode first misses two TTFTs of four, SLOs-Serve "
            "admits three of four and breaks nothing."
        ),
        assumed="The example's own machine: six tokens in a unit of time, nothing beside them.",
    ),
    Figure(
        name="slos-serve-capacity",
        title="SLOs-Serve figure 9: capacity of six scenarios",
        cells=_capacity,
        axis=Axis("workload", "", _CAPACITY),
        published=(
            "2.2x the better of vLLM and Sarathi-Serve in the geometric mean (abstract); in the "
            "text 1.76x over vLLM and 1.94x over Sarathi-Serve; ChatBot 1.41-1.70x and Summarizer "
            "1.14-1.17x over the sizes, Coder up to 2.1x, ToolLLM 1.90x, Reasoning 2.4x. No "
            "absolute capacity."
        ),
        assumed=_ASSUMED,
    ),
    Figure(
        name="slos-serve-burst",
        title="SLOs-Serve figure 11: Coder at 4.5 requests/s",
        cells=_burst,
        axis=Axis(
            "workload",
            "",
            (("attained", "share in time"), ("mean_running", "requests in the system, mean")),
        ),
        published=(
            "objectives of admitted requests hold through bursts, the others are served after them."
        ),
        assumed=_ASSUMED,
    ),
    Figure(
        name="slos-serve-replicas",
        title="SLOs-Serve figure 13: capacity of each of 1 to 4 replicas",
        cells=_replicas,
        axis=Axis("replicas", "replicas", _CAPACITY),
        published="ChatBot on 2, 3, 4 replicas: 2.18, 3.36, 4.61 times one's capacity in total.",
        assumed=_ASSUMED,
    ),
)
