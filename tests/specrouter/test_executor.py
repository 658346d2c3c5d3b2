"""One cycle: what is committed is the target's choice, and every state is a prefix afterwards."""

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from modelpool import ModelPool
from modelpool.packed_model import PackedModel
from specrouter.executor import (
    ChainGroup,
    CyclePlan,
    CycleResult,
    Executor,
    TargetError,
    total_variation,
)
from specrouter.params import MAX_TREE_TOKENS, SamplingParams
from specrouter.profiler import PerformanceProfiler
from specrouter.request import Prompt
from specrouter.scheduler import Chain
from statemgr import StateManager

PROMPTS = [[5, 17, 300, 42, 9], [3, 4], [250, 1, 99]]
NOBODY = np.zeros(0, dtype=np.int64)
CHAINS: list[Chain] = [("target",), ("small", "target"), ("small", "middle", "target")]


@pytest.fixture(scope="module")
def pool(small_config: dict[str, Any]) -> ModelPool:
    return ModelPool.from_config(copy.deepcopy(small_config["pool"]))


@pytest.fixture(scope="module")
def target(small_family: dict[str, Path]) -> Any:
    return AutoModelForCausalLM.from_pretrained(str(small_family["target"]))


class Bench:
    """An executor with one row for each prompt."""

    def __init__(self, pool: ModelPool, max_new_tokens: int = 30) -> None:
        self.manager = StateManager(len(PROMPTS), 128, None, MAX_TREE_TOKENS + 16)
        self.profiler = PerformanceProfiler(dict.fromkeys(pool.names, 1))
        self.executor = Executor(pool, self.manager, self.profiler, 32, 24)
        for prompt in PROMPTS:
            row = self.manager.allocate(prompt, len(prompt) + max_new_tokens)
            assert row is not None
            params = SamplingParams(max_new_tokens, ignore_eos=True)
            self.executor.open(row, Prompt(tuple(prompt), (), params, None, seed=0))

    def cycle(
        self, chain: Chain, rows: Sequence[int] = (0, 1, 2), depth: int = 4, width: int = 1
    ) -> CycleResult:
        group = ChainGroup(chain, depth, np.array(rows, dtype=np.int64), width)
        result = self.executor.run(CyclePlan([group], NOBODY, NOBODY))
        self.manager.check_integrity()
        return result


@pytest.fixture
def bench(pool: ModelPool) -> Iterator[Bench]:
    bench = Bench(pool)
    yield bench
    for row in range(len(PROMPTS)):
        bench.executor.close(row)
    bench.manager.check_integrity()


def continuation(target: Any, prompt: list[int], count: int) -> list[int]:
    """What the target chooses, reading the whole text anew for each token."""
    text = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            text.append(int(target(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("chain", CHAINS, ids=">".join)
def test_what_is_committed_is_the_targets_choice(
    chain: Chain, width: int, bench: Bench, target: Any
) -> None:
    for _ in range(4):
        result = bench.cycle(chain, width=width)
        assert sorted(commit.row for commit in result.commits) == [0, 1, 2]
        assert all(commit.tokens and commit.chain == chain for commit in result.commits)
    for row, prompt in enumerate(PROMPTS):
        made = bench.manager.committed(row)[len(prompt) :].tolist()
        assert made == continuation(target, prompt, len(made))


def test_every_models_state_is_a_prefix_after_each_cycle(bench: Bench) -> None:
    for chain in (*CHAINS, *reversed(CHAINS)):
        bench.cycle(chain)  # asserts it
        rows = np.arange(len(PROMPTS))
        assert not bench.executor.target_lag(rows).any()
        for name in chain:
            state = bench.manager.state(name)
            assert state is not None
            assert (state.lengths(rows) < bench.manager.counts).all()


def test_groups_with_different_chains_share_a_cycle(bench: Bench, target: Any) -> None:
    groups = [
        ChainGroup(chain, 3, np.array([row], dtype=np.int64)) for row, chain in enumerate(CHAINS)
    ]
    result = bench.executor.run(CyclePlan(groups, NOBODY, NOBODY))
    bench.manager.check_integrity()
    assert {commit.row: commit.chain for commit in result.commits} == dict(enumerate(CHAINS))
    for commit in result.commits:
        expected = continuation(target, PROMPTS[commit.row], len(commit.tokens))
        assert commit.tokens == expected


def test_rows_that_are_not_planned_stay_as_they_are(bench: Bench) -> None:
    before = bench.manager.counts.copy()
    bench.cycle(("small", "target"), rows=[1])
    assert bench.manager.counts[[0, 2]].tolist() == before[[0, 2]].tolist()
    assert bench.manager.counts[1] > before[1]


def test_no_row_gains_more_than_it_may(pool: ModelPool) -> None:
    bench = Bench(pool, max_new_tokens=2)
    gained = [0, 0, 0]
    while min(gained) < 2:
        rows = [row for row in range(3) if gained[row] < 2]
        for commit in bench.cycle(("small", "middle", "target"), rows, depth=8).commits:
            gained[commit.row] += len(commit.tokens)
    assert gained == [2, 2, 2]


def test_a_failed_drafter_leaves_the_cycle_to_the_target(
    bench: Bench, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.cycle(("small", "target"))
    _break(monkeypatch, "small", after=2)
    result = bench.cycle(("small", "target"))
    assert [failure.model for failure in result.failures] == ["small"]
    assert {commit.chain for commit in result.commits} == {("target",)}
    monkeypatch.undo()
    assert not bench.cycle(("small", "target")).failures
    for row, prompt in enumerate(PROMPTS):
        made = bench.manager.committed(row)[len(prompt) :].tolist()
        assert made == continuation(target, prompt, len(made))


def test_a_failed_target_commits_nothing_and_the_next_cycle_works(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.cycle(("small", "target"))
    before = bench.manager.counts.copy()
    _break(monkeypatch, "target", after=0)
    with pytest.raises(TargetError, match="target failed: RuntimeError: broken"):
        bench.cycle(("small", "target"))
    bench.manager.check_integrity()
    assert bench.manager.counts.tolist() == before.tolist()
    monkeypatch.undo()
    assert len(bench.cycle(("small", "target")).commits) == 3


def _break(monkeypatch: pytest.MonkeyPatch, name: str, after: int) -> None:
    """The model raises from its `after`-th forward on."""
    real: Any = PackedModel.forward
    seen = [0]

    def forward(model: PackedModel, *arguments: Any, **options: Any) -> Any:
        seen[0] += model.name == name
        if model.name == name and seen[0] > after:
            raise RuntimeError("broken")
        return real(model, *arguments, **options)

    monkeypatch.setattr(PackedModel, "forward", forward)


def test_total_variation_is_half_the_sum_of_differences() -> None:
    p, q = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]), torch.tensor([[0.5, 0.0, 0.5]] * 2)
    assert total_variation(p.log(), q.log()) == pytest.approx((0.5 + 0.5) / 2)
    assert total_variation(p.log(), p.log()) == 0.0
