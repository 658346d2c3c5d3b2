"""The decisions in use, and when they are made anew.

Requests that leave the same things open share a decision. It is made anew when it is due, and every
switch leaves a record with its alternatives. Pure: the decisions in use come in with the view and
go out with the plan (`Standing`).

Not here: the routes of a single cycle that follow from it (`specrouter.routing.cycle_routes`).
"""

from dataclasses import dataclass, field, replace

import numpy as np

from specrouter.cycle import CONTEXT_STEP, DraftShape
from specrouter.profile.cycle_times import Workload
from specrouter.routing.catch_up import CycleCatchUp
from specrouter.routing.chain_policy import ModelNames
from specrouter.routing.decision_record import DecisionRecord
from specrouter.routing.scheduler import ModelChainScheduler
from specrouter.view import (
    SCHEDULED,
    ChainDecision,
    EngineView,
    InUse,
    Override,
    RequestTable,
    Standing,
)

INTERVAL = 16  # cycles after which a decision is due again
_EAGER_INTERVAL, _EAGER_SHARE = 3, 4  # at first: after 3 cycles, or a quarter of those so far
_OTHER_LOAD = 1.25  # change of the number of requests that makes it due


@dataclass(kw_only=True)
class CycleDecisions:
    """The decisions of one cycle: those that stay in use, and new ones for those that are due.

    Args:
        decoding: requests in the target's pass.
        reading: further requests, whose prompts are not read yet.
    """

    scheduler: ModelChainScheduler
    view: EngineView
    catch_up: CycleCatchUp
    decoding: int
    reading: int
    in_use: dict[Override, InUse] = field(init=False)
    records: list[DecisionRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.in_use = dict(self.view.standing.in_use)

    def decide(self, key: Override, requests: RequestTable, models: ModelNames) -> ChainDecision:
        """Return the decision for the requests of a key; it is made anew if it is due."""
        before = self.in_use.get(key)
        count, others = len(requests) + self.reading, self.decoding - len(requests)
        if before is not None and not self._is_due(before, count, others, models):
            return before.decision
        current = None if before is None else before.decision
        workload = replace(workload_of(requests), requests=count, others=others)
        workload = self.catch_up.payable(workload, self.scheduler.target, requests)
        if self.view.resting is None:
            decision = self.scheduler.choose(self.view.performance, workload, models, current, key)
        else:
            chain = (self.scheduler.target,)
            reason = self.view.resting
            decision = ChainDecision(chain=chain, shape=DraftShape(), reason=reason, rests=True)
        if before is None:
            self._forget_unused()
        cycle = self.view.cycle
        since = cycle if before is None else before.since
        self.in_use[key] = InUse(decision, count, others, cycle, since)
        is_same = current is not None and (
            (*decision.route, decision.rests) == (*current.route, current.rests)
        )
        if not is_same:
            kept = replace(decision, grids={})  # large, and not part of the record
            able = tuple(sorted(models.available))
            self.records.append(
                DecisionRecord(
                    cycle=cycle,
                    unix_s=0.0,
                    requests=len(requests),
                    decision=kept,
                    asked=key,
                    available=able,
                )
            )
        return decision

    def _forget_unused(self) -> None:
        """Drop the decisions that were due and were not made anew, since they are not in use.

        Keys are what callers ask for, so there may be many, and each holds its predictions.
        """
        oldest = self.view.cycle - INTERVAL
        self.in_use = {
            key: one for key, one in self.in_use.items() if key == SCHEDULED or one.cycle >= oldest
        }

    def _is_due(self, in_use: InUse, requests: int, others: int, models: ModelNames) -> bool:
        cycle = self.view.cycle
        if in_use.decision.rests != (self.view.resting is not None):
            return True
        if self.scheduler.policy.decides_every_cycle:
            return True
        if not self.scheduler.may_use(in_use.decision.chain, models):
            return True
        if in_use.cycle <= self.view.standing.evaluated_at < cycle:
            return True
        eager = max(_EAGER_INTERVAL, (cycle - in_use.since) // _EAGER_SHARE)
        if cycle - in_use.cycle >= min(eager, INTERVAL):
            return True
        before = in_use.requests
        return _differ(requests, before) or _differ(requests + others, before + in_use.others)


def _differ(load: int, before: int) -> bool:
    return max(load, before) > _OTHER_LOAD * min(load, before)


def put_away(standing: Standing) -> Standing:
    """Return the decisions without their predictions, for the time that another policy routes.

    All of them are due when this policy routes again.
    """
    kept = {
        key: replace(
            in_use, decision=replace(in_use.decision, grids={}), cycle=in_use.cycle - INTERVAL
        )
        for key, in_use in standing.in_use.items()
    }
    return Standing(kept)


def workload_of(requests: RequestTable, with_lags: bool = True) -> Workload:
    """Return the workload of these requests; its slots are their mean."""
    count = len(requests)
    if not count:
        return Workload(requests=0, slots=CONTEXT_STEP, remaining=0.0)
    lags = requests.unread_by if with_lags else {}
    return Workload(
        requests=count,
        slots=round(int(requests.slots.sum()) / count),
        remaining=int(requests.remaining.sum()) / count,
        lags={name: float(np.maximum(lag - 1, 0).sum()) for name, lag in lags.items()},
        sampled=2 * int(requests.sampled.sum()) >= count,
    )
