"""Who loses a row keeps the tokens and ends once, with the text that there would have been."""

from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np
import pytest

from specrouter import (
    ChainRouter,
    EngineDeadError,
    RequestOutput,
    SamplingParams,
    Speculation,
    Structure,
)
from specrouter.config.policies import ADMISSION_POLICIES
from specrouter.engine.engine import Engine
from specrouter.engine.slo_accounts import AdmissionCounts
from specrouter.request.handle import RequestHandle
from specrouter.request.objective import Objective
from specrouter.request.output import Feasible
from specrouter.slo.admission import Admission, Admit, fcfs
from specrouter.view import EngineView
from test_support.params import seeded_params
from test_support.preemption import preempting_router
from test_support.routers import assert_whole
from tests.specrouter.engine.engines import GREEDY, PROMPTS, EngineBench, changed
from tests.specrouter.views import by_row, entries_of, table

NEW = 20
CHAIN = ("small", "middle", "target")
OVERRIDES = (None, "off", Speculation(CHAIN, 3, 2), Speculation(("ngram", "target"), 4))
JSON = Structure("json_schema", {"type": "array", "items": {"type": "integer"}, "maxItems": 4})


@pytest.fixture(scope="module")
def router(small_config: dict[str, Any]) -> Iterator[ChainRouter]:
    settings = changed(small_config, "ngram", max_requests=6, prefill_chunk=16)
    with ChainRouter.from_config(settings) as router:
        yield router
        assert_whole(router)


def prompt_of(index: int) -> list[int]:
    draws = np.random.default_rng(index)
    return [int(each) for each in draws.integers(0, 300, int(draws.integers(1, 40)))]


def asked() -> list[tuple[list[int], SamplingParams, Any, tuple[int, ...]]]:
    """All sampling parameters, alone and together; some go on after an earlier attempt."""
    sampled = SamplingParams(max_new_tokens=NEW, temperature=1.0, seed=5, ignore_eos=True)
    params = [
        *(seeded_params(index, NEW) for index in range(24)),
        replace(sampled, logprobs=3, prompt_logprobs=2),
        replace(sampled, logprobs=0, temperature=0.0),
        replace(sampled, stop=("e", "th"), max_new_tokens=40),
        replace(sampled, stop=("a",), include_stop_str_in_output=True, max_new_tokens=40),
        replace(sampled, structure=JSON, ignore_eos=False, max_new_tokens=40),
    ]
    requests = [
        (prompt_of(index), each, OVERRIDES[index % len(OVERRIDES)], ())
        for index, each in enumerate(params)
    ]
    before = tuple(prompt_of(99)[:7])
    return [*requests, *((prompt, each, how, before) for prompt, each, how, _ in requests[-4:-2])]


def served(router: ChainRouter) -> tuple[list[RequestOutput], list[str]]:
    """Outputs, and what was told of each text as it came."""
    handles: list[RequestHandle] = []
    for prompt, params, speculation, before in asked():
        handles.append(router.submit(prompt, params, speculation, before))
    handles += router.submit_all(prompt_of(7), replace(asked()[0][1], n=3, temperature=1.0))
    told = ["".join(delta.text for delta in handle) for handle in handles]
    return [handle.result(timeout=60) for handle in handles], told


FACTS = attrgetter("token_ids", "text", "finish_reason", "stop_reason", "seed", "index", "error")


def numbers(output: RequestOutput) -> list[float]:
    """Of all log-probabilities."""
    every = [*(output.logprobs or ()), *(output.prompt_logprobs or ())]
    return [one.logprob for one in every if one is not None]


def test_texts_are_those_of_requests_that_ran_undisturbed(router: ChainRouter) -> None:
    plain, told_plain = served(router)
    with preempting_router(router, 0.12) as disturbed:
        outputs, told = served(router)
    assert disturbed.count >= 40
    assert list(map(FACTS, outputs)) == list(map(FACTS, plain))
    assert told == told_plain, "nothing is told twice"
    for one, other in zip(outputs, plain, strict=True):
        assert numbers(one) == pytest.approx(numbers(other), abs=1e-9)
    assert {one.finish_reason for one in outputs} >= {"length", "stop", "eos"}


def test_prompts_are_told_of_once(router: ChainRouter) -> None:
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True, prompt_logprobs=1)
    with preempting_router(router, 0.25):
        handle = router.submit(prompt_of(3), params)
        told = [delta.prompt_logprobs for delta in handle if delta.prompt_logprobs is not None]
    assert len(told) == 1
    assert len(told[0]) == len(prompt_of(3))


# One engine, step by step


