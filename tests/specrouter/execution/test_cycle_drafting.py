"""Half of the rows draft while the target verifies the others, and texts are the same."""

import copy
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from modelpool import ModelPool
from modelpool.config import PoolConfig, validate_config
from modelpool.forward import ForwardOutput
from processors import (
    ActiveModel,
    DraftProcessor,
    DraftRequest,
    DraftResult,
    VerifyProcessor,
    VerifyRequest,
    VerifyResult,
)
from specrouter.cycle import ChainGroup, CyclePlan, DraftShape, TargetError
from specrouter.execution import drafting_thread
from specrouter.execution.drafter_prefill import DrafterPrefill
from specrouter.execution.hang_guard import HangGuard
from specrouter.request.params import Chain, SamplingParams
from specrouter.request.spec import RequestSpec
from tests.modelpool.two_devices import two_devices
from tests.pairwise import pairwise
from tests.specrouter.execution.test_executor import FOUR, NOBODY, PAIR, SETTINGS, TRIPLE, Bench
from tests.specrouter.faults import PATIENCE_S, seem_endless

CASES = [
    tuple(case.values())
    for case in pairwise(setting=list(SETTINGS), chain=(PAIR, TRIPLE), width=(1, 3))
]
FIRST, SECOND = [0, 1], [2, 3]  # rows of the halves


@pytest.fixture(scope="module")
def pool(small_config: dict[str, Any]) -> ModelPool:
    config = copy.deepcopy(small_config["pool"])
    for model in config["models"]:
        model["threads"] = 1
    pool = ModelPool(validate_config(PoolConfig, config, "pool"), devices=two_devices())
    places = {name: pool.placement(name).devices for name in pool.names}
    assert places == {"small": ("cpu:1",), "middle": ("cpu:1",), "target": ("cpu:0",)}
    assert pool.get("target").device == torch.device("cpu")
    return pool


@pytest.fixture
def bench(pool: ModelPool) -> Bench:
    """Its drafters have been used, and have read the prompts."""
    return opened(pool)


def opened(pool: ModelPool, guard: HangGuard | None = None, **options: Any) -> Bench:
    bench = Bench(pool, 60, FOUR, guard=guard, overlap=True, **options)
    for chain in (("target",), TRIPLE, TRIPLE):
        bench.cycle(chain, depth=2)
    return bench


def served(bench: Bench, chain: Chain, width: int, most: int) -> int:
    """Until every row has its tokens. How many cycles overlapped."""
    overlapped = 0
    while rows := [row for row, made in enumerate(bench.made()) if len(made) < most]:
        overlapped += bench.cycle(chain, rows, 3, width).overlaps
    return overlapped


@pytest.mark.parametrize(("setting", "chain", "width"), CASES)
def test_texts_are_those_of_the_target_alone(
    pool: ModelPool, chain: Chain, width: int, setting: str
) -> None:
    params = SETTINGS[setting]
    bench = Bench(pool, prompts=FOUR, params=params, overlap=True)
    overlapped = served(bench, chain, width, params.max_new_tokens)
    bench.assert_alone()
    assert overlapped >= 4


@pytest.mark.parametrize("chain", [PAIR, TRIPLE])
def test_rejection_draws_the_same_in_two_turns(pool: ModelPool, chain: Chain) -> None:
    params = SETTINGS["sampled"]
    found = []
    for overlap in (False, True):
        bench = Bench(pool, prompts=FOUR, params=params, rejection=True, overlap=overlap)
        overlapped = served(bench, chain, 1, params.max_new_tokens)
        assert bool(overlapped) is overlap
        found.append(bench.made())
    assert found[0] == found[1]


