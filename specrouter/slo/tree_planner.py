"""TreePlanner: the shape of a cycle's drafts, and who picks the nodes that the target verifies.

Between a decision of the scheduler and the drafts of one cycle: what the cycle reads beside them
and what its requests still need to attain their objectives change from cycle to cycle. All that is
returned is frozen and pure (`TreeSelector`); the executor calls it once the trees are drafted.
Sources: AdaServe, sections 4.3 and 5.2; `specrouter.slo.cost_model`.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from specrouter.config import SchedulerConfig, Selection, TreesConfig
from specrouter.cycle import Candidates, TreeSelector
from specrouter.profile.prediction import Option, OptionGrid, Workload, verification_ms
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.request.params import MAX_CYCLE_NODES, MAX_TREE_TOKENS
from specrouter.slo.cost_model import choose_nodes, demanded_rates, nearness
from specrouter.slo.cycle_choice import CycleChoice, choose_cycle
from specrouter.slo.tree_selection import (
    equal_greedy,
    global_greedy,
    needed_tokens,
    slo_customized,
    whole,
)
from specrouter.slo.tree_shape import SPECINFER_TREE, ShapeBounds, adaserve_shape, adaserve_v1_shape

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
    rates: Floats  # tokens per ms that are needed, see `demanded_rates`
    near: Floats  # what such a token counts, see `nearness`

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
        rates = demanded_rates(decode_ms, decoded, remaining, tpot_ms)
        near = nearness(decoded, remaining)
        return cls(rows, decode_ms, decoded, waited, tpot_ms, rates, near)

    def at(self, rows: Ints) -> Ints:
        return np.searchsorted(self.rows, rows)

    def of(self, rows: Ints) -> "Progress":
        """Of some of the requests; `rows` ascending."""
        if len(rows) == len(self.rows):
            return self
        at = self.at(rows)
        return Progress(
            rows,
            self.decode_ms[at],
            self.decoded[at],
            self.waited[at],
            self.tpot_ms[at],
            self.rates[at],
            self.near[at],
        )


@dataclass(frozen=True, eq=False)
class CycleCost:
    """Milliseconds of the cycle by the draft nodes that the target verifies, [K + 1]."""

    ms: Floats

    def beside(self, aside: int) -> Floats:
        """The same where `aside` of the nodes are given."""
        return self.ms[min(aside, len(self.ms) - 2) :]


def default_selection(scheduler: SchedulerConfig) -> Selection:
    """Where `trees.selection` is left out: a policy with fixed trees verifies what it drafts."""
    if scheduler.nodes is not None:
        return "global-greedy"
    return "costmodel" if scheduler.policy == "adaptive" else "whole"


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
        return self.config.shape.startswith("adaserve")

    def choose(
        self,
        snapshot: PerformanceSnapshot,
        option: Option,
        grid: OptionGrid | None,
        progress: Progress,
        prompt_tokens: int,
        others: int = 0,
        reading_ms: float = 0.0,
        catch_up_ms: float = 0.0,
    ) -> CycleChoice:
        """One cycle of what was decided for many: who takes part, and the trees.

        Args:
            others: requests that decode in the same pass and have chosen for themselves.
            reading_ms, catch_up_ms: see `choose_cycle`.
            option: that was decided on.
            grid: of its chain, or, where it is the target alone, of the best other one.
        """
        everyone = np.ones(len(progress.rows), dtype=np.bool_)
        heeds = self.selection == "costmodel"
        rates = progress.rates if heeds else np.zeros_like(progress.rates)
        is_plain = not prompt_tokens and not (rates > 0.0).any()
        kept = None if len(option.chain) == 1 else option
        if self.config.shape != "costmodel" or grid is None or is_plain:
            shaped = kept and self._shaped(kept, len(everyone) + others)
            return CycleChoice(everyone, shaped, 0.0)
        if kept is None and not (rates > 0.0).any():
            return CycleChoice(everyone, None, 0.0)
        return choose_cycle(
            snapshot,
            grid,
            rates,
            progress.waited,
            prompt_tokens,
            others,
            reading_ms,
            catch_up_ms,
            near=progress.near,
        )

    def _shaped(self, option: Option, requests: int) -> Option:
        if not self.reshapes:
            return option
        depth, width = self._adaserve(option, requests)
        return replace(
            option,
            depth=depth,
            width=1 if self._only_paths else width,
            plain_ms=0.0,
        )

    def _adaserve(self, option: Option, requests: int) -> tuple[int, int]:
        config = self.config
        nodes = option.nodes or option.depth * option.width
        budget = config.budget_tokens or requests * (1 + nodes)
        if config.shape == "adaserve-v1":
            return adaserve_v1_shape(requests, budget, config.max_depth, config.max_width)
        bounds = ShapeBounds(
            budget,
            config.drafter_tokens or budget,
            config.max_depth,
            config.min_depth,
            config.max_width,
            config.c1,
            config.c2,
        )
        return adaserve_shape(requests, bounds)

    def selector(
        self, progress: Progress, cost: CycleCost, budget_nodes: int, prompt_tokens: int
    ) -> TreeSelector:
        """Who picks the nodes of this cycle; pure, and good for this cycle only.

        Args:
            budget_nodes: of all requests, for the policies that have a budget.
        """
        if self.selection == "whole":
            return lambda rows, candidates, aside: whole(candidates)
        if self.selection == "costmodel":
            return partial(self._by_cost, progress, cost, prompt_tokens)
        if self.selection == "slo":
            cycle_ms = float(cost.ms[min(budget_nodes, len(cost.ms) - 1)])
            return partial(self._by_objectives, progress, budget_nodes, cycle_ms)
        greedy = global_greedy if self.selection == "global-greedy" else equal_greedy
        return lambda rows, candidates, aside: greedy(candidates, max(0, budget_nodes - aside))

    def _by_cost(
        self,
        progress: Progress,
        cost: CycleCost,
        prompt_tokens: int,
        rows: Ints,
        candidates: Candidates,
        aside: int,
    ) -> Bools:
        at = progress.at(rows)
        return choose_nodes(
            candidates,
            progress.rates[at],
            cost.beside(aside),
            prompt_tokens,
            near=progress.near[at],
        ).chosen

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
    nodes: int = MAX_CYCLE_NODES,
) -> CycleCost:
    """The cost of a cycle of `workload.requests` judged rows, with at most `nodes` drafted ones.

    Args:
        levels_ms: of drafts and intermediates, which comes before.
        factor: that earlier outcomes and the machine's state put on the target's pass.
    """
    most = min(nodes, workload.requests * MAX_TREE_TOKENS)
    places = workload.requests + np.arange(most + 1)
    ms = verification_ms(snapshot, workload, target, places, prompt_tokens)
    return CycleCost(levels_ms + factor * np.maximum.accumulate(ms))
