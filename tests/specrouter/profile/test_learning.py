"""What a cycle teaches, and what it says nothing of."""

from typing import Any

import numpy as np
import pytest

from specrouter.cycle import (
    ChainGroup,
    Commit,
    CyclePlan,
    CycleResult,
    DraftShape,
    Ints,
    ModelFailure,
    Option,
)
from specrouter.profile.learning import learn_cycle

PAIR = ("small", "big")
NOBODY = np.zeros(0, dtype=np.int64)
PREDICTED = Option(
    chain=PAIR, shape=DraftShape(4), cycle_ms=30.0, tokens=2.5, plain_ms=28.0, plain_tokens=2.0
)


class Profile:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.cycles: list[tuple[Any, ...]] = []
        self.outcomes: list[tuple[Any, ...]] = []

    def record_cycle(self, *told: Any) -> None:
        self.cycles.append(told)

    def record_outcome(self, *told: Any) -> None:
        self.outcomes.append(told)


def group(*rows: int, chain: tuple[str, ...] = PAIR, predicted: Option | None = PREDICTED) -> Any:
    return ChainGroup(chain=chain, shape=DraftShape(4), rows=np.array(rows), predicted=predicted)


def commits(*lengths: int) -> list[Commit]:
    return [Commit(row=row, tokens=[7] * length, chain=PAIR) for row, length in enumerate(lengths)]


def learned(result: CycleResult, *groups: ChainGroup, reads: Ints = NOBODY) -> Profile:
    """`reads`: rows of which the cycle reads 16 tokens of their prompts each."""
    profile: Any = Profile()
    plan = CyclePlan(groups=groups, prefill_rows=reads, prefill_counts=np.full_like(reads, 16))
    learn_cycle(profile, plan, result, 32.0)
    assert isinstance(profile, Profile)
    return profile


def test_a_regular_cycle_tells_its_time_and_the_tokens_beyond_the_targets_own() -> None:
    seen = learned(CycleResult(commits=commits(3, 2)), group(0, 1))
    assert seen.cycles == [(32.0, 5, 2, "drafting")]
    assert seen.outcomes == [(PAIR, 2, 28.0, 32.0, 2.0, 3.0, True)]


FAILED = [ModelFailure("small", RuntimeError())]


@pytest.mark.parametrize(
    ("result", "reads"),
    [
        (CycleResult(commits=commits(3), is_regular=False), NOBODY),
        (CycleResult(commits=commits(3), failures=FAILED), NOBODY),
        (CycleResult(commits=commits(3)), np.array([1])),
    ],
    ids=["irregular", "a failure", "prompts beside it"],
)
def test_an_irregular_cycle_counts_and_teaches_nothing(result: CycleResult, reads: Ints) -> None:
    seen = learned(result, group(0), reads=reads)
    assert (seen.cycles, seen.outcomes) == ([(32.0, 3, 1, None)], [])


def test_after_catching_up_the_tokens_are_told_and_the_time_is_not() -> None:
    seen = learned(CycleResult(commits=commits(3), caught_up=True), group(0))
    assert seen.cycles == [(32.0, 3, 1, None)]
    assert seen.outcomes == [(PAIR, 1, 0.0, 0.0, 1.0, 2.0, True)]


def test_rows_without_a_whole_draft_are_not_counted() -> None:
    result = CycleResult(commits=commits(3, 1, 2), cut_rows={1}, behind_rows={2})
    seen = learned(result, group(0, 1, 2))
    assert seen.outcomes == [(PAIR, 3, 28.0, 32.0, 1.0, 2.0, True)]
