"""Two halves of a cycle hold each row once, and keep within its budget together."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrouter.cycle import (
    Bools,
    Candidates,
    ChainGroup,
    CyclePlan,
    DraftShape,
    Ints,
    TreeSelector,
)
from specrouter.execution.halves import halves, may_overlap
from specrouter.request.params import Chain

CHAINS: list[Chain] = [("target",), ("near", "target"), ("far", "target"), ("far", "mid", "target")]
DEVICES = {"near": ("a",), "far": ("b",), "mid": ("c",), "ngram": (), "target": ("a", "d")}


def is_apart(chain: Chain) -> bool:
    return "far" in chain


@st.composite
def plans(draw: st.DrawFn) -> CyclePlan:
    kinds = draw(st.lists(st.integers(-1, len(CHAINS) - 1), min_size=1, max_size=12))
    groups = []
    for number, chain in enumerate(CHAINS):
        rows = np.array([row for row, kind in enumerate(kinds) if kind == number], dtype=np.int64)
        if len(rows):
            groups.append(ChainGroup(chain=chain, shape=DraftShape(3, 2), rows=rows, whole=False))
    prompts = np.array([row for row, kind in enumerate(kinds) if kind < 0], dtype=np.int64)
    budget = draw(st.none() | st.integers(0, 40))
    return CyclePlan(
        groups=groups,
        prefill_rows=prompts,
        prefill_counts=prompts + 1,
        selector=_whole_budget(budget),
        budget_nodes=budget,
    )


def _whole_budget(budget: int | None) -> TreeSelector:
    def select(rows: Ints, candidates: Candidates, aside: int) -> Bools:
        left = max(0, (budget or 0) - aside)
        each = np.minimum(left // max(1, len(rows)), candidates.counts)
        return candidates.best(each)

    return select


@given(plans())
def test_each_row_and_prompt_is_in_one_half(plan: CyclePlan) -> None:
    found = halves(plan, is_apart)
    drafting = [row for group in plan.groups if is_apart(group.chain) for row in group.rows]
    if len(drafting) < 2:
        assert found is None
        return
    assert found is not None
    first, second = found
    assert sorted(first.rows + second.rows) == sorted(plan.rows)
    assert all(is_apart(group.chain) for group in second.groups)
    assert not len(second.prefill_rows)
    assert first.prefill_counts.tolist() == plan.prefill_counts.tolist()
    later = [row for group in second.groups for row in group.rows]
    earlier = sorted(set(drafting) - set(later))
    assert len(later) - len(earlier) in (0, 1)
    assert max(earlier) < min(later), "rows that stand together are attended together"
    for part in found:
        for group in part.groups:
            assert len(group.rows)
            assert (np.diff(group.rows) > 0).all()
            [whole] = [one for one in plan.groups if one.chain == group.chain]
            assert set(group.rows) <= set(whole.rows)


@given(plans())
def test_the_halves_take_no_more_than_the_cycles_budget(plan: CyclePlan) -> None:
    found = halves(plan, is_apart)
    if found is None or plan.budget_nodes is None:
        return
    taken = 0
    for part in found:
        rows = np.array(sorted(row for group in part.groups for row in group.rows))
        worth = np.linspace(0.9, 0.1, 8)[None].repeat(len(rows), axis=0)
        depths = np.tile(np.repeat([1, 2, 3, 4], 2), (len(rows), 1))
        assert part.selector is not None
        if len(rows):
            taken += int(part.selector(rows, Candidates(worth, depths), 0).sum())
    assert taken <= plan.budget_nodes


@pytest.mark.parametrize(
    ("chain", "overlaps"),
    [
        (("target",), False),
        (("near", "target"), False),
        (("far", "target"), True),
        (("far", "mid", "target"), True),
        (("far", "near", "target"), False),
        (("ngram", "target"), False),
        (("ngram", "mid", "target"), True),
    ],
)
def test_models_before_the_target_need_devices_of_their_own(chain: Chain, overlaps: bool) -> None:
    assert may_overlap(chain, DEVICES.__getitem__) is overlaps
