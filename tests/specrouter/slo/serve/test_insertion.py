"""Who could be admitted alone, of many at once, against asking one after the other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrouter.slo.serve.admission_dp import PromptDemand, Room
from specrouter.slo.serve.insertion import fits_alone, left_at_deadlines
from specrouter.slo.serve.load import Load, Prompt
from specrouter.slo.serve.pacing import Speculative
from specrouter.slo.serve.prefill_budget import (
    AutoregressiveBudget,
    PrefillBudget,
    SpeculativeBudget,
)
from specrouter.slo.serve.program import able_alone
from tests.specrouter.slo.serve.test_admission_dp import is_feasible, left_one_by_one
from tests.specrouter.slo_machines import OPT_7B

TIERS = (50.0, 100.0)
BUDGETS: list[PrefillBudget] = [
    AutoregressiveBudget(OPT_7B, TIERS, 100.0),
    SpeculativeBudget(times=OPT_7B, tiers_ms=TIERS, alpha=0.7, idle_ms=100.0, margin=0.1),
]
Asked = list[tuple[float, int, int]]  # deadline, tokens, tier

asked = st.lists(
    st.tuples(st.floats(1.0, 900.0), st.integers(1, 1500), st.integers(0, 1)), max_size=6
)
rooms = st.builds(
    Room,
    st.tuples(st.integers(0, 200), st.integers(0, 400)),
    begin_ms=st.sampled_from([0.0, 30.0]),
    begin_tokens=st.sampled_from([0, 200]),
)


def demands(those: Asked) -> list[PromptDemand]:
    return [PromptDemand(*each) for each in sorted(those)]


@pytest.mark.parametrize("budget", BUDGETS)
@given(read=asked, room=rooms)
def test_what_is_left_at_each_deadline_is_told_for_all_at_once(
    budget: PrefillBudget, read: Asked, room: Room
) -> None:
    one_by_one = np.array(left_one_by_one(demands(read), room, budget))
    found = left_at_deadlines(demands(read), room, budget)
    assert (found >= 0.0).tolist() == (one_by_one >= 0.0).tolist()
    finite = np.isfinite(one_by_one)
    assert found[finite] == pytest.approx(one_by_one[finite], abs=1e-6)


@pytest.mark.parametrize("budget", BUDGETS)
@given(read=asked, new=asked, room=rooms)
def test_who_fits_alone_is_who_leaves_all_in_time(
    budget: PrefillBudget, read: Asked, new: Asked, room: Room
) -> None:
    for tier in (0, 1):
        those = [(ms, tokens, tier) for ms, tokens, _ in new]
        ends = np.array([each[0] for each in those])
        tokens = np.array([each[1] for each in those], dtype=np.int64)
        found = fits_alone(demands(read), room, budget, ends, tokens, tier)
        for each, fits in zip(those, found.tolist(), strict=True):
            prompts = sorted([*demands(read), PromptDemand(*each)], key=lambda one: one.deadline_ms)
            assert fits == is_feasible(prompts, room, budget)


@given(
    st.lists(st.floats(60.0, 120.0), max_size=30),
    st.lists(st.tuples(st.floats(20.0, 900.0), st.integers(1, 900)), max_size=4),
    st.lists(
        st.tuples(
            st.floats(20.0, 900.0), st.integers(1, 900), st.sampled_from([50.0, 80.0, 100.0])
        ),
        max_size=8,
    ),
)
def test_with_few_tpots_each_is_judged_as_if_it_were_asked_about_alone(
    paces: list[float], read: list[tuple[float, int]], new: list[tuple[float, int, float]]
) -> None:
    pacing = Speculative(OPT_7B, 0.7, idle_ms=100.0, margin=0.1)
    due, ids = np.array(paces, dtype=np.float64), tuple(range(len(paces)))
    prompts = tuple(
        Prompt(id=100 + n, deadline_ms=due_ms, tokens=tokens, tpot_ms=100.0)
        for n, (due_ms, tokens) in enumerate(sorted(read))
    )
    load = Load(ids=ids, due_ms=due, tpot_ms=due, left=np.full(len(due), 10.0), prompts=prompts)
    those = [
        Prompt(id=200 + n, deadline_ms=due_ms, tokens=tokens, tpot_ms=tpot_ms)
        for n, (due_ms, tokens, tpot_ms) in enumerate(new)
    ]
    found = able_alone(load, those, pacing._budget)
    alone = [each for each in those if pacing.is_in_time(load.joined([each]))]
    assert {each.id for each in found} == {each.id for each in alone}
    assert [each.deadline_ms for each in found] == sorted(each.deadline_ms for each in found)
