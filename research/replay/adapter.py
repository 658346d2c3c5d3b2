"""Where recordings meet the project's decision code, and the only file that replays need for it.

`Decider` learns facts and answers questions. Whoever redesigns the profiler or the scheduler
changes what is below, and leaves names and meanings of facts as they are: recordings must stay
readable.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from research.replay.facts import Fact
from specrouter.config import SchedulerConfig
from specrouter.profile.acceptance import JudgedTrees
from specrouter.profile.cycle_times import Workload
from specrouter.profile.profiler import PerformanceProfiler
from specrouter.profile.snapshot import TreeKey
from specrouter.profile.time_regression import TimeRegression as TimeEstimator
from specrouter.routing.chain_policy import ModelNames
from specrouter.routing.scheduler import ModelChainScheduler
from specrouter.view import ChainDecision

_GONE = ("inner_rounds", "groups")

Route = tuple[tuple[str, ...], int, int, int, int]  # chain, depth, width, nodes, inner rounds


@dataclass(frozen=True, eq=False)
class Answer:
    """`state`: what the decider wants back as the decision in use when it is asked again."""

    route: Route
    reason: str
    state: Any


class Decider:
    """The code of this tree: a profiler that learns, and the schedulers that are asked.

    Args:
        about, schedulers: of a recording.
    """

    def __init__(self, about: Mapping[str, Any], schedulers: list[dict[str, Any]]) -> None:
        self._profiler = PerformanceProfiler(parameters=about["parameters"])
        self._schedulers = [
            ModelChainScheduler(
                SchedulerConfig.model_validate(_settings(each["config"])),
                about["names"],
                about["parameters"],
                about["target"],
                each["only_paths"],
                each["whole_trees"],
            )
            for each in schedulers
        ]

    def learn(self, fact: Fact) -> None:
        """Any fact but views and decisions."""
        LEARN[fact.kind](self._profiler, fact)

    def view(self) -> Any:
        """What is known now, for `decide`."""
        return self._profiler.snapshot()

    def decide(self, view: Any, question: Fact, current: Any | None) -> Answer:
        """`current`: the state of the last answer to the same requests; None: the first."""
        lags = dict(zip(question["lagging"], question["lags"].tolist(), strict=True))
        workload = Workload(
            requests=question["requests"],
            slots=question["slots"],
            remaining=question["remaining"],
            lags=lags,
            sampled=question["sampled"],
            others=question["others"],
        )
        models = ModelNames(frozenset(question["available"]), frozenset(question["held"]))
        scheduler = self._schedulers[question["who"]]
        decision = scheduler.choose(view, workload, models, current, tuple(question["asked"][:2]))
        return Answer(route_of_decision(decision), decision.reason, decision)


def _settings(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Without what older code could be told and this cannot."""
    return {name: value for name, value in recorded.items() if name not in _GONE}


def _times(kept: Any) -> TimeEstimator:
    """In format 1 as (tokens, ms with attention, pairs attended, visits), and attention's slope."""
    if kept["format"] != 1:
        return TimeEstimator.from_json(kept)
    slope, points, most = kept["slope_ms_per_million"], [], 0.0
    for size, ms, attended, *_ in kept["of"]:
        most = max(most, 0.1 * ms, ms - slope * 1e-6 * attended)
        points.append([size, most])
    return TimeEstimator.from_json({"format": 2, "slope_ms_per_million": slope, "of": points})


def route_of_decision(decision: ChainDecision) -> Route:
    return (decision.chain, decision.shape.depth, decision.shape.width, decision.shape.nodes, 1)


def _key(fact: Fact) -> TreeKey:
    proposers, _, verifier, sampled = fact["key"]
    return tuple(proposers), verifier, sampled


def _learn_trees(profiler: PerformanceProfiler, fact: Fact) -> None:
    names = ("parents", "depths", "log_probs", "judged", "accepted")
    if fact["key"][1] > 1:
        return
    trees = JudgedTrees(**{name: fact[name] for name in names})
    profiler.record_trees(_key(fact), trees)


LEARN: Mapping[str, Any] = {
    "curve": lambda to, f: to.learn_curve(f["model"], _times(f["times"])),
    "begin": lambda to, f: to.begin_cycle(),
    "forward": lambda to, f: to.record_forward(
        f["model"], f["tokens"], f["attended"], f["ms"], f["times"]
    ),
    "stage": lambda to, f: to.record_stage(f["stage"], f["places"], f["ms"], f["times"]),
    "cycle": lambda to, f: to.record_cycle(f["ms"], f["committed"], f["requests"], f["stage"]),
    "similarity": lambda to, f: to.record_similarity(tuple(f["pair"]), f["variation"]),
    "trees": _learn_trees,
    "choices": lambda to, f: to.record_choices(_key(f), f["stated"], f["accepted"]),
    "outcome": lambda to, f: to.record_outcome(
        tuple(f["chain"]),
        f["requests"],
        f["predicted_ms"],
        f["ms"],
        f["expected"],
        f["committed"],
        f["sampled"],
    ),
    "probe": lambda to, f: None,
}
