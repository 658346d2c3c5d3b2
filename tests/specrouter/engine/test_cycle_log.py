"""Where the time of the last cycles went: each model's part, by what it did there."""

import numpy as np

from specrouter.cycle import ChainGroup, Commit, CyclePlan, CycleResult, DraftShape
from specrouter.engine.cycle_log import _CYCLES, CycleLog
from specrouter.request.params import Chain

NOBODY = np.zeros(0, dtype=np.int64)


def plan(*chains: Chain) -> CyclePlan:
    groups = [ChainGroup(chain=chain, shape=DraftShape(1), rows=NOBODY) for chain in chains]
    return CyclePlan(groups=groups, prefill_rows=NOBODY, prefill_counts=NOBODY)


def test_a_models_time_is_a_draft_or_a_second_score_by_the_chains_of_its_cycle() -> None:
    log = CycleLog("t")
    log.note(plan(), CycleResult(), 1.0, {"t": 5.0})
    commits = [Commit(row=row, tokens=[1] * (row + 1), chain=("a", "t")) for row in range(2)]
    result = CycleResult(commits=commits)
    log.note(plan(("a", "b", "t"), ("t",)), result, 10.0, {"t": 9.0, "a": 1.0, "b": 2.0})
    log.note(plan(("b", "t")), CycleResult(), 8.0, {"t": 12.0, "a": 1.0, "b": 4.5})
    first, second = log.last()
    assert (first.chain, first.elapsed_ms) == (("a", "b", "t"), 10.0)
    assert (first.draft_ms, first.rescore_ms, first.verify_ms) == (1.0, 2.0, 4.0)
    assert (first.requests, first.tokens) == (2, 3)
    assert (second.draft_ms, second.rescore_ms, second.verify_ms) == (2.5, 0.0, 3.0)


def test_the_first_cycle_has_none_to_be_compared_with_and_old_ones_are_forgotten() -> None:
    log = CycleLog("t")
    assert log.last() == []
    for number in range(_CYCLES + 10):
        log.note(plan(("t",)), CycleResult(), 1.0, {"t": float(number)})
    assert len(log.last()) == _CYCLES
    assert {one.verify_ms for one in log.last()} == {1.0}
