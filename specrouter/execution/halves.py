"""A cycle in two halves: the rows of one draft while the target verifies those of the other.

Pure: which rows are in which half, and what of the cycle's budget each has. Not here: whether a
cycle is run so, and who drafts when (`CycleDrafting`).
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

import numpy as np

from specrouter.cycle import Bools, Candidates, ChainGroup, CyclePlan, Ints, TreeSelector
from specrouter.request.params import Chain


def may_overlap(chain: Chain, devices: Callable[[str], Collection[str]]) -> bool:
    """Whether all that comes before the target's pass is computed on devices of its own.

    Args:
        devices: of a model; none of one without weights.
    """
    before = {device for name in chain[:-1] for device in devices(name)}
    return bool(before) and before.isdisjoint(devices(chain[-1]))


def halves(plan: CyclePlan, apart: Callable[[Chain], bool]) -> tuple[CyclePlan, CyclePlan] | None:
    """The plan of the rows that draft first, and of those that draft while these are verified.

    Each row is in one of them. The first has the lower rows of all groups that may draft beside the
    target, every other group, and the prompts: it makes the longer pass, while which more drafts.

    Args:
        apart: whether a chain may draft while the target verifies.

    Returns:
        None where fewer than two rows may.
    """
    rows = np.sort(np.concatenate([plan.prefill_rows[:0], *_drafting(plan, apart)]))
    if len(rows) < 2:
        return None
    middle = int(rows[len(rows) // 2])
    first, second = list[ChainGroup](), list[ChainGroup]()
    for group in plan.groups:
        is_later = (group.rows >= middle) & apart(group.chain)
        for part, own in ((first, group.rows[~is_later]), (second, group.rows[is_later])):
            if len(own):
                part.append(replace(group, rows=own))
    later = sum(len(group.rows) for group in second)
    nobody = plan.prefill_rows[:0]
    one = replace(plan, groups=first, shadow_evaluation=None)
    other = replace(one, groups=second, prefill_rows=nobody, prefill_counts=nobody)
    if plan.budget_nodes is None or plan.selector is None:
        return one, other
    share = plan.budget_nodes * later // len(rows)
    selector = plan.selector
    return (
        replace(one, selector=_beside(selector, share)),
        replace(other, selector=_beside(selector, plan.budget_nodes - share)),
    )


def _drafting(plan: CyclePlan, apart: Callable[[Chain], bool]) -> list[Ints]:
    return [group.rows for group in plan.groups if apart(group.chain)]


def _beside(selector: TreeSelector, given: int) -> TreeSelector:
    """The same, with so many nodes of its budget given to the other half."""
    return partial(_select, selector, given)


def _select(
    selector: TreeSelector, given: int, rows: Ints, candidates: Candidates, aside: int
) -> Bools:
    return selector(rows, candidates, aside + given)
