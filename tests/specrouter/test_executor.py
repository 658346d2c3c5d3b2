"""One cycle: what is committed is the target's choice, and every state is a prefix afterwards."""

import copy
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from modelpool import ModelPool
from modelpool.packed_model import PackedModel
from processors import NonFiniteLogits, VerifyProcessor
from specrouter.acceptance import shape_index
from specrouter.executor import (
    ChainGroup,
    CyclePlan,
    CycleResult,
    Executor,
    TargetError,
    most_promising,
)
from specrouter.lessons import total_variation
from specrouter.params import MAX_DEPTH, MAX_TREE_TOKENS, SamplingParams
from specrouter.profiler import PerformanceProfiler
from specrouter.request import Prompt
from specrouter.scheduler import Chain
from statemgr import StateManager
from tests.processors.trees import Nodes, build, forests, nodes_of

PROMPTS = [[5, 17, 300, 42, 9], [3, 4], [250, 1, 99]]
BROKEN = RuntimeError("broken")
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

    def __init__(
        self,
        pool: ModelPool,
        max_new_tokens: int = 30,
        prompts: Sequence[list[int]] = PROMPTS,
        params: SamplingParams | None = None,
    ) -> None:
        self.manager = StateManager(len(prompts), 128, None, MAX_TREE_TOKENS + 16)
        self.profiler = PerformanceProfiler(dict.fromkeys(pool.names, 1))
        window = MAX_DEPTH + len(pool.names) + 2  # as the engine has it
        self.executor = Executor(pool, self.manager, self.profiler, 32, window)
        self.prompts = prompts
        params = params or SamplingParams(max_new_tokens, ignore_eos=True)
        for prompt in prompts:
            row = self.manager.allocate(prompt, len(prompt) + params.max_new_tokens)
            assert row is not None
            self.executor.open(row, Prompt(tuple(prompt), (), params, None, seed=row))

    def cycle(
        self,
        chain: Chain,
        rows: Sequence[int] | None = None,
        depth: int = 4,
        width: int = 1,
        nodes: int | None = None,
        rounds: int = 1,
    ) -> CycleResult:
        which = np.array(range(len(self.prompts)) if rows is None else rows, dtype=np.int64)
        group = ChainGroup(chain, depth, which, width, nodes=nodes, inner_rounds=rounds)
        result = self.executor.run(CyclePlan([group], NOBODY, NOBODY))
        self.manager.check_integrity()
        return result

    def made(self) -> list[list[int]]:
        return [
            self.manager.committed(row)[len(prompt) :].tolist()
            for row, prompt in enumerate(self.prompts)
        ]

    def rounds(self) -> set[int]:
        """Of the trees that the target judged."""
        known = self.profiler.snapshot().trees
        return {rounds for _, rounds, verifier, _ in known if verifier == "target"}


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


# Inner rounds

FOUR = [*PROMPTS, [12, 12, 40, 7, 301, 8, 8]]
TRIPLE: Chain = ("small", "middle", "target")
READING = SamplingParams(
    24,
    ignore_eos=True,
    temperature=0.8,
    top_p=0.95,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.7,
    bad_words_ids=((9, 5), (42,)),
    min_tokens=5,
)
SETTINGS = {
    "greedy": SamplingParams(24, ignore_eos=True),
    "greedy-reading": dataclasses.replace(READING, temperature=0.0),
    "sampled": SamplingParams(24, ignore_eos=True, temperature=0.9, top_k=40),
    "sampled-reading": READING,
}


@functools.cache
def target_alone(pool: ModelPool, setting: str) -> list[list[int]]:
    bench = Bench(pool, prompts=FOUR, params=SETTINGS[setting])
    for _ in range(SETTINGS[setting].max_new_tokens):
        bench.cycle(("target",))
    return bench.made()


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("rounds", [2, 3, 4])
def test_inner_rounds_commit_the_targets_choice(
    rounds: int, width: int, batch: int, setting: str, pool: ModelPool
) -> None:
    expected = target_alone(pool, setting)[:batch]
    bench = Bench(pool, prompts=FOUR[:batch], params=SETTINGS[setting])
    cycles = 0
    while open_rows := [row for row, made in enumerate(bench.made()) if len(made) < 24]:
        result = bench.cycle(TRIPLE, open_rows, depth=3, width=width, nodes=12, rounds=rounds)
        assert not result.failures
        assert not result.errors
        cycles += 1
    assert bench.made() == expected
    assert rounds in bench.rounds()
    assert cycles < 24


def test_inner_rounds_offer_the_target_longer_paths(pool: ModelPool) -> None:
    gained = []
    for rounds in (1, 4):
        bench = Bench(pool, prompts=FOUR)
        commits = [c for _ in range(3) for c in bench.cycle(TRIPLE, depth=2, rounds=rounds).commits]
        gained.append(sum(len(commit.tokens) for commit in commits))
    assert gained[1] > gained[0]


