"""TreePlanner: the shape of a cycle's drafts, and who picks the nodes that the target verifies.

Between a decision of the scheduler and the drafts of one cycle: what the cycle reads beside them
and what its requests still need to attain their objectives change from cycle to cycle. All that is
returned is frozen and pure (`TreeSelector`); the executor calls it once the trees are drafted.
Sources: AdaServe, sections 4.3 and 5.2; `specrouter.cost_model`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from specrouter.config import SchedulerConfig, Selection, TreesConfig
from specrouter.cost_model import MAX_NODES, choose_nodes, is_hopeless
from specrouter.params import MAX_TREE_TOKENS
from specrouter.prediction import (
    CycleLoad,
    Option,
    OptionGrid,
    PerformanceSnapshot,
    Workload,
    attained_alone,
    verification_ms,
)
from specrouter.tree_selection import (
    Candidates,
    equal_greedy,
    global_greedy,
    needed_tokens,
    slo_customized,
    whole,
)
from specrouter.tree_shape import SPECINFER_TREE, ShapeBounds, adaserve_shape, adaserve_v1_shape

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_FASTER = 1.03  # by which a chain must serve objectives better than none to be used for them alone


@dataclass(frozen=True, eq=False)
class Progress:
    """How far the decoding requests have come, and what they have to attain, [B] each."""

    rows: Ints  # ascending
    decode_ms: Floats  # since the first token
    decoded: Ints  # tokens after the first
    remaining: Ints  # tokens that may still come
    tpot_ms: Floats  # NaN without an objective
    rates: Floats  # tokens per ms that are needed, see `demanded_rates`

    def at(self, rows: Ints) -> Ints:
        return np.searchsorted(self.rows, rows)


@dataclass(frozen=True, eq=False)
class CycleCost:
    """Milliseconds of the cycle by the draft nodes that the target verifies, [K + 1]."""

    ms: Floats

    def beside(self, aside: int) -> Floats:
        """The same where `aside` of the nodes are given."""
        return self.ms[min(aside, len(self.ms) - 2) :]


Picker = Callable[[Ints, Candidates, int], Bools]


@dataclass(frozen=True, eq=False)
class Selector:
    """A `TreeSelector`, as the executor has it."""

    pick: Picker

    def select(self, rows: Ints, candidates: Candidates, aside: int) -> Bools:
        return self.pick(rows, candidates, aside)


def default_selection(scheduler: SchedulerConfig) -> Selection:
    """Where `trees.selection` is left out: a policy with fixed trees verifies what it drafts."""
    if scheduler.nodes is not None:
        return "global-greedy"
    return "costmodel" if scheduler.policy == "adaptive" else "whole"


class TreePlanner:
    """Of one configuration and policy.

    Args:
        selection: what is meant where the configuration leaves it out.
    """

    def __init__(self, config: TreesConfig, selection: Selection) -> None:
        self.config = config
        self.selection: Selection = config.selection or selection

    @property
    def branching(self) -> tuple[int, ...] | None:
        return SPECINFER_TREE if self.config.shape == "static" else None

    def load(self, progress: Progress, cycle_ms: float, prompt_tokens: int) -> CycleLoad:
        """What a cycle has to do, of which the shape of its trees depends.

        Args:
            cycle_ms: of a cycle without drafts.
        """
        count = len(progress.rows)
        if self.selection != "costmodel":
            return CycleLoad(count, prompt_tokens)
        needed = progress.rates * cycle_ms
        lost = is_hopeless(needed, np.full(count, 1.0 + self.config.max_width))
        urgent = (needed > 1.0) & ~lost
        relaxed = ~urgent & ~lost
        return CycleLoad(
            count,
            prompt_tokens,
            int(urgent.sum()),
            _mean(progress.rates[urgent]),
            _mean(progress.rates[relaxed]),
        )

    def shape(self, option: Option, grid: OptionGrid | None, load: CycleLoad) -> Option:
        """The option for one cycle of what was decided for many."""
        if len(option.chain) == 1 or self.config.shape in ("fixed", "static"):
            return option
        if self.config.shape == "costmodel":
            is_steady = not load.other_tokens and not load.urgent
            return option if grid is None or is_steady else grid.for_cycle(load)[1]
        depth, width = self._adaserve(option, load)
        return replace(option, depth=depth, width=width, plain_ms=0.0)

    def for_objectives(
        self, alone: Option, grid: OptionGrid | None, load: CycleLoad
    ) -> Option | None:
        """A chain that is no faster for all, but brings more tokens in time, if it does."""
        if grid is None or not load.urgent or self.config.shape != "costmodel":
            return None
        rate, option = grid.for_cycle(load)
        return option if rate > _FASTER * attained_alone(alone.cycle_ms, load) else None

    def _adaserve(self, option: Option, load: CycleLoad) -> tuple[int, int]:
        config = self.config
        nodes = option.nodes or option.depth * option.width
        budget = config.budget_tokens or load.requests * (1 + nodes)
        if config.shape == "adaserve-v1":
            return adaserve_v1_shape(load.requests, budget, config.max_depth, config.max_width)
        bounds = ShapeBounds(
            budget,
            config.drafter_tokens or budget,
            config.max_depth,
            config.min_depth,
            config.max_width,
            config.c1,
            config.c2,
        )
        return adaserve_shape(load.requests, bounds)

    def selector(self, progress: Progress, cost: CycleCost, budget_nodes: int) -> Selector:
        """Who picks the nodes of this cycle.

        Args:
            budget_nodes: of all requests, for the policies that have a budget.
        """
        if self.selection == "whole":
            return Selector(lambda rows, candidates, aside: whole(candidates))
        if self.selection == "costmodel":
            return Selector(partial(self._by_cost, progress, cost))
        if self.selection == "slo":
            cycle_ms = float(cost.ms[min(budget_nodes, len(cost.ms) - 1)])
            return Selector(partial(self._by_objectives, progress, budget_nodes, cycle_ms))
        greedy = global_greedy if self.selection == "global-greedy" else equal_greedy
        return Selector(
            lambda rows, candidates, aside: greedy(candidates, max(0, budget_nodes - aside))
        )

    def _by_cost(
        self, progress: Progress, cost: CycleCost, rows: Ints, candidates: Candidates, aside: int
    ) -> Bools:
        rates = progress.rates[progress.at(rows)]
        return choose_nodes(candidates, rates, cost.beside(aside)).chosen

    def _by_objectives(
        self,
        progress: Progress,
        budget_nodes: int,
        cycle_ms: float,
        rows: Ints,
        candidates: Candidates,
        aside: int,
    ) -> Bools:
        config, at = self.config, progress.at(rows)
        needs = needed_tokens(
            progress.decode_ms[at],
            progress.decoded[at],
            progress.tpot_ms[at],
            cycle_ms,
            config.latency_margin,
        )
        share = (len(rows) + budget_nodes) / len(rows)  # a tree's root counts in it
        return slo_customized(
            candidates,
            needs,
            max(0, budget_nodes - aside),
            round(config.n_max_share * share),
            int(candidates.depths.max(initial=0)),
            config.root_credit,
            config.order,
        )


def cycle_cost(
    snapshot: PerformanceSnapshot,
    workload: Workload,
    target: str,
    levels_ms: float,
    prompt_tokens: int,
    factor: float,
) -> CycleCost:
    """The cost of a cycle of `workload.requests` judged rows.

    Args:
        levels_ms: of drafts and intermediates, which comes before.
        factor: that earlier outcomes and the machine's state put on the target's pass.
    """
    most = min(MAX_NODES, workload.requests * MAX_TREE_TOKENS)
    places = workload.requests + np.arange(most + 1)
    ms = verification_ms(snapshot, workload, target, places, prompt_tokens)
    return CycleCost(levels_ms + factor * np.maximum.accumulate(ms))


def _mean(rates: Floats) -> float:
    finite = rates[np.isfinite(rates)]
    return float(finite.mean()) if len(finite) else 0.0
