"""One pass of the target: whose rows are in it, what it tells, and whom a failure concerns."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from modelpool import ModelPool
from processors import VerifyProcessor
from specrouter.cycle import ChainGroup, CyclePlan, CycleResult, DraftShape
from specrouter.execution.model_comparison import ModelComparison
from specrouter.execution.target_stage import TargetStage
from tests.specrouter.execution.test_executor import PROMPTS, Bench


class Stage:
    """A pass over a bench's rows, of which nothing is committed."""

    def __init__(self, pool: ModelPool) -> None:
        self.bench = Bench(pool)
        self.comparison = ModelComparison(self.bench.runtime)
        self.stage = TargetStage(self.bench.runtime, self.comparison)
        self.result = CycleResult()

    def verify(self, rows: list[int], reads: dict[int, int] | None = None) -> Any:
        groups = (
            [ChainGroup(chain=("target",), shape=DraftShape(), rows=np.array(rows))] if rows else []
        )
        reads = reads or {}
        prompts, counts = np.array([*reads], dtype=np.int64), np.array([*reads.values()])
        plan = CyclePlan(
            groups=groups, prefill_rows=prompts, prefill_counts=counts.astype(np.int64)
        )
        with self.bench.executor.states.cycle():
            return self.stage.verify(plan, [], 1, self.result)


@pytest.fixture
def stage(pool: ModelPool) -> Iterator[Stage]:
    stage = Stage(pool)
    yield stage
    for row in range(len(PROMPTS)):
        stage.bench.executor.close(row)
    stage.bench.manager.check_integrity()


def test_a_plan_without_rows_needs_no_pass(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VerifyProcessor, "verify", lambda *_: 1 / 0)
    assert stage.verify([]) is None


def test_rows_that_decode_and_prompts_are_read_in_one_pass(stage: Stage) -> None:
    verified = stage.verify([0, 2], {1: 1})
    assert verified.tree.rows.tolist() == [0, 2]
    lag = stage.bench.executor.states.lag("target", np.arange(3))
    assert lag.tolist() == [0, 0, 0], "what was read of texts stays; nothing was committed"
    assert stage.bench.manager.counts.tolist() == [len(prompt) for prompt in PROMPTS]


def test_what_drafters_met_in_a_row_is_forgotten(stage: Stage) -> None:
    sampler = stage.bench.runtime.sampler
    for row in (0, 1):
        sampler.refuse(row, ValueError("a draft"))
    stage.verify([0])
    assert list(sampler.take_errors()) == [1]
