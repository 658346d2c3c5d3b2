"""Whether batches can give requests what they need in time, and what is left after one."""

import numpy as np

from research.policies.autoregressive import leaves_nobody_late
from research.sim.roofline import RooflineTime
from specrouter.slo.serve.load import Load, Prompt, tier_of, tiers_of

SIX_A_UNIT = RooflineTime(((1.0 / 6.0, 0.0, 0.0),))
THREE = Load(
    ids=(1, 2, 3), due_ms=np.ones(3), tpot_ms=np.ones(3), left=np.full(3, 90.0), prompts=()
)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(id=10 + n, deadline_ms=6.0, tokens=6, tpot_ms=1.0) for n in range(count)]


def test_three_prompts_of_figure_3_are_in_time_and_a_fourth_is_not() -> None:
    assert leaves_nobody_late(THREE.joined(prompts(3)), SIX_A_UNIT, 1.0)
    assert not leaves_nobody_late(THREE.joined(prompts(4)), SIX_A_UNIT, 1.0)


def test_a_batch_takes_from_what_is_due_and_what_is_left() -> None:
    load = THREE.joined(prompts(2))
    after = load.after(1.0, np.array([True, True, False]), [6, 2])
    assert after.ids == (1, 2, 3, 10)
    assert after.due_ms.tolist() == [1.0, 1.0, 0.0, 1.0]
    assert [(each.deadline_ms, each.tokens) for each in after.prompts] == [(5.0, 4)]


def test_no_tier_is_looser_than_those_that_it_stands_for() -> None:
    paces = [20.0, 35.0, 50.0, 80.0, 100.0, float("inf")]
    tiers = tiers_of(paces)
    assert len(tiers) <= 4
    assert all(tiers[int(tier_of(tiers, pace))] <= pace for pace in paces)
    assert tiers_of([50.0, 100.0]) == (50.0, 100.0)
