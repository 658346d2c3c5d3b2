"""Checks that a policy's decisions can be run; there are no other checks of them.

Contract: a decision that passes ends no request, though it may be slow. `PlanError` names the
fault. Not here: whether a decision is a good one.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from specrouter.cycle import ChainGroup, CyclePlan, Ints, Option, ShadowEvaluation
from specrouter.request.params import MAX_DEPTH, MAX_TREE_TOKENS, Chain
from specrouter.slo.admission import Admission


class PlanError(ValueError):
    """Error for a decision that cannot be run."""


@dataclass(frozen=True)
class PlanCheck:
    """Checks of admissions and plans, for the models of a pool.

    Attributes:
        models: names of the pool's models, the target included.
        draft_only: models that cannot verify.
        prompt_tokens: most prompt tokens that the target reads in a cycle.
    """

    models: Collection[str]
    target: str
    draft_only: Collection[str]
    prompt_tokens: int

    def check_admission(
        self, admission: Admission, waiting: Collection[int], running: Collection[int]
    ) -> None:
        """Raise `PlanError` for an admission that cannot be followed.

        Memory is not checked: a request that finds none keeps waiting.

        Args:
            admission: the decision to check.
            waiting: ids of the requests that may be admitted.
            running: ids of the requests that run.
        """
        _expect(isinstance(admission, Admission), "it is no Admission")
        known = {*waiting, *running}
        for named, of, what in (
            (admission.admitted, waiting, "admitted"),
            (admission.declined, waiting, "declined"),
            (admission.preempted, running, "preempted"),
            (admission.lost, running, "lost"),
        ):
            _expect(isinstance(named, tuple) and set(named) <= set(of), what, named)
            _expect(len(set(named)) == len(named), f"{what} twice", named)
        for counts, what in (
            (admission.chunks, "prompt tokens"),
            (admission.depths, "depths"),
            (dict.fromkeys(admission.paused, 0), "paused"),
        ):
            is_known = known.issuperset(counts)
            _expect(is_known and all(map(_is_count, counts.values())), what, counts)
        ranks = admission.ranks
        are_ranks = known.issuperset(ranks) and all(map(_is_number, ranks.values()))
        _expect(are_ranks, "ranks", ranks)
        tokens = sum(admission.chunks.values())
        _expect(tokens <= self.prompt_tokens, "prompt tokens", tokens)
        nodes, budget_ms = admission.budget_nodes, admission.budget_ms
        _expect(nodes is None or _is_count(nodes), "a budget of nodes", nodes)
        is_time = budget_ms is None or (_is_number(budget_ms) and budget_ms > 0.0)
        _expect(is_time, "a budget of time", budget_ms)

    def check_plan(self, plan: CyclePlan, left: Mapping[int, int]) -> None:
        """Raise `PlanError` for a plan that cannot be run; `left`: see `CyclePlanning.plan`."""
        _expect(isinstance(plan, CyclePlan), "it is no CyclePlan")
        for group in plan.groups:
            self._check_group(group)
        rows, counts = _ascending(plan.prefill_rows), plan.prefill_counts
        _expect(counts.shape == rows.shape and counts.dtype == np.int64, "counts of chunks")
        planned = plan.rows
        _expect(bool(planned), "no rows")
        _expect(len(set(planned)) == len(planned), "a row twice")
        _expect(left.keys() >= set(planned), "a row that does not run")
        chunks = dict(zip(rows.tolist(), counts.tolist(), strict=True))
        _expect(all(0 < each <= left[row] for row, each in chunks.items()), "chunks", chunks)
        first = [left[row] + 1 for row in planned if row not in chunks and left[row]]
        tokens = sum(chunks.values()) + sum(first)
        _expect(tokens <= self.prompt_tokens, "prompt tokens", tokens)
        budget = plan.budget_nodes
        _expect(budget is None or _is_count(budget), "a budget of nodes", budget)
        if plan.shadow_evaluation is not None:
            self._check_evaluation(plan.shadow_evaluation, left)

    def _check_group(self, group: ChainGroup) -> None:
        self._check_chain(group.chain)
        _ascending(group.rows)
        _expect(len(group.rows) > 0, "a group without rows")
        depth, width = group.shape.depth, group.shape.width
        least = 1 if len(group.chain) > 1 else 0
        _expect(_is_count(depth) and least <= depth <= MAX_DEPTH, "depth", depth)
        _expect(_is_count(width) and 1 <= width <= MAX_TREE_TOKENS, "width", width)
        _expect(depth * width <= MAX_TREE_TOKENS, "trees of", group.shape)
        if group.branching is not None:
            is_form = len(group.branching) == depth and all(map(_is_count, group.branching))
            _expect(is_form and math.prod(group.branching) == width, "form", group.branching)
        if group.predicted is not None:
            _check_prediction(group.predicted)

    def _check_chain(self, chain: Chain) -> None:
        is_known = isinstance(chain, tuple) and set(chain) <= set(self.models)
        _expect(is_known and len(set(chain)) == len(chain), "chain", chain)
        _expect(chain[-1:] == (self.target,), "chain without the target", chain)
        _expect(not set(chain[1:]) & set(self.draft_only), "a verifier without weights", chain)

    def _check_evaluation(self, evaluation: ShadowEvaluation, rows: Collection[int]) -> None:
        idle = set(self.models) - set(self.draft_only) - {self.target}
        is_possible = evaluation.model in idle and evaluation.row in rows
        _expect(is_possible and _is_count(evaluation.tokens), "evaluation", evaluation)


def _check_prediction(option: Option) -> None:
    values = (option.cycle_ms, option.tokens, option.plain_ms, option.plain_tokens)
    _expect(all(math.isfinite(each) and each >= 0.0 for each in values), "predicted", option)


def _ascending(rows: Ints) -> Ints:
    _expect(isinstance(rows, np.ndarray) and rows.dtype == np.int64, "rows are no integers")
    _expect(rows.ndim == 1 and bool((np.diff(rows) > 0).all()), "rows that do not ascend", rows)
    return rows


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float | np.number) and not math.isnan(value)


def _is_count(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return False
    return bool(value >= 0)


def _expect(holds: bool, otherwise: str, value: object = "") -> None:
    if not holds:
        raise PlanError(f"{otherwise} {value}")
