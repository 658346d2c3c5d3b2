"""Simulated time: what a cycle takes and brings, by the engine's own decisions."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from research.named_policies import POLICIES
from research.sim.knowledge import learned_times
from research.sim.machine import Machine
from research.sim.service import SimulatedService
from research.sim.text import LEAST, SimulatedText
from specrouter.bench.replay import LoadRequest, ReplayOutcome, replay
from specrouter.config import TreesConfig
from specrouter.cycle import ChainGroup
from specrouter.profile.time_curve import TimeCurve
from specrouter.request.objective import Stage
from specrouter.routing.planner import Plan
from specrouter.slo.admission import Admission, fcfs
from specrouter.view import EngineView
from tests.load_requests import load_request
from tests.specrouter.views import by_row, entries_of

# A cycle's view, admission, the view with those who came, and the plan.
Seen = tuple[EngineView, Admission, EngineView, Plan | None]

STEP_MS, EACH_MS, DRAFT_MS = 20.0, 1.0, 0.5
CHUNK, ROWS = 32, 4


def service(
    acceptance: float = 0.7,
    rows: int = ROWS,
    draft_ms: float = DRAFT_MS,
    kv_tokens: int | None = None,
    **given: Any,
) -> SimulatedService:
    """A pass takes 20 ms, and 1 ms more for every token after the first."""
    times = {
        "small": TimeCurve(((1, draft_ms), (512, draft_ms))),
        "big": TimeCurve(((1, STEP_MS), (513, STEP_MS + 512 * EACH_MS))),
    }
    machine = Machine(
        target="big",
        times=times,
        parameters={"small": 1, "big": 100},
        prefill_chunk=CHUNK,
        max_requests=rows,
        kv_tokens=kv_tokens,
    )
    return SimulatedService(machine=machine, acceptance=acceptance, trees=TreesConfig(), **given)


def request(
    at_s: float = 0.0,
    prompt: int = 8,
    tokens: int = 16,
    objective_ms: float | None = None,
    seed: int = 0,
) -> LoadRequest:
    return load_request(
        at_s=at_s, token_ids=(0,) * prompt, new_tokens=tokens, seed=seed, objective_ms=objective_ms
    )


def run(
    policy: str, requests: list[LoadRequest], acceptance: float = 0.7, **settings: Any
) -> list[ReplayOutcome]:
    simulated = service(acceptance, **settings)
    simulated.use(policy)
    return replay(requests, simulated, simulated)


def test_a_long_prompt_is_read_in_chunks_beside_others() -> None:
    first, second = run("target-only", [request(tokens=40), request(0.1, prompt=3 * CHUNK)])
    chunks = 3 * (STEP_MS + CHUNK * EACH_MS)  # one row decodes beside each
    assert second.answer.ttft_ms == pytest.approx(chunks, abs=STEP_MS)
    assert first.answer.tpot_ms is not None
    assert first.answer.tpot_ms > STEP_MS


def test_who_finds_no_row_waits_for_one() -> None:
    many = [request(seed=seed) for seed in range(ROWS + 1)]
    times = [outcome.answer.ttft_ms or 0.0 for outcome in run("target-only", many)]
    assert max(times[:ROWS]) < 100.0 < times[ROWS]


def test_drafts_that_are_accepted_save_passes() -> None:
    [alone] = run("target-only", [request(tokens=200)])
    [greedy] = run("global-greedy", [request(tokens=200)], 0.9)
    assert greedy.answer.acceptance_length is not None
    assert greedy.answer.acceptance_length > 2.0
    assert (greedy.answer.tpot_ms or 0.0) < 0.7 * (alone.answer.tpot_ms or 0.0)


def test_drafts_that_cost_too_much_are_not_made() -> None:
    [outcome] = run("goodput", [request(tokens=50)], LEAST, draft_ms=50.0)
    assert outcome.answer.acceptance_length == 1.0


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_every_request_and_the_same_seeds_give_the_same(policy: str) -> None:
    load = [request(at / 20, 8 + at, 24, (None, 25.0, 60.0)[at % 3], seed=at) for at in range(12)]
    found = run(policy, load)
    assert [outcome.answer.tokens for outcome in found] == [24] * 12
    assert all(outcome.answer.error is None for outcome in found)
    assert run(policy, load) == found


# One machine for policies, in a simulation and in the engine


def recorded(policy: str, load: list[LoadRequest], **given: Any) -> list[Seen]:
    """Every cycle of a run: what was decided from what."""
    seen: list[Seen] = []
    simulated = service(watch=lambda *each: seen.append(each), **given)
    simulated.use(policy)
    replay(load, simulated, simulated)
    return seen


def mixed(count: int = 24) -> list[LoadRequest]:
    """Short and long prompts, with and without objectives, more than there are rows for."""
    return [
        request(at / 30, 4 + 13 * (at % 7), 12 + at % 9, (None, 25.0, 60.0)[at % 3], seed=at)
        for at in range(count)
    ]


@pytest.mark.parametrize("policy", ["target-only", "spec-4", "global-greedy", "slo", "goodput"])
def test_a_view_that_was_recorded_is_planned_the_same_again(policy: str) -> None:
    cycles = [each for each in recorded(policy, mixed()) if each[3] is not None]
    assert len(cycles) > 40
    again = service()
    again.use(policy)
    for _, admission, view, plan in cycles:
        found = again.planner.plan(view, admission)
        assert plan is not None
        assert [group_of(each) for each in found.groups] == [group_of(g) for g in plan.groups]
        assert found.prefill_rows.tolist() == plan.prefill_rows.tolist()
        assert found.prefill_counts.tolist() == plan.prefill_counts.tolist()
        assert (found.budget_nodes, found.records) == (plan.budget_nodes, plan.records)
        assert found.standing.waited == plan.standing.waited
        if plan.selector is not None and found.selector is not None:
            running = view.running.by_row()
            decoding = running.row[~running.among(admission.paused) & (running.unread == 0)]
            drafts = SimulatedText(0.6).draw(len(decoding), (2, 2), np.random.default_rng(0))
            asked = decoding, drafts.candidates, 0
            np.testing.assert_array_equal(found.selector(*asked), plan.selector(*asked))


def group_of(group: ChainGroup) -> tuple[Any, ...]:
    return group.chain, group.shape, group.rows.tolist(), group.whole, group.predicted


def test_what_a_plan_leaves_behind_comes_back_with_the_next_view() -> None:
    for one, after in pairwise(recorded("goodput", mixed())):
        plan = one[3]
        assert plan is not None
        assert after[0].standing is plan.standing


def test_admission_is_decided_by_the_engine_s_policy_and_done_as_it_says() -> None:
    policy, cycles = fcfs(CHUNK), recorded("goodput", mixed(), kv_tokens=200)
    assert any(admission.waits_for_memory for _, admission, *_ in cycles)
    for before, admission, view, plan in cycles:
        assert admission == policy(before)
        came = view.running.id[len(before.running) :]
        assert came.tolist() == list(admission.admitted)
        assert plan is not None
        read = dict(zip(plan.prefill_rows.tolist(), plan.prefill_counts.tolist(), strict=True))
        for row, count in read.items():
            assert admission.chunks[by_row(view)[row].id] == count


def test_memory_binds() -> None:
    load = [request(0.0, 10, 20, seed=at) for at in range(6)]
    cycles = recorded("target-only", load, kv_tokens=70)
    running = [view.running.kv_tokens.tolist() for _, _, view, _ in cycles]
    assert max(map(len, running)) == 2, "the third of 30 tokens does not fit, though rows are free"
    assert all(sum(each) <= 70 for each in running)
    assert all(view.kv_free_tokens == 70 - 30 * len(view.running) for view, *_ in cycles)


def test_what_can_never_fit_is_refused_at_once() -> None:
    found = run("target-only", [request(0.0, 10, 20), request(0.0, 60, 20)], kv_tokens=70)
    assert [one.answer.tokens for one in found] == [20, 0]
    assert found[1].answer.error == "needs 80 KV tokens of 70"
    assert run("target-only", [request(0.0, 60, 20, 9.0)], kv_tokens=70)[0].is_attained is False


def test_every_arrival_ends_or_is_counted_unfinished() -> None:
    simulated = service(0.7)
    simulated.use("goodput")
    found = replay(mixed(60), simulated, simulated, drain_s=0.3)
    unfinished = [one for one in found if one.answer.error == "cancelled"]
    ended = [one for one in found if one.answer.error is None]
    assert len(found) == 60
    assert len(unfinished) + len(ended) == 60
    assert 0 < len(unfinished) < 60
    assert all(one.answer.tokens == one.request.new_tokens for one in ended)
    assert all(one.answer.tokens < one.request.new_tokens for one in unfinished)


def test_one_request_on_one_model_takes_its_prompt_and_a_pass_for_each_token() -> None:
    times = TimeCurve(((1, STEP_MS), (513, STEP_MS + 512 * EACH_MS)))
    alone = SimulatedService(
        machine=Machine(
            target="big",
            times={"big": times},
            parameters={"big": 1},
            prefill_chunk=64,
            max_requests=4,
        ),
        acceptance=0.7,
        trees=TreesConfig(),
    )
    for policy in ("target-only", "goodput", "spec-4"):
        alone.use(policy)
        [found] = replay([request(prompt=40, tokens=11)], alone, alone)
        assert found.answer.ttft_ms == pytest.approx(times.at(40))
        assert found.answer.e2e_ms == pytest.approx(times.at(40) + 10 * times.at(1))


def test_where_drafters_read_prompts_for_nothing_drafts_begin_at_once() -> None:
    def tokens_s(free: bool) -> float:
        simulated = service(0.9)
        simulated.machine = replace(simulated.machine, free_drafter_prefill=free)
        simulated.use("spec-4")
        [found] = replay([request(prompt=200, tokens=20)], simulated, simulated)
        return found.end_s

    assert tokens_s(True) < tokens_s(False)


def test_of_several_models_the_scheduler_chooses_the_chain() -> None:
    """A weak drafter is seldom right for the target, and often for a dear one that is."""
    flat = {"weak": 0.5, "middle": 12.0, "big": 100.0}
    times = {name: TimeCurve(((1, ms), (512, ms))) for name, ms in flat.items()}
    sizes = {"weak": 1, "middle": 10, "big": 100}
    known = {("weak", "middle"): 0.9, ("weak", "big"): 0.4, ("middle", "big"): 0.9}
    machine = Machine(
        target="big",
        times=times,
        parameters=sizes,
        prefill_chunk=CHUNK,
        max_requests=ROWS,
        acceptance=known,
    )
    chains: list[tuple[str, ...]] = []

    def watch(
        before: EngineView, admission: Admission, view: EngineView, plan: Plan | None
    ) -> None:
        chains.extend(group.chain for group in (plan.groups if plan is not None else ()))

    simulated = SimulatedService(machine=machine, acceptance=0.5, trees=TreesConfig(), watch=watch)
    simulated.use("global-greedy")
    [found] = replay([request(tokens=200)], simulated, simulated)
    assert chains.count(("weak", "middle", "big")) > 0.9 * len(chains)
    assert (found.answer.acceptance_length or 0.0) > 3.0


def test_a_policy_may_take_rows_back_and_texts_go_on_where_they_were() -> None:
    given_up: list[int] = []
    usual = fcfs(CHUNK)

    def urgent_first(view: EngineView) -> Admission:
        """Takes the row of the first request for the third, once."""
        running = view.running
        late = view.waiting.take(~np.isnan(view.waiting.tpot_ms))
        victims = running.id[np.isnan(running.tpot_ms) & (running.decoded >= 5)].tolist()
        if given_up or not len(late) or not victims:
            return usual(view)
        given_up.append(victims[0])
        found = usual(replace(view.without(victims[:1]), free_rows=1, waiting=late))
        return replace(found, preempted=(victims[0],))

    load = [request(0.0, 8, 60), request(0.0, 8, 60, seed=1), request(0.3, 8, 10, 30.0, seed=2)]
    simulated = service(rows=2, admission=urgent_first)
    simulated.use("target-only")
    found = replay(load, simulated, simulated)
    waiting = run("target-only", load, rows=2)
    assert given_up == [0]
    assert [one.answer.tokens for one in found] == [60, 60, 10]
    assert (found[2].answer.ttft_ms or 0.0) < 0.1 * (waiting[2].answer.ttft_ms or 0.0)
    assert found[0].answer.ttft_ms == waiting[0].answer.ttft_ms, "its first token had come before"
    assert (found[0].answer.tpot_ms or 0.0) > (waiting[0].answer.tpot_ms or 0.0)


def test_a_policy_may_limit_what_is_drafted_for_a_request() -> None:
    usual = fcfs(CHUNK)
    cycles: list[Seen] = []
    simulated = service(
        0.9,
        admission=lambda view: replace(usual(view), depths={0: 1, 1: 0}),
        watch=lambda *each: cycles.append(each),
    )
    simulated.use("spec-4")
    load = [request(0.0, 8, 30, 40.0, seed=at) for at in range(3)]
    found = replay(load, simulated, simulated)
    assert [one.answer.tokens for one in found] == [30] * 3
    depths: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
    for _, _, view, plan in cycles:
        for group in plan.groups if plan is not None else ():
            for row in group.rows.tolist():
                depths[by_row(view)[row].id].add(group.shape.depth * (len(group.chain) > 1))
    assert depths == {0: {0, 1}, 1: {0}, 2: {0, 4}}  # first tokens come without drafts


def test_a_policy_may_pause_requests_and_decline_their_objectives() -> None:
    usual = fcfs(CHUNK)
    seen: list[EngineView] = []

    def policy(view: EngineView) -> Admission:
        seen.append(view)
        found = usual(view)
        late = view.cycle < 30
        paused = frozenset(one for one in view.running.id.tolist() if one == 0 and late)
        declined = (1,) if view.cycle == 1 else ()
        return replace(found, paused=paused, declined=declined)

    simulated = service(admission=policy)
    simulated.use("target-only")
    load = [request(0.0, 8, 10, 30.0), request(0.0, 8, 60, 30.0, seed=1)]
    first, second = replay(load, simulated, simulated)
    assert [first.answer.tokens, second.answer.tokens] == [10, 60]
    assert first.is_attained is False
    assert (first.answer.tpot_ms or 0.0) > 2 * (second.answer.tpot_ms or 0.0)
    assert seen[1].running.declined.tolist() == [False, True]


def test_the_first_token_is_judged() -> None:
    load = [replace(request(0.0, 40, 8), ttft_ms=limit) for limit in (50.0, 500.0)]
    assert [run("target-only", [one])[0].is_attained for one in load] == [False, True]


def test_stages_are_judged_each_by_its_own_objective() -> None:
    def attained(*stages: Stage) -> bool | None:
        slow = [request(0.1, 3 * CHUNK, 8, seed=1)]  # whose prompt delays the first one's tokens
        first = replace(request(0.0, 8, 40), stages=stages)
        return run("target-only", [first, *slow])[0].is_attained

    assert attained(Stage(40.0, 20), Stage(24.0))
    assert not attained(Stage(24.0, 20), Stage(40.0))
    assert not attained(Stage(40.0, 20), Stage(19.0))


def test_what_a_policy_is_told_of_a_request_is_of_its_stage() -> None:
    load = [replace(request(0.0, 8, 10), stages=(Stage(50.0, 5), Stage(30.0)))]
    views = [
        one for before, *_ in recorded("target-only", load) for one in entries_of(before.running)
    ]
    assert [(one.tpot_ms, one.decoded) for one in views] == [
        *((50.0, count) for count in range(4)),
        *((30.0, count) for count in range(5)),
    ]


@pytest.mark.parametrize("policy", ["spec-4", "goodput"])
def test_an_engine_that_learns_comes_near_one_that_knows(policy: str) -> None:
    load = [request(at / 4, 8, 64, seed=at) for at in range(12)]
    learning = service(0.8, knowledge=lambda machine, texts: learned_times(machine))
    learning.use(policy)
    found = replay(load, learning, learning)
    known = run(policy, load, 0.8)
    assert [one.answer.tokens for one in found] == [64] * 12
    took, at_best = (sum(one.answer.tpot_ms or 0.0 for one in each) for each in (found, known))
    assert took < 1.25 * at_best