def test_the_longest_drafts_stay_within_what_a_cycle_may_look_at(pool: ModelPool) -> None:
    bench, alone = Bench(pool, 60), Bench(pool, 60)
    for rounds in (1, 2, 4):
        for width in (1, 4):
            bench.cycle(TRIPLE, depth=MAX_DEPTH // rounds, width=width, rounds=rounds)
    for _ in range(max(map(len, bench.made()))):
        alone.cycle(("target",))
    for made, expected in zip(bench.made(), alone.made(), strict=True):
        assert made == expected[: len(made)]


def test_a_row_without_room_for_another_round_does_without_it(pool: ModelPool) -> None:
    bench = Bench(pool, max_new_tokens=2)
    result = bench.cycle(TRIPLE, depth=4, rounds=3)
    assert len(result.commits) == 3
    assert not result.is_regular
    assert bench.rounds() == {1}


@pytest.mark.parametrize("error", [RuntimeError("broken"), NonFiniteLogits("broken")])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(("name", "after"), [("small", 3), ("small", 4), ("middle", 1)])
def test_a_failure_in_the_second_inner_round_costs_no_request_and_no_token(
    name: str,
    after: int,
    width: int,
    error: Exception,
    pool: ModelPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(pool, prompts=FOUR, params=SETTINGS["sampled-reading"])
    bench.cycle(TRIPLE, depth=3, width=width, rounds=3)
    _break(monkeypatch, name, after, error)
    result = bench.cycle(TRIPLE, depth=3, width=width, rounds=3)
    assert [failure.model for failure in result.failures] == [name]
    assert sorted(commit.row for commit in result.commits) == [0, 1, 2, 3]
    assert {commit.chain for commit in result.commits} == {TRIPLE}  # the first round is good
    assert not result.errors
    assert not result.is_regular
    monkeypatch.undo()
    assert not bench.cycle(TRIPLE, depth=3, width=width, rounds=3).failures
    for made, expected in zip(bench.made(), target_alone(pool, "sampled-reading"), strict=True):
        assert made == expected[: len(made)]


# The most promising nodes


@settings(max_examples=150, deadline=None, database=None)
@given(forests, st.integers(0, 30), st.integers(1, 9))
def test_the_most_promising_nodes_of_all_rows_are_chosen(
    rows: dict[int, Nodes], count: int, most: int
) -> None:
    tree = build(rows)
    chosen = most_promising(tree, np.exp(tree.log_probs), count, most)
    ranked = sorted(
        (-np.exp(tree.log_probs[index, place]), tree.depths[index, place], index, place)
        for index, place in zip(*np.nonzero(tree.real), strict=True)
        if np.isfinite(tree.log_probs[index, place])
    )[:count]
    expected = np.zeros_like(chosen)
    for _, _, index, place in ranked:
        expected[index, place] = expected[index].sum() < most
    assert np.array_equal(chosen, expected)


@settings(max_examples=150, deadline=None, database=None)
@given(forests, st.integers(0, 30), st.integers(1, 9))
def test_the_most_promising_nodes_are_trees(rows: dict[int, Nodes], count: int, most: int) -> None:
    tree = build(rows)
    chosen = most_promising(tree, np.exp(tree.log_probs), count, most)
    nodes_of(tree.keep(chosen))  # which asserts it
    assert chosen.sum() <= count
    assert (chosen.sum(axis=1) <= most).all()


def test_requests_with_likelier_drafts_get_more_of_the_targets_nodes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[list[int]] = []
    real = VerifyProcessor.verify

    def verify(processor: VerifyProcessor, *arguments: Any, **options: Any) -> Any:
        sizes.append(arguments[4].sizes.tolist())
        return real(processor, *arguments, **options)

    monkeypatch.setattr(VerifyProcessor, "verify", verify)
    for _ in range(3):
        bench.cycle(("small", "target"), depth=4, width=3, nodes=5)
    assert all(sum(each) == 15 for each in sizes)
    assert any(len(set(each)) > 1 for each in sizes)


def test_nodes_that_were_not_selected_teach_too(bench: Bench) -> None:
    for _ in range(4):
        bench.cycle(("small", "target"), depth=4, width=3, nodes=2)
    seen = bench.profiler.snapshot().trees[("small",), 1, "target", False]
    assert seen.trees[shape_index(4, 3)] > 10
    assert (seen.rates[shape_index(4, 3), :12] > 0.0).all()


def _break(
    monkeypatch: pytest.MonkeyPatch, name: str, after: int, error: Exception = BROKEN
) -> None:
    """The model raises from its `after`-th forward on."""
    real: Any = PackedModel.forward
    seen = [0]

    def forward(model: PackedModel, *arguments: Any, **options: Any) -> Any:
        seen[0] += model.name == name
        if model.name == name and seen[0] > after:
            raise error
        return real(model, *arguments, **options)

    monkeypatch.setattr(PackedModel, "forward", forward)


def test_total_variation_is_half_the_sum_of_differences() -> None:
    p, q = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]), torch.tensor([[0.5, 0.0, 0.5]] * 2)
    assert total_variation(p.log(), q.log()) == pytest.approx((0.5 + 0.5) / 2)
    assert total_variation(p.log(), p.log()) == 0.0
