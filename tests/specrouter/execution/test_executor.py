"""One cycle: what is committed is the target's choice, and every state is a prefix afterwards."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from modelpool import ModelPool
from modelpool.attention.backend import TRITON
from modelpool.packed_model import PackedModel
from processors import (
    ActiveModel,
    Sampler,
    VerifyProcessor,
    VerifyRequest,
    VerifyResult,
)
from research.policies.adaserve import SPECINFER_TREE
from specrouter.cycle import (
    Bools,
    Candidates,
    ChainGroup,
    CyclePlan,
    CycleResult,
    DraftShape,
    Ints,
    ShadowEvaluation,
    TargetError,
    TreeSelector,
)
from specrouter.execution.executor import Executor
from specrouter.execution.hang_guard import HangGuard
from specrouter.execution.runtime import Runtime, sampler_for
from specrouter.execution.runtime_parts import ExecutionSettings
from specrouter.profile.profiler import PerformanceProfiler
from specrouter.request.params import MAX_DEPTH, MAX_TREE_TOKENS, Chain, SamplingParams
from specrouter.request.spec import RequestSpec
from specrouter.slo.tree_selection import global_greedy
from statemgr import StateManager
from test_support.triton_interpreter import needs_triton
from tests.processors.trees import nodes_of

PROMPTS = [[5, 17, 300, 42, 9], [3, 4], [250, 1, 99]]
BROKEN = RuntimeError("broken")
PAIR: Chain = ("small", "target")
TRIPLE: Chain = ("small", "middle", "target")
CHAINS: list[Chain] = [("target",), PAIR, TRIPLE]


@needs_triton
def test_kernels_choose_where_a_member_runs_on_triton(
    pool: ModelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sampler_for(pool) is Sampler
    plans = {name: pool.plan(name) for name in pool.names}
    plans["small"] = dataclasses.replace(plans["small"], attention=TRITON)
    monkeypatch.setattr(pool, "plan", plans.__getitem__)
    assert sampler_for(pool).__name__ == "FusedSampler"


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
        params: SamplingParams | Sequence[SamplingParams] = (),
        chunk: int = 32,
        deepest: int = MAX_DEPTH,
    ) -> None:
        self.pool, self.params = pool, params
        self.manager = StateManager(len(prompts), 256, MAX_TREE_TOKENS + 16)
        self.profiler = PerformanceProfiler(parameters=dict.fromkeys(pool.names, 1))
        window = deepest + len(pool.names) + 2  # as the engine has it
        settings = ExecutionSettings(prefill_chunk=chunk, window=window, guard=HangGuard(60.0))
        self.runtime = Runtime.create(pool, self.manager, self.profiler, settings)
        self.executor = Executor(self.runtime)
        self.prompts = prompts
        params = params or SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        for number, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
            row = self.manager.allocate(prompt, len(prompt) + own.max_new_tokens)
            assert row == number
            request = RequestSpec(
                token_ids=tuple(prompt), generated=(), params=own, speculation=None, seed=row
            )
            self.executor.open(row, request)
            self.executor.prepare(row, request)

    def cycle(
        self,
        chain: Chain,
        rows: Sequence[int] | None = None,
        depth: int = 4,
        width: int = 1,
        nodes: int | None = None,
    ) -> CycleResult:
        """`nodes`: of a tree, in the mean, that the target verifies; None: whole trees."""
        which = np.array(range(len(self.prompts)) if rows is None else rows, dtype=np.int64)
        group = ChainGroup(
            chain=chain, shape=DraftShape(depth, width), rows=which, whole=nodes is None
        )
        return self.run([group], None if nodes is None else best(nodes))

    def run(
        self,
        groups: Sequence[ChainGroup],
        selector: TreeSelector | None = None,
        evaluation: ShadowEvaluation | None = None,
        reads: dict[int, int] | None = None,
    ) -> CycleResult:
        """`reads`: tokens of prompts, by row."""
        result = self.executor.run(plan_of(groups, selector, evaluation, reads))
        self.manager.check_integrity()
        return result

    def made(self) -> list[list[int]]:
        return [
            self.manager.committed(row)[len(prompt) :].tolist()
            for row, prompt in enumerate(self.prompts)
        ]

    def assert_alone(self) -> None:
        """Texts are those that the target makes of the prompts without drafts."""
        made = self.made()
        alone = Bench(self.pool, max(map(len, made)), self.prompts, self.params)
        for _ in range(max(map(len, made))):
            alone.cycle(("target",))
        expected = zip(alone.made(), made, strict=True)
        assert made == [text[: len(own)] for text, own in expected]


def plan_of(
    groups: Sequence[ChainGroup],
    selector: TreeSelector | None = None,
    evaluation: ShadowEvaluation | None = None,
    reads: dict[int, int] | None = None,
) -> CyclePlan:
    rows, counts = ([*each] for each in (reads or {}, (reads or {}).values()))
    return CyclePlan(
        groups=groups,
        prefill_rows=np.array(rows, dtype=np.int64),
        prefill_counts=np.array(counts, dtype=np.int64),
        selector=selector,
        shadow_evaluation=evaluation,
    )


def best(nodes: int) -> TreeSelector:
    """The most probable nodes of all requests, so many of each in the mean."""
    return lambda rows, candidates, _: global_greedy(candidates, nodes * len(rows))


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
        assert not bench.executor.states.lag("target", np.arange(3)).any()
    assert_target_alone(bench, target)


def test_a_plan_without_rows_needs_no_pass(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VerifyProcessor, "verify", lambda *_: 1 / 0)
    assert not bench.run([]).commits


def test_rows_that_decode_and_prompts_are_read_in_one_pass(
    bench: Bench, verified: list[dict[int, int]]
) -> None:
    result = bench.run([group(("target",), [0, 2])], reads={1: 1})
    assert verified == [{0: 0, 2: 0}]
    assert [commit.row for commit in result.commits] == [0, 2]
    assert not bench.executor.states.lag("target", np.arange(3)).any()


def test_no_row_gains_more_than_it_may(pool: ModelPool) -> None:
    bench = Bench(pool, max_new_tokens=2)
    gained = [0, 0, 0]
    for _ in range(2):  # each brings a token at least
        if rows := [row for row in range(3) if gained[row] < 2]:
            for commit in bench.cycle(TRIPLE, rows, depth=8).commits:
                gained[commit.row] += len(commit.tokens)
    assert gained == [2, 2, 2]


def test_a_failed_target_commits_nothing_and_the_next_cycle_works(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.cycle(PAIR)
    before = bench.manager.counts.copy()
    fail(monkeypatch, "target")
    with pytest.raises(TargetError, match="target failed: RuntimeError: broken"):
        bench.cycle(PAIR)
    bench.manager.check_integrity()
    assert bench.manager.counts.tolist() == before.tolist()
    monkeypatch.undo()
    assert len(bench.cycle(PAIR).commits) == 3


@pytest.mark.parametrize("name", ["small", "middle"])
def test_a_row_whose_logits_are_no_numbers_costs_no_other_row_its_cache(
    name: str, bench: Bench, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.cycle(TRIPLE)
    _disturb(monkeypatch, name)
    result = bench.cycle(TRIPLE)
    monkeypatch.undo()
    assert [failure.model for failure in result.failures] == [name]
    state = bench.manager.state(name)
    assert state is not None
    assert (state.lengths(np.arange(3)) > 0).tolist() == [False, True, True]
    assert not bench.cycle(TRIPLE).failures
    assert_target_alone(bench, target)


def test_odd_logits_off_an_intermediates_walk_are_no_failure(
    pool: ModelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(pool, prompts=FOUR, params=SAMPLED)
    real, taken = VerifyProcessor.verify, 0
    astray: list[VerifyResult] = []

    def odd(
        processor: VerifyProcessor, active: ActiveModel, request: VerifyRequest
    ) -> VerifyResult:
        result = real(processor, active, request)
        if active.model.name == "middle":
            result.broken[:, 1:] |= result.tree.real & ~result.accepted
            astray.append(result)
        return result

    monkeypatch.setattr(VerifyProcessor, "verify", odd)
    while len(min(bench.made(), key=len)) < 8:
        result = bench.cycle(TRIPLE, depth=2, width=4)  # asserts that states are sound
        assert not result.failures
        for commit in result.commits:
            found = astray[-1].tree
            text = np.array([commit.tokens[:1]] * len(found.rows))
            on_text = found.on_text(text, np.ones_like(found.rows))[commit.row]
            taken += int((on_text & ~astray[-1].accepted[commit.row]).sum())
    assert taken, "the target never took what was astray to the intermediate"
    bench.assert_alone()


# Chains of three

FOUR = [*PROMPTS, [12, 12, 40, 7, 301, 8, 8]]
SAMPLED = SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=0.9, top_k=40)


# Selection


@dataclasses.dataclass
class Noting:
    """A selector that notes what it is asked, and takes what `pick` says."""

    pick: Any
    rows: list[list[int]] = dataclasses.field(default_factory=list)
    asked: list[Candidates] = dataclasses.field(default_factory=list)
    aside: list[int] = dataclasses.field(default_factory=list)

    def __call__(self, rows: Ints, candidates: Candidates, aside: int) -> Bools:
        self.rows.append(rows.tolist())
        self.asked.append(candidates)
        self.aside.append(aside)
        chosen: Bools = self.pick(candidates)
        return chosen


def nothing(candidates: Candidates) -> Bools:
    return candidates.best(np.zeros_like(candidates.counts))


class AtRandom:
    """So many of each request's most probable nodes, by chance."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def __call__(self, candidates: Candidates) -> Bools:
        return candidates.best(self._rng.integers(0, candidates.counts + 1))


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, int]]:
    """By row: sizes of the trees that the target was given, cycle by cycle."""
    seen: list[dict[int, int]] = []
    real = VerifyProcessor.verify

    def verify(processor: VerifyProcessor, active: ActiveModel, request: VerifyRequest) -> Any:
        tree = request.tree
        nodes_of(tree)  # which asserts that it is one
        if active.model.name == "target":
            seen.append(dict(zip(tree.rows.tolist(), tree.sizes.tolist(), strict=True)))
        return real(processor, active, request)

    monkeypatch.setattr(VerifyProcessor, "verify", verify)
    return seen