class EventLog:
    """When rows are drafted for and verified, and in which thread. The first verification ends only
    when the second half has begun to draft."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, tuple[int, ...], str]] = []
        self.drafts_second = threading.Event()
        draft, verify = DraftProcessor.draft, VerifyProcessor.verify

        def drafting(own: Any, active: ActiveModel, request: DraftRequest) -> DraftResult:
            with self.noted("draft", request.rows.tolist()):
                if request.rows[0] == SECOND[0]:
                    self.drafts_second.set()
                return draft(own, active, request)

        def verifying(own: Any, active: ActiveModel, request: VerifyRequest) -> VerifyResult:
            with self.noted("verification", request.tree.rows.tolist()):
                assert self.drafts_second.wait(PATIENCE_S), "nobody drafts meanwhile"
                return verify(own, active, request)

        monkeypatch.setattr(DraftProcessor, "draft", drafting)
        monkeypatch.setattr(VerifyProcessor, "verify", verifying)

    @contextmanager
    def noted(self, what: str, rows: Sequence[int]) -> Iterator[None]:
        thread = threading.current_thread().name
        self.events.append((f"{what} begins", tuple(rows), thread))
        yield
        self.events.append((f"{what} ends", tuple(rows), thread))

    def at(self, what: str, rows: Sequence[int]) -> int:
        return [event[:2] for event in self.events].index((what, tuple(rows)))


def test_the_next_half_drafts_before_the_verification_of_the_former_ends(
    bench: Bench, pool: ModelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        log = EventLog(patch)
        result = bench.cycle(PAIR, depth=3, width=2)
    assert result.overlaps
    order = [
        log.at("draft begins", FIRST),
        log.at("draft ends", FIRST),
        log.at("draft begins", SECOND),
        log.at("verification ends", FIRST),
        log.at("verification begins", SECOND),
        log.at("verification ends", SECOND),
    ]
    assert order == sorted(order)
    assert log.at("draft ends", FIRST) < log.at("verification begins", FIRST)
    assert log.at("draft ends", SECOND) < log.at("verification begins", SECOND)
    drafting = {thread for what, _, thread in log.events if what.startswith("draft")}
    assert drafting == {"specrouter-drafting"}
    verifying = {thread for what, _, thread in log.events if what.startswith("verification")}
    assert verifying == {threading.current_thread().name}
    assert {commit.chain for commit in result.commits} == {PAIR}
    bench.assert_alone()


def test_prompts_are_read_and_others_decode_in_the_first_pass(
    bench: Bench, pool: ModelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[int], list[int]]] = []
    verify = VerifyProcessor.verify

    def noting(own: Any, active: ActiveModel, request: VerifyRequest) -> VerifyResult:
        assert request.chunks is not None
        seen.append((request.tree.rows.tolist(), request.chunks.rows.tolist()))
        return verify(own, active, request)

    prompt = [*range(5, 45)]
    bench.executor.close(0)
    row = bench.manager.allocate(prompt, 60)
    assert row == 0
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    bench.executor.open(
        0,
        RequestSpec(token_ids=tuple(prompt), generated=(), params=params, speculation=None, seed=1),
    )
    monkeypatch.setattr(VerifyProcessor, "verify", noting)
    groups = [
        ChainGroup(chain=PAIR, shape=DraftShape(3), rows=np.array([1, 3])),
        ChainGroup(chain=("target",), shape=DraftShape(), rows=np.array([2])),
    ]
    result = bench.executor.run(
        CyclePlan(groups=groups, prefill_rows=np.array([0]), prefill_counts=np.array([32]))
    )
    bench.manager.check_integrity()
    assert result.overlaps
    assert seen == [([1, 2], [0]), ([3], [])]
    assert bench.executor.states.lag("target", np.array([0])).tolist() == [7]


# Who takes one turn


def test_a_cycle_takes_one_turn_where_nothing_can_overlap(
    pool: ModelPool, small_config: dict[str, Any]
) -> None:
    assert not Bench(pool, prompts=FOUR, overlap=True).cycle(PAIR).overlaps, "not open yet"
    bench = opened(pool)
    assert not bench.cycle(PAIR, rows=[1]).overlaps, "one row"
    assert not bench.cycle(("target",)).overlaps
    together = ModelPool.from_config(copy.deepcopy(small_config["pool"]))
    assert not opened(together).cycle(PAIR).overlaps, "one device"
    assert not Bench(pool, prompts=FOUR).cycle(PAIR).overlaps, "not asked for"


def test_callers_processors_are_run_by_one_thread(pool: ModelPool) -> None:
    seen: set[str] = set()

    def noting(tokens: Any, scores: torch.Tensor) -> torch.Tensor:
        seen.add(threading.current_thread().name)
        return scores

    params = SamplingParams(max_new_tokens=30, ignore_eos=True, logits_processors=(noting,))
    bench = opened(pool, params=params)
    assert not bench.cycle(PAIR).overlaps
    assert seen == {threading.current_thread().name}


# Faults


def failing(monkeypatch: pytest.MonkeyPatch, rows: list[int], error: BaseException) -> None:
    """Drafts for any of these rows."""
    draft = DraftProcessor.draft

    def drafting(own: Any, active: ActiveModel, request: DraftRequest) -> DraftResult:
        if set(rows) & set(request.rows.tolist()):
            raise error
        return draft(own, active, request)

    monkeypatch.setattr(DraftProcessor, "draft", drafting)


@pytest.mark.parametrize("rows", [FIRST, SECOND])
def test_a_drafter_that_fails_for_one_half_costs_that_half_its_drafts(
    bench: Bench, pool: ModelPool, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        failing(patch, rows, RuntimeError("broken"))
        result = bench.cycle(PAIR)
    bench.manager.check_integrity()
    assert [str(failure.error) for failure in result.failures] == ["broken"]
    chains = {commit.row: commit.chain for commit in result.commits}
    assert chains == {row: ("target",) if row in rows else PAIR for row in range(4)}
    assert not result.is_regular
    assert bench.cycle(PAIR).overlaps
    bench.assert_alone()


def test_a_failure_around_the_forwards_of_the_thread_costs_drafts_alone(
    bench: Bench, pool: ModelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(DrafterPrefill, "read", lambda *_: 1 / 0)
        result = bench.cycle(PAIR)
    assert {failure.model for failure in result.failures} == {"small"}
    assert {commit.chain for commit in result.commits} == {("target",)}
    bench.assert_alone()


@pytest.mark.parametrize("broken", [0, 1])
def test_a_target_that_fails_in_either_pass_commits_nothing(
    bench: Bench, pool: ModelPool, broken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify, calls = VerifyProcessor.verify, 0

    def verifying(own: Any, active: ActiveModel, request: VerifyRequest) -> VerifyResult:
        nonlocal calls
        calls += 1
        if calls == broken + 1:
            raise RuntimeError("on fire")
        return verify(own, active, request)

    before = bench.manager.counts.copy()
    with monkeypatch.context() as patch:
        patch.setattr(VerifyProcessor, "verify", verifying)
        with pytest.raises(TargetError, match="target failed: RuntimeError: on fire"):
            bench.cycle(PAIR)
    bench.manager.check_integrity()
    assert bench.manager.counts.tolist() == before.tolist()
    assert len(bench.cycle(PAIR).commits) == 4
    bench.assert_alone()


def test_the_failures_of_the_thread_are_told_though_the_target_fails_before(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VerifyProcessor, "verify", lambda *_: 1 / 0)
    failing(monkeypatch, SECOND, RuntimeError("broken"))
    with pytest.raises(TargetError) as told:
        bench.cycle(PAIR)
    assert [str(failure.error) for failure in told.value.failures] == ["broken"]


def test_what_ends_a_thread_ends_the_cycle_and_leaves_states_whole(
    bench: Bench, pool: ModelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        failing(patch, SECOND, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            bench.cycle(PAIR)
    bench.manager.check_integrity()
    assert bench.cycle(PAIR).overlaps
    bench.assert_alone()


def test_logits_that_are_no_numbers_cost_their_own_half(
    bench: Bench, pool: ModelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = pool.get("small")
    forward = small.shortcut or small._forward

    def odd(tokens: Any, positions: Any, view: Any, index: Any, hidden: Any) -> ForwardOutput:
        output = forward(tokens, positions, view, index, hidden)
        if view.pack.rows[-1] >= SECOND[0]:
            output.logits.fill_(torch.nan)
        return output

    with monkeypatch.context() as patch:
        patch.setattr(small, "shortcut", odd)
        result = bench.cycle(PAIR)
    assert [failure.model for failure in result.failures] == ["small"]
    chains = {commit.row: commit.chain for commit in result.commits}
    assert chains == {0: PAIR, 1: PAIR, 2: ("target",), 3: ("target",)}
    bench.cycle(PAIR)
    bench.assert_alone()


@pytest.mark.parametrize("rows", [FIRST, SECOND])
def test_a_forward_that_hangs_in_the_thread_costs_time_and_no_token(
    pool: ModelPool, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting_thread, "_LOOKS", 1000)
    guard, hangs, release = HangGuard(10.0), threading.Event(), threading.Event()
    inside, draft = HangGuard.inside, DraftProcessor.draft

    @contextmanager
    def hanging(own: HangGuard, model: str) -> Iterator[None]:
        with inside(own, model):
            if hangs.is_set():
                hangs.clear()
                seem_endless(own)
                release.wait(PATIENCE_S)
            yield  # writes keys and values, far too late

    def drafting(own: Any, active: ActiveModel, request: DraftRequest) -> DraftResult:
        if request.rows[0] == rows[0]:
            hangs.set()
        return draft(own, active, request)

    monkeypatch.setattr(HangGuard, "inside", hanging)
    bench = opened(pool, guard)
    with monkeypatch.context() as patch:
        patch.setattr(DraftProcessor, "draft", drafting)
        result = bench.cycle(PAIR)
        assert [failure.model for failure in result.failures] == ["small"]
        assert "took more than 10 s" in str(result.failures[0].error)
        chains = {commit.row: commit.chain for commit in result.commits}
        alone = range(4) if rows is FIRST else SECOND
        assert [row for row, chain in chains.items() if chain == ("target",)] == list(alone)
        assert bench.manager.state("small") is None, "its cache is forgotten"
    release.set()
    for _ in range(4):
        bench.cycle(PAIR)
    assert bench.cycle(PAIR).overlaps, "another thread drafts"
    bench.assert_alone()


def test_a_selector_has_the_budget_of_its_half(bench: Bench) -> None:
    asked: list[tuple[list[int], int]] = []

    def select(rows: Any, candidates: Any, aside: int) -> Any:
        asked.append((rows.tolist(), aside))
        return candidates.best(np.minimum(candidates.counts, 2))

    group = ChainGroup(chain=PAIR, shape=DraftShape(3), rows=np.arange(4), whole=False)
    result = bench.executor.run(
        CyclePlan(
            groups=[group],
            prefill_rows=NOBODY,
            prefill_counts=NOBODY,
            selector=select,
            budget_nodes=9,
        )
    )
    assert result.overlaps
    assert asked == [(FIRST, 4), (SECOND, 5)]
    assert all(commit.drafted <= 2 for commit in result.commits)
