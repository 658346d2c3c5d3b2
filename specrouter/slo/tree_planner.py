"""TreePlanner: the shape of a cycle's drafts, and who picks the nodes that the target verifies.

Between a decision of the scheduler and the drafts of one cycle: what the cycle reads beside them
and what its requests still need to attain their objectives change from cycle to cycle. All that is
returned is frozen and pure (`TreeSelector`); the executor calls it once the trees are drafted.
Sources: AdaServe, sections 4.3 and 5.2; `specrouter.slo.value`.
"""

from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from specrouter.config import SchedulerConfig, Selection, TreesConfig
from specrouter.cycle import Candidates, DraftShape, Option, TreeSelector
from specrouter.profile.cycle_times import Workload, curve_of, verification_ms
from specrouter.profile.prediction import OptionGrid
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.profile.time_curve import ForwardTimes
from specrouter.request.params import MAX_TREE_TOKENS
from specrouter.slo.cycle_shape import Beside, CycleChoice, choose_cycle
from specrouter.slo.tree_selection import (
    CycleCost,
    equal_greedy,
    global_greedy,
    most_valuable,
    needed_tokens,
    slo_customized,
    whole,
)
from specrouter.slo.tree_shape import SPECINFER_TREE, adaserve_shape
from specrouter.slo.value import needed_rates

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Progress:
    """How far the decoding requests have come, and what they have to attain, [B] each."""

    rows: Ints  # ascending
    decode_ms: Floats  # since the first token
    decoded: Ints  # tokens after the first
    waited: Ints  # cycles in a row that they have sat out
    tpot_ms: Floats  # NaN without an objective
    rates: Floats  # tokens per ms that are needed, see `needed_rates`

    @classmethod
    def made(
        cls,
        rows: Ints,
        decode_ms: Floats,
        decoded: Ints,
        remaining: Ints,
        waited: Ints,
        tpot_ms: Floats,
    ) -> "Progress":
        """With the rates that follow. `remaining`: tokens that each may still gain."""
        rates = needed_rates(decode_ms, decoded, remaining, tpot_ms)
        return cls(rows, decode_ms, decoded, waited, tpot_ms, rates)

    def at(self, rows: Ints) -> Ints:
        return np.searchsorted(self.rows, rows)

    def of(self, rows: Ints) -> "Progress":
        """Of some of the requests; `rows` ascending."""
        if len(rows) == len(self.rows):
            return self
        at = self.at(rows)
        return Progress(*(getattr(self, one.name)[at] for one in fields(self)))


def default_selection(scheduler: SchedulerConfig) -> Selection:
    """Where `trees.selection` is left out: a policy with fixed trees verifies what it drafts."""
    if scheduler.nodes is not None:
        return "global-greedy"
    return "goodput" if scheduler.policy == "adaptive" else "whole"


class TreePlanner:
    """Of one configuration and policy.

    Args:
        selection: what is meant where the configuration leaves it out.
        only_paths: trees of width 1 (`engine.exact: strict`).
    """

    def __init__(self, config: TreesConfig, selection: Selection, only_paths: bool = False) -> None:
        self.config = config
        self._only_paths = only_paths
        self.selection: Selection = config.selection or selection

    @property
    def branching(self) -> tuple[int, ...] | None:
        has_form = self.config.shape == "static" and not self._only_paths
        return SPECINFER_TREE if has_form else None

    @property
    def reshapes(self) -> bool:
        """Drafts are not of the shape that the scheduler chose and predicted."""
        return self.config.shape == "adaserve"

    def choose(
        self,
        snapshot: PerformanceSnapshot,
        option: Option,
        grid: OptionGrid | None,
        progress: Progress,
        beside: Beside,
    ) -> CycleChoice:
        """One cycle of what was decided for many: who takes part, and the trees.

        Args:
            option: that was decided on.
            grid: of its chain, or, where it is the target alone, of the best other one.
        """
        everyone = np.ones(len(progress.rows), dtype=np.bool_)
        kept = None if len(option.chain) == 1 else option
        heeds = self.selection == "goodput" and self.config.shape == "adaptive"
        if grid is None or not heeds or not (progress.rates > 0.0).any():
            shaped = kept and self._shaped(snapshot, kept, len(everyone) + beside.others)
            return CycleChoice(everyone, shaped)
        return choose_cycle(snapshot, grid, progress.rates, progress.waited, beside)

    def _shaped(self, snapshot: PerformanceSnapshot, option: Option, requests: int) -> Option:
        if not self.reshapes:
            return option
        target = curve_of(snapshot, option.chain[-1], option.chain[-1])
        depth, width = self._adaserve(target, requests)
        shape = DraftShape(depth, 1 if self._only_paths else width, option.shape.nodes)
        return replace(option, shape=shape, plain_ms=0.0)

    def _adaserve(self, target: ForwardTimes, requests: int) -> tuple[int, int]:
        """Without a configured budget, it is what a pass reads in twice the time of the roots
        alone: where reading more tokens takes as long as reading the weights."""
        budget_tokens = self.config.budget_tokens
        if budget_tokens is None:
            roof = int(min(target.tokens_within(2.0 * target.at(requests)), 1e6))
            budget_tokens = max(requests, roof)
        return adaserve_shape(requests, budget_tokens, self.config)

    def selector(self, progress: Progress, cost: CycleCost, budget_nodes: int) -> TreeSelector:
        """Who picks the nodes of this cycle; pure, and good for this cycle only.

        Args:
            budget_nodes: of all requests, for the policies that have a budget.
        """
        if self.selection == "whole":
            return lambda rows, candidates, aside: whole(candidates)
        if self.selection == "goodput":
            return partial(self._by_value, progress, cost)
        if self.selection in ("slo", "slo-phase"):
            cycle_ms = cost.whole_ms(budget_nodes)
            return partial(self._by_objectives, progress, budget_nodes, cycle_ms)
        greedy = global_greedy if self.selection == "global-greedy" else equal_greedy
        return lambda rows, candidates, aside: greedy(candidates, max(0, budget_nodes - aside))

    def _by_value(
        self, progress: Progress, cost: CycleCost, rows: Ints, candidates: Candidates, aside: int
    ) -> Bools:
        return most_valuable(candidates, progress.rates[progress.at(rows)], cost.beside(aside))

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
            fills=self.selection == "slo",
        )


def cycle_cost(
    snapshot: PerformanceSnapshot,
    workload: Workload,
    target: str,
    levels_ms: float,
    prompt_tokens: int,
    factor: float,
) -> CycleCost:
    """The cost of a cycle of `workload.requests` verified rows, with any number of draft nodes.

    Args:
        levels_ms: of drafts and intermediates, which comes before.
        factor: that earlier outcomes and the machine's state put on the target's pass.
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


def _filled(target: ForwardTimes, tokens: Ints) -> Ints | None:
    """[K + 1] nodes of a pass of so many `tokens`, by nodes, once it is filled up; None where no
    pass is."""
    room = target.filled(tokens) - tokens
    return np.arange(len(tokens)) + room if room.any() else None