def group(chain: Chain, rows: Sequence[int], whole: bool = False, **given: Any) -> ChainGroup:
    shape = DraftShape(given.pop("depth", 4), given.pop("width", 3))
    return ChainGroup(chain=chain, shape=shape, rows=np.array(rows), whole=whole, **given)


def assert_target_alone(bench: Bench, target: Any) -> None:
    for made, prompt in zip(bench.made(), bench.prompts, strict=True):
        assert made == continuation(target, prompt, len(made))


@pytest.mark.parametrize("chain", CHAINS[1:], ids=">".join)
@pytest.mark.parametrize("width", [1, 3])
def test_whatever_is_selected_the_targets_choice_is_committed(
    chain: Chain, width: int, bench: Bench, target: Any
) -> None:
    selector = Noting(AtRandom(5))
    for _ in range(4):
        result = bench.run([group(chain, [0, 1, 2], width=width)], selector)
        assert not result.failures
        assert [commit.chain for commit in result.commits] == [chain] * 3
    assert len(selector.asked) == 4
    assert_target_alone(bench, target)


@pytest.mark.parametrize(
    ("groups", "is_asked"),
    [
        ([group(PAIR, [0, 1])], True),
        ([group(PAIR, [0, 1], whole=True)], False),
        ([group(("target",), [0, 1])], False),
        ([group(("target",), [0]), group(PAIR, [1])], True),
    ],
)
def test_only_drafts_that_leave_a_choice_are_selected_from(
    groups: list[ChainGroup],
    is_asked: bool,
    bench: Bench,
    target: Any,
    verified: list[dict[int, int]],
) -> None:
    selector = Noting(nothing)
    result = bench.run(groups, selector)
    assert len(selector.asked) == is_asked
    if is_asked:
        assert [len(commit.tokens) for commit in result.commits] == [1, 1]
    assert_target_alone(bench, target)
    assert sum(verified[0].values()) == (
        0 if is_asked or groups[0].chain == ("target",) else 2 * 4 * 3
    )


