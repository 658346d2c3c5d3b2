"""Plans that make no sense are refused, whatever is wrong with them; sound ones pass."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from research.policies.adaserve import SPECINFER_TREE
from specrouter.cycle import ChainGroup, CyclePlan, DraftShape, Option, ShadowEvaluation
from specrouter.engine.plan_check import PlanCheck, PlanError
from specrouter.engine.planning import target_alone
from specrouter.request.params import MAX_DEPTH
from specrouter.slo.admission import Admission

CHECK = PlanCheck(("ngram", "small", "middle", "big"), "big", {"ngram"}, prompt_tokens=32)
LEFT = {0: 0, 1: 0, 2: 5, 3: 100}  # rows 0 and 1 decode, 2 and 3 read their prompts
PREDICTED = Option(chain=("small", "big"), shape=DraftShape(4, 2), cycle_ms=30.0, tokens=2.0)
GROUP = ChainGroup(
    chain=("small", "big"), shape=DraftShape(4, 2), rows=np.array([0]), predicted=PREDICTED
)


def rows(*values: int) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def group(**changes: Any) -> ChainGroup:
    return dataclasses.replace(GROUP, **changes)


def plan(*groups: ChainGroup, **changes: Any) -> CyclePlan:
    return CyclePlan(
        **{"groups": groups, "prefill_rows": rows(), "prefill_counts": rows()} | changes
    )


SOUND = {
    "a chain": plan(group()),
    "one that begins without weights": plan(group(chain=("ngram", "small", "big"))),
    "several groups": plan(group(), group(chain=("big",), rows=rows(1), predicted=None)),
    "nobody drafts": plan(group(chain=("big",), shape=DraftShape(), predicted=None)),
    "a tree of a fixed form": plan(
        group(shape=DraftShape(len(SPECINFER_TREE), 3), branching=SPECINFER_TREE)
    ),
    "a first token": plan(group(chain=("big",), rows=rows(0, 2))),
    "chunks": plan(prefill_rows=rows(2, 3), prefill_counts=rows(5, 27)),
    "an evaluation": plan(group(), shadow_evaluation=ShadowEvaluation("middle", 1, 8)),
    "a budget": plan(group(), budget_nodes=0),
}
SENSELESS = {
    "nothing at all": None,
    "nobody": plan(),
    "an unknown model": plan(group(chain=("tiny", "big"))),
    "another target": plan(group(chain=("small", "middle"))),
    "an empty chain": plan(group(chain=())),
    "no chain": plan(group(chain=math.nan)),
    "a model twice": plan(group(chain=("small", "small", "big"))),
    "a verifier without weights": plan(group(chain=("small", "ngram", "big"))),
    "a depth of NaN": plan(group(shape=DraftShape(math.nan, 2))),  # type: ignore[arg-type]
    "a negative depth": plan(group(shape=DraftShape(-1, 2))),
    "no depth": plan(group(shape=DraftShape(0, 2))),
    "trees that are too deep": plan(group(shape=DraftShape(MAX_DEPTH + 1, 1))),
    "trees that are too wide": plan(group(shape=DraftShape(9, 8))),
    "no width": plan(group(shape=DraftShape(4, 0))),
    "a form of another size": plan(group(shape=DraftShape(8, 4), branching=SPECINFER_TREE)),
    "a form of too many nodes": plan(group(shape=DraftShape(3, 64), branching=(64, 1, 1))),
    "rows that do not run": plan(group(rows=rows(0, 7))),
    "rows that do not ascend": plan(group(rows=rows(1, 0))),
    "a row twice": plan(group(rows=rows(0)), group(rows=rows(0, 1))),
    "rows that are no integers": plan(group(rows=np.array([0.0]))),
    "no rows": plan(group(rows=rows())),
    "a prediction of NaN": plan(group(predicted=dataclasses.replace(PREDICTED, tokens=math.nan))),
    "an infinite prediction": plan(
        group(predicted=dataclasses.replace(PREDICTED, plain_ms=math.inf))
    ),
    "a negative time": plan(group(predicted=dataclasses.replace(PREDICTED, cycle_ms=-1.0))),
    "a chunk beyond the prompt": plan(prefill_rows=rows(2), prefill_counts=rows(6)),
    "a chunk of nothing": plan(prefill_rows=rows(3), prefill_counts=rows(0)),
    "a chunk of a row that decodes": plan(prefill_rows=rows(1), prefill_counts=rows(1)),
    "more prompt tokens than a cycle reads": plan(prefill_rows=rows(3), prefill_counts=rows(33)),
    "a first token behind a long prompt": plan(group(chain=("big",), rows=rows(3))),
    "fewer counts than chunks": plan(prefill_rows=rows(2, 3), prefill_counts=rows(1)),
    "a budget of NaN": plan(group(), budget_nodes=math.nan),
    "a negative budget": plan(group(), budget_nodes=-1),
    "an evaluation of the target": plan(group(), shadow_evaluation=ShadowEvaluation("big", 1, 8)),
    "an evaluation of a row that is gone": plan(
        group(), shadow_evaluation=ShadowEvaluation("middle", 9, 8)
    ),
}


@pytest.mark.parametrize("sound", SOUND.values(), ids=SOUND)
def test_sound_plans_pass(sound: CyclePlan) -> None:
    CHECK.check_plan(sound, LEFT)


@pytest.mark.parametrize("senseless", SENSELESS.values(), ids=SENSELESS)
def test_senseless_plans_are_refused(senseless: Any) -> None:
    with pytest.raises(PlanError):
        CHECK.check_plan(senseless, LEFT)


@pytest.mark.parametrize(
    "admission",
    [
        None,
        Admission(admitted=(1, 1)),
        Admission(admitted=(4,)),
        Admission(admitted=(1,), chunks={1: -1}),
        Admission(admitted=(1,), chunks={1: math.nan}),  # type: ignore[dict-item]
        Admission(admitted=(1,), chunks={1: 20, 2: 13}),
        Admission(chunks={4: 1}),
        Admission(preempted=(1,)),
        Admission(preempted=(8, 8)),
        Admission(preempted=(8, 9, 10)),
        Admission(declined=(9,)),
        Admission(declined=(2, 2)),
        Admission(paused=frozenset({4})),
        Admission(depths={8: -1}),
        Admission(depths={8: math.inf}),  # type: ignore[dict-item]
        Admission(budget_nodes=-1),
        Admission(budget_nodes=math.nan),  # type: ignore[arg-type]
        Admission(budget_ms=math.nan),
        Admission(budget_ms=0.0),
        Admission(budget_ms="1"),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_senseless_admissions_are_refused(admission: Any) -> None:
    with pytest.raises(PlanError):
        CHECK.check_admission(admission, {1, 2, 3}, {8, 9})


def test_sound_admissions_pass() -> None:
    sound = Admission(admitted=(3, 1), chunks={3: 20, 9: 12}, waits_for_memory=True)
    CHECK.check_admission(sound, {1, 2, 3}, {8, 9})
    full = Admission(
        admitted=(3,),
        chunks={3: 20},
        waits_for_memory=False,
        preempted=(8,),
        declined=(2,),
        paused=frozenset({9}),
        depths={9: 0},
        budget_nodes=0,
        budget_ms=math.inf,
    )
    CHECK.check_admission(full, {1, 2, 3}, {8, 9})


def test_the_target_alone_serves_who_decodes_and_reads_prompts_in_order() -> None:
    made = target_alone("big", {4: 0, 1: 10, 3: 100, 0: 0, 2: 7}, prompt_tokens=32)
    [group] = made.groups
    assert (group.chain, group.rows.tolist()) == (("big",), [0, 1, 4])
    assert (made.prefill_rows.tolist(), made.prefill_counts.tolist()) == ([3], [21])


@pytest.mark.parametrize("seed", range(20))
def test_the_target_alone_is_always_a_sound_plan(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 9))
    order = rng.permutation(count).tolist()
    left = {row: int(rng.choice([0, 0, 1, 31, 32, 200])) for row in order}
    made = target_alone("big", left, CHECK.prompt_tokens)
    CHECK.check_plan(made, left)
    assert {row for row in left if not left[row]} <= set(made.rows)
