"""AdaServe's figures 8 to 16 (EuroSys '26), section 6."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from research.figures.cell import Cell
from research.figures.figure import Axis, Figure, Scope

MACHINES = ("adaserve-llama70b", "adaserve-qwen32b")
_BASELINES = ("vllm", "sarathi", "vllm-spec-4", "vllm-spec-6", "vllm-spec-8", "specinfer")
_ALL = (*_BASELINES, "global-greedy", "adaserve", "goodput", "slo")
_QUICK = ("vllm", "adaserve", "slo")
_RATES = {  # published, step 0.2
    MACHINES[0]: (2.6, 3.0, 3.4, 3.8, 4.2, 4.4, 4.8),
    MACHINES[1]: (2.4, 2.8, 3.2, 3.6, 3.8, 4.2),
}
_Y = (
    ("attained", "share of requests in time"),
    ("goodput_tokens_per_s", "goodput, tokens/s"),
)
_ASSUMED = (
    "Unknown: the drafters' acceptance (0.75 here), c1 and c2 (0). Arrivals where no traces are "
    "given: Poisson, with the traces' mix and median lengths. No number of a curve is in the text."
)


def _cells(
    scope: Scope, policies: Sequence[str], rates: Mapping[str, Sequence[float]]
) -> list[Cell]:
    requests = 24 if scope.is_quick else scope.requests
    return [
        Cell(
            machine=machine,
            workload="adaserve",
            policy=policy,
            rate=rate,
            requests=requests,
            seed=seed,
            traces=scope.traces,
        )
        for machine in scope.pick(MACHINES, MACHINES[:1])
        for rate in scope.pick(rates[machine], rates[machine][-1:])
        for policy in scope.pick(policies, [each for each in policies if each in _QUICK])
        for seed in scope.all_seeds
    ]


def _varied(scope: Scope, cells: Sequence[Cell], name: str, values: Sequence[Any]) -> list[Cell]:
    """Each with every value of a field; two of them in a quick scope."""
    wanted = scope.pick(values, values[:2])
    return [replace(cell, **{name: value}) for value in wanted for cell in cells]


def _at_4(scope: Scope, policies: Sequence[str] = _ALL) -> list[Cell]:
    return _cells(scope, policies, dict.fromkeys(MACHINES, (4.0,)))


def _by_rate(scope: Scope) -> list[Cell]:
    return _cells(scope, _ALL, _RATES)


def _by_share(scope: Scope) -> list[Cell]:
    return _varied(scope, _at_4(scope), "urgent_share", (0.1, 0.3, 0.5, 0.7, 0.9))


def _by_scale(scope: Scope) -> list[Cell]:
    cells = _varied(scope, _at_4(scope), "urgent_ratio", (0.6, 0.8, 1.0, 1.2, 1.4, 1.6))
    return [replace(cell, urgent_share=0.6) for cell in cells]


def _grid(scope: Scope) -> list[Cell]:
    cells = _cells(scope, _ALL, dict.fromkeys(MACHINES, (2.8, 3.6, 4.4, 4.8)))
    cells = _varied(scope, cells, "urgent_share", (0.3, 0.8))
    cells = _varied(scope, cells, "urgent_ratio", (1.0, 0.6, 1.6, 1.2))
    return _varied(scope, cells, "acceptance", (0.75, 0.65, 0.9))


def _fluctuating(scope: Scope) -> list[Cell]:
    return [replace(cell, workload="adaserve-fluctuating") for cell in _at_4(scope)]


def _ladder(scope: Scope) -> list[Cell]:
    return _at_4(scope, ("equal-greedy", "adaserve-slo-phase", "adaserve", "slo"))


def _selection(scope: Scope) -> list[Cell]:
    return [replace(cell, measure="selection") for cell in _at_4(scope, ("adaserve",))]


FIGURES = (
    Figure(
        name="adaserve-8-9",
        title="AdaServe figures 8 and 9: rate",
        cells=_by_rate,
        axis=Axis("rate", "requests per second", _Y),
        published=(
            "attainment up to 2.1x (Llama) and 1.6x (Qwen) the best baseline's, violations / 4.3 "
            "and / 3.2 at the highest rate (4.8, 4.2), goodput 1.9x and 1.7x."
        ),
        assumed=_ASSUMED,
    ),
    Figure(
        name="adaserve-10",
        title="AdaServe figure 10: share of urgent requests, 4.0 requests/s",
        cells=_by_share,
        axis=Axis("urgent_share", "share of urgent requests", _Y),
        published="violations / 4.3 and / 3.7, goodput +30% and +64% of the best baseline's.",
        assumed=_ASSUMED,
    ),
    Figure(
        name="adaserve-11",
        title="AdaServe figure 11: objective of urgent requests, 4.0 requests/s",
        cells=_by_scale,
        axis=Axis("urgent_ratio", "objective of urgent requests over the baseline latency", _Y),
        published=(
            "violations / 4.61 and / 3.05, goodput 1.38x; continuous batching below 40% under 1.0."
        ),
        assumed=_ASSUMED,
    ),
    Figure(
        name="adaserve-12",
        title="AdaServe figure 12: tokens of a request's pass",
        cells=_by_rate,
        axis=Axis("rate", "requests per second", (("acceptance_length", "tokens of a pass"),)),
        published=(
            "high at low rates, and falling, for AdaServe; constant for vLLM-Spec. No number."
        ),
        assumed=_ASSUMED,
    ),
    Figure(
        name="adaserve-13-14",
        title="AdaServe figures 13 and 14: categories that peak one after the other",
        cells=_fluctuating,
        axis=Axis("workload", "", _Y),
        published=(
            "AdaServe's attainment is highest. No number, and no trace: peaks here are our own "
            "shape."
        ),
        assumed=_ASSUMED,
    ),
    Figure(
        name="adaserve-16",
        title="AdaServe figure 16: what each part gains",
        cells=_ladder,
        axis=Axis("workload", "", _Y),
        published=(
            "with the first phase about 80% attained, with both phases and CUDA graphs above 90%; "
            "equal shares are low. CUDA graphs are in the drafter's published time here."
        ),
        assumed=_ASSUMED,
    ),
    Figure(
        name="adaserve-15",
        title="AdaServe figure 15: where a cycle's time goes",
        cells=_selection,
        axis=Axis(
            "workload",
            "",
            (
                ("drafting", "share of drafting"),
                ("selection", "share of selection"),
                ("verification", "share of verification"),
            ),
        ),
        published="selection on the CPU takes 0.41% (Llama) and 0.31% (Qwen).",
        assumed="Selection's milliseconds are measured on the computer that draws the figure. "
        + _ASSUMED,
    ),
    Figure(
        name="adaserve-grid",
        title="AdaServe's machines: rates, shares and objectives of urgent requests",
        cells=_grid,
        axis=Axis(
            "rate",
            "requests per second",
            _Y,
            ("machine", "urgent_share", "urgent_ratio", "acceptance"),
        ),
        published="see figures 8 to 11.",
        assumed=_ASSUMED,
    ),
)