def test_groups_whose_nodes_are_worth_no_number_decode_with_the_target_alone(
    bench: Bench, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def worth(profiler: PerformanceProfiler, key: Any, parents: Ints, *rest: Any) -> Any:
        return np.full(parents.shape, np.nan)

    with monkeypatch.context() as patch:
        patch.setattr(PerformanceProfiler, "worth", worth)
        result = bench.run([group(PAIR, [0, 1, 2])], best(4))
    assert result.selection_failed
    assert [commit.chain for commit in result.commits] == [("target",)] * 3
    assert_target_alone(bench, target)


def fails(candidates: Candidates) -> Bools:
    raise BROKEN


@pytest.mark.parametrize(
    "selected",
    [
        fails,
        lambda candidates: candidates.worth,
        lambda candidates: np.zeros((1, 1), dtype=np.bool_),
        lambda candidates: candidates.depths == candidates.depths.max(),
    ],
    ids=["an error", "no booleans", "another shape", "nodes without their parents"],
)
def test_a_selector_without_sense_costs_its_groups_their_drafts_and_no_other(
    bench: Bench, target: Any, selected: Any
) -> None:
    groups = [group(PAIR, [0, 2]), group(("middle", "target"), [1], whole=True)]
    result = bench.run(groups, Noting(selected))
    assert result.selection_failed
    chains = {commit.row: commit.chain for commit in result.commits}
    assert chains == {0: ("target",), 1: ("middle", "target"), 2: ("target",)}
    assert len(bench.run([group(PAIR, [0, 1, 2])], best(4)).commits) == 3
    assert_target_alone(bench, target)


# Trees of a fixed form


def static(chain: Chain) -> ChainGroup:
    return group(chain, [0, 1, 2], whole=True, depth=8, branching=SPECINFER_TREE)


@pytest.mark.parametrize("chain", CHAINS[1:], ids=">".join)
def test_a_static_tree_commits_the_targets_choice(
    chain: Chain, bench: Bench, target: Any, verified: list[dict[int, int]]
) -> None:
    for _ in range(3):
        assert not bench.run([static(chain)]).failures
    if len(chain) == 2:
        assert verified[:3] == [dict.fromkeys(range(3), 20)] * 3
    assert_target_alone(bench, target)


# What verdicts teach


@pytest.mark.parametrize("chain", CHAINS[1:], ids=">".join)
def test_trees_of_a_fixed_form_teach_no_acceptances(chain: Chain, bench: Bench) -> None:
    for _ in range(3):
        bench.run([static(chain)])
    assert not bench.profiler.snapshot().trees
    bench.run([group(chain, [0, 1, 2], whole=True, width=2)])
    assert bench.profiler.snapshot().trees[("small",), chain[1], False].trials > 0


def fail(monkeypatch: pytest.MonkeyPatch, name: str, after: int = 0) -> None:
    """The model raises from its `after`-th forward on."""
    real: Any = PackedModel.forward
    seen = [0]

    def forward(model: PackedModel, *arguments: Any, **options: Any) -> Any:
        seen[0] += model.name == name
        if model.name == name and seen[0] > after:
            raise BROKEN
        return real(model, *arguments, **options)

    monkeypatch.setattr(PackedModel, "forward", forward)


def _disturb(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The first logits of each of the model's forwards are no numbers."""
    real: Any = PackedModel.forward

    def forward(model: PackedModel, *arguments: Any, **options: Any) -> Any:
        output = real(model, *arguments, **options)
        if model.name == name:
            output.logits[:1] = float("nan")
        return output

    monkeypatch.setattr(PackedModel, "forward", forward)
