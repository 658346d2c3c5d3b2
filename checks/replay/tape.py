"""Tape: what an engine learns and decides, written down for replays.

`recorded_engines` has an engine that is built meanwhile write it. Facts keep the names and meanings
that `adapter` reads; what older code knew besides is written as it was then without it.
"""

import itertools
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import numpy as np

from checks.replay.adapter import LEARN, route_of_decision
from checks.replay.facts import Fact, rounded
from checks.replay.recording import Recording
from specrouter.config import SchedulerConfig
from specrouter.profile.acceptance import Bools, Floats, JudgedTrees
from specrouter.profile.cycle_times import Workload
from specrouter.profile.profiler import PerformanceProfiler
from specrouter.profile.snapshot import Mode, Pair, PerformanceSnapshot, TreeKey
from specrouter.profile.time_regression import TimeRegression as TimeEstimator
from specrouter.request.params import Chain
from specrouter.routing.chain_policy import Models
from specrouter.routing.scheduler import ModelChainScheduler
from specrouter.view import SCHEDULED, ChainDecision, Override

_MOST_ROWS = 8  # of a cycle whose trees are told: they are most of what a recording holds


@dataclass
class Tape:
    """What is being recorded. `promised`: the last decision's best option of each chain."""

    recording: Recording
    promised: dict[Chain, Mapping[str, int]] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)
    numbers: Iterator[int] = field(default_factory=itertools.count)  # of views
    views: "WeakKeyDictionary[PerformanceSnapshot, int]" = field(default_factory=WeakKeyDictionary)

    def add(self, fact: Fact) -> None:
        self.recording.facts.append(fact)


@contextmanager
def recorded_engines(tape: Tape) -> Iterator[None]:
    """An engine that is built within tells `tape` what it learns and decides; one engine a tape."""

    def profiler(*, parameters: Mapping[str, int]) -> PerformanceProfiler:
        tape.recording.about["parameters"] = dict(parameters)
        made = _Profiler(parameters=parameters)
        made.tape = tape
        return made

    def scheduler(config: SchedulerConfig, *args: Any, **kwargs: Any) -> ModelChainScheduler:
        made = _Scheduler(config, *args, **kwargs)
        made.tape, made.number = tape, len(tape.recording.schedulers)
        tape.recording.about.update(names=list(args[0]), target=args[2])
        assert all(made.fit(chain) for chain in made.candidates), "all models must fit together"
        flags = {name: bool(kwargs[name]) for name in ("only_paths", "rejection", "whole_trees")}
        tape.recording.schedulers.append({"config": config.model_dump(), **flags})
        return made

    with (
        patch("specrouter.engine.engine.PerformanceProfiler", profiler),
        patch("specrouter.engine.policies.ModelChainScheduler", scheduler),
    ):
        yield


