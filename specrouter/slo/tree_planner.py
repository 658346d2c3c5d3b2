"""TreePlanner: the shape of a cycle's drafts, and the selector of the nodes to verify.

It works between a decision of the scheduler and the drafts of one cycle: the other work of the
cycle and what its requests still need for their objectives change from cycle to cycle. All that it
returns is frozen and pure (`TreeSelector`). The executor calls the selector once the trees are
drafted. Sources: AdaServe, sections 4.3 and 5.2; `specrouter.slo.value`.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from specrouter.config import SchedulerConfig, TreesConfig
from specrouter.config.policies import CHAIN_POLICIES, NODE_SELECTIONS
from specrouter.cycle import DraftShape, Option, TreeSelector
from specrouter.profile.cycle_times import Workload, curve_of, verification_ms
from specrouter.profile.prediction import OptionGrid
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.profile.time_curve import TimeCurve
from specrouter.request.params import MAX_TREE_TOKENS
from specrouter.slo.cycle_shape import Beside, CycleChoice, choose_cycle
from specrouter.slo.node_selection import NodeSelection
from specrouter.slo.tree_selection import CycleCost
from specrouter.view import RequestTable

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def selection_of(trees: TreesConfig, scheduler: SchedulerConfig) -> NodeSelection:
    """Return the configured selection.

    The default is that of the chain policy, or `global-greedy` where a number of nodes is
    configured.
    """
    default: str = CHAIN_POLICIES.find(scheduler.policy).default_selection
    if scheduler.nodes is not None:
        default = "global-greedy"
    selection: NodeSelection = NODE_SELECTIONS.find(trees.selection or default)
    return selection


class TreePlanner:
    """The planner of trees for one configuration and selection.

    Args:
        config: the section `trees`.
        selection: the policy for nodes.
        only_paths: trees of width 1 (`engine.exact: strict`).
    """

    def __init__(
        self, config: TreesConfig, selection: NodeSelection, only_paths: bool = False
    ) -> None:
        self.config = config
        self._only_paths = only_paths
        self.selection = selection

    @property
    def branching(self) -> tuple[int, ...] | None:
        return None if self._only_paths else self.selection.branching

    def choose(
        self,
        snapshot: PerformanceSnapshot,
        option: Option,
        grid: OptionGrid | None,
        rates: Floats,
        waited: Ints,
        beside: Beside,
    ) -> CycleChoice:
        """Choose which requests take part in one cycle, and their trees.

        Args:
            snapshot: measured times and outcomes.
            option: the option that was decided on for many cycles.
            grid: grid of its chain, or, if it is the target alone, of the best other chain.
            rates: [B] tokens per millisecond that the requests need, see `needed_rates`.
            waited: [B] cycles in a row that each has sat out.
            beside: the other work of the cycle.
        """
        everyone = np.ones(len(rates), dtype=np.bool_)
        kept = None if len(option.chain) == 1 else option
        if grid is None or not self.selection.plans_cycles or not (rates > 0.0).any():
            shaped = kept and self._shaped(snapshot, kept, len(everyone) + beside.others)
            return CycleChoice(everyone, shaped)
        return choose_cycle(snapshot, grid, rates, waited, beside)

    def _shaped(self, snapshot: PerformanceSnapshot, option: Option, requests: int) -> Option:
        if not self.selection.reshapes:
            return option
        target = curve_of(snapshot, option.chain[-1], option.chain[-1])
        found = self.selection.shape(option.shape, target, requests, self.config.budget_tokens)
        width = 1 if self._only_paths else found.width
        shape = DraftShape(found.depth, width, option.shape.nodes)
        return replace(option, shape=shape, plain_ms=0.0)

    def selector(self, requests: RequestTable, cost: CycleCost, budget_nodes: int) -> TreeSelector:
        """Return the function that picks the nodes of this cycle; see `NodeSelection.selector`."""
        return self.selection.selector(requests, cost, budget_nodes)


def cycle_cost(
    snapshot: PerformanceSnapshot,
    workload: Workload,
    target: str,
    levels_ms: float,
    prompt_tokens: int,
    factor: float,
) -> CycleCost:
    """Return the cost of a cycle of `workload.requests` verified rows, by its draft nodes.

    Args:
        snapshot: measured times.
        workload: the requests that take part.
        target: name of the target.
        levels_ms: time of drafters and intermediates before the target's pass.
        prompt_tokens: prompt tokens that the target reads in its pass.
        factor: correction of the target's pass by earlier outcomes and the machine's state.
    """
    places = workload.requests + np.arange(workload.requests * MAX_TREE_TOKENS + 1)
    ms = np.maximum.accumulate(verification_ms(snapshot, workload, target, places, prompt_tokens))
    filled = _filled(curve_of(snapshot, target, target), places + prompt_tokens)
    prompt_ms = 0.0
    if prompt_tokens:
        plain_ms = verification_ms(snapshot, workload, target, places[:1])
        prompt_ms = max(0.0, float(ms[0] - plain_ms[0]))
    target_ms = factor * (ms - prompt_ms)
    return CycleCost(levels_ms + target_ms, factor * prompt_ms, levels_ms, filled)


def _filled(target: TimeCurve, tokens: Ints) -> Ints | None:
    """Return the nodes [K + 1] of a pass that is filled up, by nodes; None if no pass is.

    `tokens` are those of the passes with 0 to K nodes.
    """
    room = target.filled(tokens) - tokens
    return np.arange(len(tokens)) + room if room.any() else None
