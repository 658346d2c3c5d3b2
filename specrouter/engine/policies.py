"""The policies of an engine: one plans, and each keeps what it has decided so far."""

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Protocol

from specrouter.config import EngineConfig, SchedulerConfig, TreesConfig
from specrouter.config.policies import ADMISSION_POLICIES
from specrouter.profile.speedup import SpeedupMeter
from specrouter.routing.decision_record import DecisionRecord
from specrouter.routing.decisions import put_away
from specrouter.routing.planner import Plan, Planner
from specrouter.routing.scheduler import ModelChainScheduler
from specrouter.slo.admission import Admission, AdmissionPolicy, Admit
from specrouter.slo.node_selection import NodeSelection
from specrouter.slo.tree_planner import TreePlanner, selection_of
from specrouter.view import EngineView, Standing

PolicyKey = tuple[SchedulerConfig, TreesConfig]

_RECORDS = 256  # switches that are kept of a policy


@dataclass
class Policy:
    """A planner and its state.

    `records` has the last switches, oldest first; `speedup` measures what its drafts gain.
    """

    key: PolicyKey
    planner: Planner
    standing: Standing = field(default_factory=Standing)
    records: deque[DecisionRecord] = field(default_factory=lambda: deque(maxlen=_RECORDS))
    speedup: SpeedupMeter = field(default_factory=SpeedupMeter)

    def plan(self, view: EngineView, admission: Admission) -> Plan:
        return self.planner.plan(view, admission)

    def keep(self, plan: Plan) -> None:
        """Keep the standing and the records of a plan that was run."""
        self.standing = plan.standing
        now_s = time.time() if plan.records else 0.0
        self.records.extend(replace(record, unix_s=now_s) for record in plan.records)


class Models(Protocol):
    """The models as planners see them; `names`: weakest first, the target last."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def target(self) -> str: ...

    @property
    def quoters(self) -> Collection[str]:
        """Names of the text drafters."""
        ...

    def fit_together(self, names: Collection[str]) -> bool: ...


def planner_of(
    engine: EngineConfig,
    models: Models,
    parameters: Mapping[str, int],
    key: PolicyKey,
    selection: NodeSelection | None = None,
) -> Planner:
    """Return the planner of a policy, for an engine or a simulation.

    `selection`: used instead of the one that `key` names.
    """
    config, trees = key
    strict = engine.exact == "strict"
    shapes = TreePlanner(trees, selection or selection_of(trees, config), strict)
    if shapes.branching is not None:  # trees of one size
        depth = len(shapes.branching)
        config = config.model_copy(update={"depth": depth, "width": prod(shapes.branching)})
    scheduler = ModelChainScheduler(
        config,
        models.names,
        parameters,
        models.target,
        only_paths=strict,
        whole_trees=shapes.selection.takes_whole_trees,
        quoters=models.quoters if shapes.selection.takes_quotations else (),
        fit_together=models.fit_together,
    )
    return Planner(scheduler, shapes, engine.prefill_chunk)


class PoliciesInUse:
    """The policies used so far.

    Attributes:
        current: the policy that plans.
        admits: the admission policy, which gives rows and prompt chunks.
        admission: its name.
    """

    def __init__(
        self, engine: EngineConfig, pool: Models, parameters: Mapping[str, int], key: PolicyKey
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._parameters = parameters
        self.current = Policy(key, self._planner(key))
        self._known = {key: self.current}
        self._admit(engine.admission)

    def use(self, key: PolicyKey, admission: str | None = None) -> None:
        """Use a policy from now on; `admission` None: the configured one.

        A policy that is used again makes all its decisions anew.
        """
        self._admit(admission or self._engine.admission)
        if key == self.current.key:
            return
        self.current.standing = put_away(self.current.standing)
        if key not in self._known:
            self._known[key] = Policy(key, self._planner(key))
        self.current = self._known[key]

    @property
    def preempts(self) -> bool:
        """True if admission may take rows back."""
        return self._admission.preempts

    def _admit(self, admission: str) -> None:
        self.admission = admission
        self._admission: AdmissionPolicy = ADMISSION_POLICIES.find(admission)
        self.admits: Admit = self._admission.for_engine(self._engine, self._pool.target)

    def _planner(self, key: PolicyKey) -> Planner:
        return planner_of(self._engine, self._pool, self._parameters, key)