class _Profiler(PerformanceProfiler):
    """Learns what the recording will say, and nothing while it is not to learn."""

    tape: Tape | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "is_learning" and self.tape is not None:
            with self.tape.lock:  # never between what is written down and what is learned
                super().__setattr__(name, value)
        else:
            super().__setattr__(name, value)

    def _note(self, kind: str, **values: Any) -> None:
        assert self.tape is not None
        with self.tape.lock:
            if self.is_learning or kind == "curve":
                fact = rounded(kind, **values)
                self.tape.add(fact)
                LEARN[kind](super(), fact)

    def snapshot(self) -> PerformanceSnapshot:
        assert self.tape is not None
        with self.tape.lock:
            self.tape.add(rounded("view"))
            found = super().snapshot()
            self.tape.views[found] = next(self.tape.numbers)
            return found

    def learn_curve(self, model: str, times: TimeEstimator, sizes: tuple[int, ...] = ()) -> None:
        self._note("curve", model=model, times=times.to_json())

    def begin_cycle(self) -> None:
        self._note("begin")

    def record_forward(
        self, model: str, tokens: int, attended: float, elapsed_ms: float, times: int = 1
    ) -> None:
        self._note(
            "forward", model=model, tokens=tokens, attended=attended, ms=elapsed_ms, times=times
        )

    def record_stage(self, stage: str, places: int, elapsed_ms: float, times: int = 1) -> None:
        self._note("stage", stage=stage, places=places, ms=elapsed_ms, times=times)

    def record_cycle(
        self, elapsed_ms: float, committed: int, requests: int, stage: str | None = None
    ) -> None:
        self._note("cycle", ms=elapsed_ms, committed=committed, requests=requests, stage=stage)

    def record_similarity(self, pair: Pair, total_variation: float) -> None:
        self._note("similarity", pair=pair, variation=total_variation)

    def record_outcome(
        self,
        chain: Chain,
        requests: int,
        predicted_ms: float,
        elapsed_ms: float,
        expected: float,
        committed: float,
        sampled: Mode = True,
    ) -> None:
        self._note(
            "outcome",
            chain=chain,
            requests=requests,
            predicted_ms=predicted_ms,
            ms=elapsed_ms,
            expected=expected,
            committed=committed,
            sampled=sampled,
        )

    def record_trees(self, key: TreeKey, trees: JudgedTrees) -> None:
        assert self.tape is not None
        # Now these rows, now those.
        first = len(self.tape.recording.facts) % max(1, len(trees.parents) - _MOST_ROWS + 1)
        few = slice(first, first + _MOST_ROWS)
        self._note(
            "trees",
            key=_told(key),
            exact=None,
            width=1,
            heights=np.zeros(len(trees.parents[few])),
            parents=trees.parents[few],
            depths=trees.depths[few],
            log_probs=trees.log_probs[few],
            judged=trees.judged[few],
            accepted=trees.accepted[few],
        )

    def record_choices(self, key: TreeKey, stated: Floats, accepted: Bools) -> None:
        self._note("choices", key=_told(key), stated=stated, accepted=accepted)


class _Scheduler(ModelChainScheduler):
    tape: Tape
    number: int

    def choose(
        self,
        snapshot: PerformanceSnapshot,
        workload: Workload,
        models: Models,
        current: ChainDecision | None = None,
        asked: Override = SCHEDULED,
    ) -> ChainDecision:
        if self.config.policy not in ("adaptive", "paper"):
            return super().choose(snapshot, workload, models, current, asked)
        lags = {name: float(np.float32(lag)) for name, lag in workload.lags.items()}
        workload = replace(workload, remaining=float(np.float32(workload.remaining)), lags=lags)
        decision = super().choose(snapshot, workload, models, current, asked)
        chain, deep, wide, nodes, rounds = route_of_decision(decision)
        with self.tape.lock:
            self.tape.add(
                rounded(
                    "decision",
                    view=self.tape.views[snapshot],
                    who=self.number,
                    phase=len(self.tape.recording.phases) - 1,
                    asked=(*asked, None),
                    first=current is None,
                    requests=workload.requests,
                    slots=workload.slots,
                    remaining=workload.remaining,
                    lagging=list(lags),
                    lags=np.array(list(lags.values())),
                    sampled=workload.sampled,
                    others=workload.others,
                    available=_ordered(models.available),
                    held=_ordered(models.held),
                    wanted=[],
                    chain=chain,
                    depth=deep,
                    width=wide,
                    nodes=nodes,
                    rounds=rounds,
                    reason=decision.reason,
                )
            )
            if decision.predicted is not None and asked == SCHEDULED:
                self.tape.promised = {
                    option.chain: {
                        "depth": option.shape.depth,
                        "width": option.shape.width,
                        "nodes": option.shape.nodes,
                    }
                    for option in (decision.predicted, *decision.alternatives)
                }
        return decision


def _ordered(names: Collection[str]) -> list[str]:
    return sorted(names)


def _told(key: TreeKey) -> tuple[Any, ...]:
    """With the number of inner rounds, which older code could have several of."""
    proposers, verifier, sampled = key
    return proposers, 1, verifier, sampled