class Scripted:
    """`fcfs`, but rows of `takes` requests, the first ones, are taken in the next cycle, and nobody
    is admitted while it `holds`."""

    def __init__(self, engine: Engine) -> None:
        self.takes = 0
        self.holds = False
        self.declines = False
        self.seen: list[EngineView] = []
        self._usual = fcfs(32)
        engine.policies.admission = "slo"
        engine.policies.admits = self

    def __call__(self, view: EngineView) -> Admission:
        self.seen.append(view)
        taken, self.takes = tuple(view.running.id[: self.takes].tolist()), 0
        waiting = view.waiting
        shown = table([]) if self.holds else waiting
        seen = replace(view.without(taken), waiting=shown)
        asked = waiting.id[~np.isnan(waiting.ttft_ms) & ~waiting.declined].tolist()
        declined = tuple(asked) if self.declines else ()
        return replace(self._usual(seen), preempted=taken, declined=declined)


@pytest.fixture
def bench(small_config: dict[str, Any]) -> EngineBench:
    return EngineBench(small_config)


@pytest.fixture
def script(bench: EngineBench) -> Scripted:
    return Scripted(bench.engine)


def preempted(
    bench: EngineBench, script: Scripted, steps: int = 4, objective: Objective | None = None
) -> RequestHandle:
    """One that has tokens, and waits."""
    handle = bench.submit(PROMPTS[0], objective=objective)
    for _ in range(steps):
        bench.engine.step()
    script.takes, script.holds = 1, True
    bench.engine.step()
    assert (bench.engine.waiting, len(bench.engine.book.running)) == (1, 0)
    bench.engine.check_integrity()
    return handle


def told(handle: RequestHandle) -> list[int]:
    return [token for delta in handle for token in delta.token_ids]


def test_who_waits_again_is_seen_with_its_tokens(bench: EngineBench, script: Scripted) -> None:
    preempted(bench, script)
    bench.engine.step()
    [seen] = entries_of(script.seen[-1].waiting)
    tokens = GREEDY.max_new_tokens - seen.remaining
    assert tokens > 1
    assert (seen.row, seen.decoded) == (None, tokens - 1)
    assert seen.unread == 0  # what it has read is cached, and nobody has wanted the memory
    assert seen.decode_ms > 0.0
    before = by_row(script.seen[-2])[0]
    assert seen.priority_key == before.priority_key
    assert not seen.awaits_first


def test_it_comes_before_those_that_came_later(bench: EngineBench, script: Scripted) -> None:
    first = preempted(bench, script)
    bench.submit(PROMPTS[1])
    bench.engine.step()
    assert script.seen[-1].waiting.id.tolist() == [1, 2]
    script.holds = False
    [output] = bench.finish([first])
    assert output.finish_reason == "length"


@pytest.mark.parametrize("steps", [1, 2, 3, 6, 9])
def test_it_goes_on_with_its_text(bench: EngineBench, script: Scripted, steps: int) -> None:
    [plain] = bench.finish([bench.submit(PROMPTS[0])])
    handle = preempted(bench, script, steps)
    script.holds = False
    [output] = bench.finish([handle])
    assert output.token_ids == plain.token_ids == told(handle)
    assert output.metrics.output_tokens == GREEDY.max_new_tokens
    counts = bench.engine.steps.counts.figures()
    assert counts.prompt_tokens == 2 * len(PROMPTS[0]), "prompts are counted once"


@pytest.mark.parametrize("reason", ["cancelled", "timeout"])
def test_who_leaves_while_it_waits_ends_with_its_tokens(
    bench: EngineBench, script: Scripted, reason: str
) -> None:
    handle = preempted(bench, script)
    [request] = bench.engine.book.waiting
    if reason == "cancelled":
        handle.cancel()
    else:
        request.spec = replace(request.spec, timeout_s=1e-9)
    bench.engine.step()
    output = handle.result(timeout=0)
    assert output.finish_reason == reason
    assert output.token_ids == told(handle) != []
    assert not bench.engine.has_work
    bench.engine.check_integrity()


def test_when_the_engine_fails_it_ends_with_the_tokens_it_had(
    bench: EngineBench, script: Scripted
) -> None:
    handle, other = preempted(bench, script), bench.submit(PROMPTS[1])
    had = sum(one.produced_tokens for one in bench.engine.book.waiting)
    assert had > 0
    bench.engine.abandon("no memory")
    for one, tokens in ((handle, had), (other, 0)):
        with pytest.raises(EngineDeadError, match="no memory") as caught:
            one.result(timeout=0)
        assert caught.value.output is not None
        assert len(caught.value.output.token_ids) == tokens


