"""The step: whatever in the control plane fails, requests get their tokens from the target.

Faults of every function, one after the other: `checks.exact.control_faults`.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from processors import TokenTree
from specrouter import SamplingParams
from specrouter.cycle import ChainGroup, CycleResult, DraftShape, ModelFailure, TargetError
from specrouter.engine.admission_log import AdmissionLog
from specrouter.engine.admission_queue import AdmissionPace, AdmissionQueue
from specrouter.engine.decode_counts import DecodeCounts
from specrouter.engine.planning import CyclePlanning
from specrouter.engine.quarantine import BackOff, Quarantine
from specrouter.engine.request_book import RequestBook
from specrouter.engine.request_meter import RequestMeter
from specrouter.engine.slo_accounts import SloAccounts
from specrouter.engine.step import MOST_TARGET_FAILURES, DecodingStep
from specrouter.engine.view_builder import ViewBuilder
from specrouter.execution.acceptance_feedback import AcceptanceFeedback
from specrouter.execution.chain_drafter import ChainDrafter
from specrouter.execution.decoding_rows import DecodingRows
from specrouter.execution.drafter_prefill import DrafterPrefill
from specrouter.execution.executor import Executor
from specrouter.profile.perf_model import PerfModel
from specrouter.profile.profiler import PerformanceProfiler
from specrouter.request.detokenizer import Detokenizer
from specrouter.request.running import RunningRequest
from specrouter.routing.planner import Plan, Planner
from tests.specrouter.engine.engines import GREEDY, PAIR, PROMPTS, EngineBench


class Bad(RuntimeError):
    pass


def fails(*_: object, **__: object) -> Any:
    raise Bad("it is broken")


@pytest.fixture(scope="module")
def shared(small_config: dict[str, Any]) -> EngineBench:
    return EngineBench(small_config)


@pytest.fixture
def bench(shared: EngineBench) -> Iterator[EngineBench]:
    """Afterwards nothing fails, and drafters are used again."""
    shared.engine._faults.counts.clear()
    yield shared
    assert any(PAIR in shared.chains() for _ in range(12)), "what rests has rested by then"


@pytest.fixture(scope="module")
def texts(shared: EngineBench) -> list[list[int]]:
    return [output.token_ids for output in shared.serve("off")]


def senseless(*_: Any) -> Plan:
    group = ChainGroup(chain=("huge", "target"), shape=DraftShape(2), rows=np.array([7]))
    return Plan(groups=[group], prefill_rows=group.rows, prefill_counts=group.rows)


CONTROL = {
    "the planning of admission": (CyclePlanning, "admission", "planning"),
    "the planning": (CyclePlanning, "plan", "planning"),
    "whether policies rest": (BackOff, "lasts", "planning"),
    "all drafts": (ChainDrafter, "offered", "drafting"),
    "the selection": (ChainDrafter, "_selected", "drafting"),
    "the view": (ViewBuilder, "build", "planning"),
    "the planner": (Planner, "plan", "planning"),
    "the quarantine's list": (Quarantine, "available", "planning"),
    "begin of drafts": (DrafterPrefill, "begin", "drafting"),
    "a draft": (ChainDrafter, "draft", "drafting"),
}
FACTS = {
    "how a plan came out": (CyclePlanning, "judge", "accounts"),
    "what is learned": (DecodingStep, "_learn", "accounts"),
    "the cycle's time": (PerformanceProfiler, "record_cycle", "accounts"),
    "the cycle's beginning": (PerformanceProfiler, "begin_cycle", "accounts"),
    "the cycle's tokens": (DecodeCounts, "record", "accounts"),
    "times of stages": (PerformanceProfiler, "record_stage", "timing"),
    "times of forwards": (PerfModel, "record", "timing"),
    "feedback": (AcceptanceFeedback, "learn_from_target", "feedback"),
    "accounts": (SloAccounts, "record", "accounts"),
    "what requests were told": (RequestBook, "_note_length", "accounts"),
    "what policies leave": (CyclePlanning, "keep", "accounts"),
    "who is shown to admission": (AdmissionQueue, "shown", "planning"),
    "who was accepted": (TokenTree, "on_text", "rows"),
    "what admission decided": (AdmissionLog, "note", "accounts"),
    "meters": (RequestMeter, "record", "accounts"),
    "who does well": (Quarantine, "learn", "accounts"),
}


@pytest.mark.parametrize(("owner", "name", "part"), CONTROL.values(), ids=CONTROL)
def test_where_planning_or_drafting_fails_the_target_serves_alone(
    bench: EngineBench,
    texts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    part: str,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        outputs = bench.serve()
    assert set(bench.faults()) == {part}
    assert [output.token_ids for output in outputs] == texts
    assert {chain for one in outputs for chain in one.metrics.chains} == {("target",)}


def test_where_the_policy_fails_the_target_alone_is_predicted(
    bench: EngineBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Quarantine, "available", fails)
        predicted = bench.engine.predicted_tpot_ms(1)
    machine = bench.engine.profiler.snapshot().machine  # how fast it is just now
    assert predicted == pytest.approx(bench.engine.baseline_tpot_ms() * machine)
    assert set(bench.faults()) == {"planning"}


@pytest.mark.parametrize("plan", [senseless, lambda *_: None], ids=["senseless", "nothing"])
def test_plans_without_sense_are_not_run(
    bench: EngineBench,
    texts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    plan: Callable[..., Plan | None],
) -> None:
    """Of which there are many: `test_plan_check`."""
    with monkeypatch.context() as patch:
        patch.setattr(Planner, "plan", plan)
        outputs = bench.serve()
    assert [output.token_ids for output in outputs] == texts
    assert bench.faults()["planning"] >= 3, "it is asked again now and then"


@pytest.mark.parametrize(("owner", "name", "part"), FACTS.values(), ids=FACTS)
def test_a_record_that_fails_loses_its_own_fact(
    bench: EngineBench,
    texts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    part: str,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        outputs = bench.serve()
    assert [output.token_ids for output in outputs] == texts
    assert PAIR in {chain for one in outputs for chain in one.metrics.chains}
    assert set(bench.faults()) == {part}


ROW = {
    "its text": (Detokenizer, "push"),
    "its tokens": (RunningRequest, "accept"),
    "its commit": (DecodingRows, "extend"),
    "its beginning": (DecodingRows, "open"),
    "its row": (Executor, "allocate"),
    "its place in the queue": (AdmissionQueue, "remove"),
}


@pytest.mark.parametrize(("owner", "name"), ROW.values(), ids=ROW)
def test_a_fault_in_one_row_ends_its_request_alone(
    bench: EngineBench,
    texts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
) -> None:
    real, calls = getattr(owner, name), 0

    def once(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise Bad("it is broken")
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, once)
        outputs = bench.serve()
    failed = [one for one in outputs if one.finish_reason == "error"]
    assert len(failed) == 1
    assert "it is broken" in (failed[0].error or "")
    for output, text in zip(outputs, texts, strict=True):
        assert output.token_ids == text[: len(output.token_ids)]
        assert output is failed[0] or output.token_ids == text


def test_an_output_that_cannot_be_made_is_an_error_and_frees_its_row(
    bench: EngineBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(RunningRequest, "finish", fails)
        outputs = bench.serve()
    assert {output.finish_reason for output in outputs} == {"error"}
    assert {output.token_ids == [] for output in outputs} == {True}
    assert bench.engine.state().running == 0


def test_the_target_ends_what_was_planned_and_the_next_cycle_works(
    bench: EngineBench, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def burn(executor: Executor, plan: Plan) -> CycleResult:
        raise TargetError("target failed: on fire", [ModelFailure("small", Bad("too"))])

    handles = [bench.submit(one) for one in PROMPTS]
    bench.engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(Executor, "run", burn)
        bench.engine.step()
    outputs = bench.finish(handles)
    assert [one.error for one in outputs] == ["target failed: on fire"] * 3 + [None]
    assert outputs[3].token_ids == texts[3]
    assert bench.engine.state().quarantines["small"] >= 1


def test_a_target_that_fails_in_every_cycle_is_a_failure_of_the_engine(
    bench: EngineBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def burn(executor: Executor, plan: Plan) -> CycleResult:
        raise TargetError("target failed: on fire", [])

    def failing(cycles: int) -> None:
        for _ in range(cycles):
            handle = bench.submit(PROMPTS[0])
            with monkeypatch.context() as patch:
                patch.setattr(Executor, "run", burn)
                bench.engine.step()
            assert handle.result().error == "target failed: on fire"

    failing(MOST_TARGET_FAILURES - 1)
    assert bench.finish([bench.submit(PROMPTS[0])])[0].error is None, "it counts anew"
    failing(MOST_TARGET_FAILURES - 1)
    with pytest.raises(TargetError, match="on fire"):
        failing(1)


def test_a_row_with_an_error_ends_after_its_tokens_unless_they_ended_its_text(
    bench: EngineBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Executor.run

    def odd(executor: Executor, plan: Plan) -> CycleResult:
        result = run(executor, plan)
        result.errors = dict.fromkeys((0, 1), "bad")
        return result

    one = SamplingParams(max_new_tokens=1, ignore_eos=True)
    handles = [bench.submit(PROMPTS[0]), bench.submit(PROMPTS[1], one)]
    with monkeypatch.context() as patch:
        patch.setattr(Executor, "run", odd)
        bench.engine.step()
    outputs = bench.finish(handles)
    assert [(one.finish_reason, one.error) for one in outputs] == [
        ("error", "bad"),
        ("length", None),
    ]
    assert all(one.token_ids for one in outputs)


def test_the_time_of_a_token_is_the_last_that_made_sense(
    bench: EngineBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bench.engine
    before = engine.baseline_tpot_ms(), engine.predicted_prefill_ms()
    assert min(before) > 0.0
    with monkeypatch.context() as patch:
        patch.setattr(PerformanceProfiler, "snapshot", fails)
        assert (engine.baseline_tpot_ms(), engine.predicted_prefill_ms()) == before


def test_a_wait_that_cannot_be_told_is_the_shortest(
    bench: EngineBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for broken in (fails, lambda *_: math.nan):
        with monkeypatch.context() as patch:
            patch.setattr(AdmissionPace, "seconds_per_request", broken)
            assert bench.engine.seconds_until_admitted(5) == 1.0


def test_requests_that_ask_for_more_than_is_left_wait_for_memory(
    small_config: dict[str, Any], texts: list[list[int]]
) -> None:
    room = len(PROMPTS[0]) + GREEDY.max_new_tokens
    bench = EngineBench(small_config, kv_budget_tokens=room)
    handles = [bench.submit(one) for one in PROMPTS]
    bench.engine.step()
    assert (bench.engine.state().running, bench.engine.free_rows) == (1, 0)
    assert [output.token_ids for output in bench.finish(handles)] == texts
    assert bench.faults() == {}