def test_its_row_and_its_memory_are_others(bench: EngineBench, script: Scripted) -> None:
    handles = [bench.submit(prompt) for prompt in PROMPTS[:3]]
    handles.append(bench.submit(PROMPTS[3], objective=Objective(tpot_ms=None, ttft_ms=1e6)))
    for _ in range(3):
        bench.engine.step()
    assert len(script.seen[-1].waiting) == 1, "it is shown though no row is free"
    script.takes = 2
    outputs = bench.finish(handles)
    assert {one.finish_reason for one in outputs} == {"length"}
    assert max(len(seen.running) for seen in script.seen) == 3


# Declined


def declined(bench: EngineBench, script: Scripted, choice: Any) -> RequestHandle:
    """A request whose objective will not be attained, beside one that has none."""
    script.declines = True
    objective = Objective(tpot_ms=None, ttft_ms=1.0, slo_class="chat", on_unattainable=choice)
    handle = bench.submit(PROMPTS[0], objective=objective)
    bench.submit(PROMPTS[1])
    bench.engine.step()
    return handle


def test_who_is_declined_is_served_as_if_nothing_had_been_asked(
    bench: EngineBench, script: Scripted
) -> None:
    handle = declined(bench, script, "best_effort")
    [output] = bench.finish([handle])
    assert output.finish_reason == "length"
    assert by_row(script.seen[-1])[0].declined
    counts = bench.engine.book.slo_accounts.admissions()
    assert counts["chat"] == AdmissionCounts(declined=1, best_effort=1)
    assert counts["none"] == AdmissionCounts(best_effort=1)


def test_who_wants_to_be_rejected_ends_with_what_is_feasible(
    bench: EngineBench, script: Scripted
) -> None:
    output = declined(bench, script, "reject").result(timeout=0)
    assert script.seen[0].waiting.rejects.tolist() == [True, False]
    assert (output.finish_reason, output.error_field) == ("error", "unattainable")
    assert output.token_ids == []
    assert output.error is not None
    assert output.error.startswith("the objective cannot be attained")
    assert output.feasible == Feasible(), "this policy would admit nothing else"
    assert bench.engine.book.slo_accounts.admissions()["chat"] == AdmissionCounts(
        declined=1, rejected=1
    )
    assert not bench.faults()
    bench.engine.step()
    bench.engine.check_integrity()


def test_while_no_row_is_free_only_an_objective_is_worth_a_look_at_the_queue(
    bench: EngineBench, script: Scripted
) -> None:
    handles = [bench.submit(prompt) for prompt in PROMPTS]
    for _ in range(3):
        bench.engine.step()
    assert [len(seen.waiting) for seen in script.seen] == [4, 0, 0]
    bench.finish(handles)


def test_who_has_a_token_is_not_rejected(bench: EngineBench, script: Scripted) -> None:
    objective = Objective(tpot_ms=None, ttft_ms=1.0, on_unattainable="reject")
    handle = preempted(bench, script, objective=objective)
    script.holds, script.declines = False, True
    [output] = bench.finish([handle])
    assert output.finish_reason == "length"
    running = [one for view in script.seen for one in entries_of(view.running)]
    assert not any(one.rejects for one in running if one.decoded)
    assert bench.engine.book.slo_accounts.admissions()["default"].declined == 1


def test_a_live_policy_names_what_it_would_admit(small_config: dict[str, Any]) -> None:
    bench = EngineBench(small_config, admission="slo")
    for tpot_ms in (1e-6, 1e4):
        objective = Objective(tpot_ms=tpot_ms, ttft_ms=1e4, on_unattainable="reject")
        handle = bench.submit(PROMPTS[0], objective=objective)
        [output] = bench.finish([handle])
        if tpot_ms == 1e4:
            assert output.metrics.attained
            break
        assert output.error_field == "unattainable"
        assert output.feasible is not None
        assert output.feasible.tpot_ms is not None
        assert 1e-6 < output.feasible.tpot_ms < 1e4
        assert "tpot_ms" in (output.error or "")
    assert not bench.faults()


def test_without_objectives_the_live_policies_decide_as_first_come_first_served(
    small_config: dict[str, Any],
) -> None:
    bench = EngineBench(small_config, prefill_chunk=5)
    policies = bench.engine.policies
    usual, policy = fcfs(5), ADMISSION_POLICIES.find("slo")
    slo: Admit = policy.for_engine(bench.engine._config.engine, "target")
    decided = []

    def both(view: EngineView) -> Admission:
        one, other = slo(view), usual(view)
        assert one == other
        decided.append(one)
        return one

    policies.admission, policies.admits = "slo", both
    bench.serve()
    assert sum(len(one.admitted) for one in decided) == len(PROMPTS)
    assert not bench.faults()
