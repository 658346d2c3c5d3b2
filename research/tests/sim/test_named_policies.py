"""Named policies, cycle by cycle, against their definitions."""

from __future__ import annotations

import numpy as np
import pytest

from research.named_policies import POLICIES
from research.policies.adaserve import SPECINFER_TREE
from research.sim.machine import MACHINES, load_machine
from research.sim.service import SimulatedService
from specrouter.bench.replay import LoadRequest, ReplayOutcome, replay
from specrouter.config import TreesConfig
from specrouter.request.objective import Stage
from specrouter.request.params import MAX_TREE_TOKENS
from specrouter.routing.planner import Plan
from specrouter.slo.admission import Admission
from specrouter.view import EngineView
from tests.load_requests import load_request
from tests.specrouter.views import by_row, entries_of

LLAMA, QWEN, OPT = "adaserve-llama70b", "adaserve-qwen32b", "slos-serve-opt-6.7b"
Seen = tuple[EngineView, Admission, EngineView, Plan | None]


def load(count: int, gap_s: float = 0.05, prompt: int = 200, tokens: int = 40) -> list[LoadRequest]:
    tpots_ms = (36.0, 50.0, 150.0)
    return [
        load_request(
            at_s=gap_s * at,
            token_ids=(0,) * prompt,
            new_tokens=tokens,
            seed=at,
            objective_ms=tpots_ms[at % 3],
        )
        for at in range(count)
    ]


def run(
    policy: str, requests: list[LoadRequest], machine: str = LLAMA, batch_tokens: int | None = None
) -> tuple[list[Seen], list[ReplayOutcome]]:
    seen: list[Seen] = []
    service = SimulatedService(
        machine=load_machine(MACHINES / f"{machine}.yaml"),
        acceptance=0.7,
        trees=TreesConfig(),
        watch=lambda *each: seen.append(each),
        batch_tokens=batch_tokens,
    )
    service.use(policy)
    return seen, replay(requests, service, service)


def drafting(plan: Plan | None) -> list[tuple[int, int, int]]:
    """Rows, depth and width of each group that drafts."""
    groups = [] if plan is None else [group for group in plan.groups if len(group.chain) > 1]
    return [(len(one.rows), one.shape.depth, one.shape.width) for one in groups]


@pytest.mark.parametrize("policy", [name for name in POLICIES if name.startswith("vllm")])
def test_vllm_never_reads_a_prompt_beside_requests_that_decode(policy: str) -> None:
    cycles, outcomes = run(policy, load(12))
    assert all(one.answer.tokens == 40 for one in outcomes)
    stalls = 0
    for _, admission, view, plan in cycles:
        assert plan is not None
        if admission.chunks:
            firsts = sum(len(group.rows) for group in plan.groups)
            assert firsts == len(admission.chunks), "whole prompts, and their first tokens"
            stalls += len(view.running) > len(admission.chunks)
    assert stalls > 3


@pytest.mark.parametrize("depth", [4, 6, 8])
def test_vllm_spec_always_drafts_as_many_tokens(depth: int) -> None:
    cycles, _ = run(f"vllm-spec-{depth}", load(12))
    for _, admission, view, plan in cycles:
        if not admission.chunks:
            able = (view.running.remaining > 1).any()
            assert {(d, w) for _, d, w in drafting(plan)} <= {(depth, 1)}
            assert bool(able) == bool(drafting(plan)), "whatever it costs"


def test_vllm_does_not_draft() -> None:
    assert not any(drafting(plan) for *_, plan in run("vllm", load(12))[0])
    assert not any(drafting(plan) for *_, plan in run("sarathi", load(12))[0])


def test_sarathi_keeps_its_batches_within_what_was_chosen() -> None:
    sizes = set()
    for _, admission, view, plan in run("sarathi", load(30), batch_tokens=96)[0]:
        assert plan is not None
        decoding = int((view.running.unread == 0).sum())
        sizes.add(decoding + sum(admission.chunks.values()))
        assert not admission.paused
    assert max(sizes) == 96


def test_specinfer_drafts_its_tree_for_everybody() -> None:
    cycles, _ = run("specinfer", load(12))
    groups = [group for *_, plan in cycles if plan is not None for group in plan.groups]
    assert {group.branching for group in groups if len(group.chain) > 1} == {SPECINFER_TREE}


@pytest.mark.parametrize(
    ("machine", "budget", "drafter", "depths", "rows"),
    [(LLAMA, 512, 96, (4, 8), 64), (QWEN, 256, 80, (3, 5), 80)],
)
def test_adaserve_has_the_published_shapes_and_budget(
    machine: str, budget: int, drafter: int, depths: tuple[int, int], rows: int
) -> None:
    least, most = depths
    cycles, _ = run("adaserve", load(rows + 4, 0.02), machine)
    shapes = set()
    for _, admission, view, plan in cycles:
        assert plan is not None
        chunks = sum(admission.chunks.values())
        deciding = int((view.running.unread == 0).sum())
        for _, depth, width in drafting(plan):
            # Those who have not read their prompts do not count as active yet.
            wanted = min(max(budget // deciding - 1, least), most)
            assert (depth, width) == (wanted, min(max(drafter // deciding, 1), 3))
            shapes.add((depth, width))
            left = max(0, budget - deciding - chunks)
            assert plan.budget_nodes == min(left, deciding * MAX_TREE_TOKENS), "what trees can have"
    assert len(shapes) > 2, "shapes follow the number of requests"


def test_only_adaserves_second_phase_fills_the_budget() -> None:
    def accepted(policy: str) -> float:
        outcomes = run(policy, load(24, 0.02))[1]
        return float(np.mean([one.answer.acceptance_length or 0.0 for one in outcomes]))

    assert accepted("adaserve") > accepted("adaserve-slo-phase") + 0.2


def test_global_greedy_spends_what_profiled_costs_justify() -> None:
    """By survival times cost: less than AdaServe's budget where that does not pay."""
    plans = [plan for *_, plan in run("global-greedy", load(24, 0.02))[0] if plan is not None]
    assert 0 < max(plan.budget_nodes or 0 for plan in plans) < 512 - 24


@pytest.mark.parametrize("policy", ["slos-serve", "slo"])
def test_admission_bounds_drafts_and_keeps_objectives_of_whom_it_admits(policy: str) -> None:
    asked = [
        load_request(
            at_s=0.15 * at,
            token_ids=(0,) * 700,
            new_tokens=60,
            seed=at,
            objective_ms=(50.0, 100.0)[at % 2],
            ttft_ms=900.0,
            judges_runs=True,
        )
        for at in range(60)
    ]
    cycles, outcomes = run(policy, asked, OPT)
    assert all(one.answer.tokens == 60 for one in outcomes)
    declined = {each for _, admission, *_ in cycles for each in admission.declined}
    kept = [one for number, one in enumerate(outcomes) if number not in declined]
    late = sum(not one.is_attained for one in kept)
    assert late <= 0.05 * len(kept)
    assert sum(bool(one.is_attained) for one in outcomes) > 40
    caps = {cap for _, admission, *_ in cycles for cap in admission.depths.values()}
    assert (len(caps) > 1) == (policy == "slos-serve"), "by tier; `slo` leaves it to the planner"
    for _, admission, view, plan in cycles:
        for group in plan.groups if plan is not None else ():
            for row in group.rows.tolist():
                cap = admission.depths.get(by_row(view)[row].id, 9)
                assert len(group.chain) == 1 or group.shape.depth <= cap


def test_a_published_batch_takes_what_its_terms_say() -> None:
    machine = load_machine(MACHINES / f"{OPT}.yaml")
    [plain] = run("vllm", [load_request(token_ids=(0,) * 300, new_tokens=20)], OPT)[1]
    assert plain.answer.ttft_ms == pytest.approx(0.06878 * 300 + 24.80)
    assert plain.answer.tpot_ms == pytest.approx(0.06878 + 24.80)
    cycles, _ = run("vllm-spec-8", [load_request(token_ids=(0,) * 300, new_tokens=12)], OPT)
    assert machine.batch is not None
    assert machine.batch.ms(9, 8) == pytest.approx(0.07523 * 9 + 3.465 * 8 + 3.033)
    begins = [before.now_s * 1000 for before, *_ in cycles]
    assert begins[2] - begins[1] == pytest.approx(machine.batch.ms(9, 8))


def test_tpot_is_judged_over_runs_of_ten_tokens() -> None:
    """A stall of one prompt is within the mean of 60 tokens, and not within that of ten."""
    stalled = load_request(token_ids=(0,) * 10, new_tokens=61, objective_ms=45.0)
    strict = load_request(token_ids=(0,) * 10, new_tokens=61, objective_ms=45.0, judges_runs=True)
    staged = load_request(
        token_ids=(0,) * 10, new_tokens=61, stages=(Stage(45.0, 41), Stage(45.0)), judges_runs=True
    )
    other = load_request(at_s=0.2, token_ids=(0,) * 1800, new_tokens=2, seed=1)
    found = [run("vllm", [one, other])[1][0] for one in (stalled, strict, staged)]
    assert [one.is_attained for one in found] == [True, False, False]
    assert found[2].answer.attained_stages == (False, True)
    assert (found[1].answer.worst_run_ms or 0.0) > (found[1].answer.tpot_ms or 0.0)


def test_views_tell_how_long_a_run_has_taken() -> None:
    asked = load_request(token_ids=(0,) * 10, new_tokens=25, objective_ms=45.0, judges_runs=True)
    views = [one for before, *_ in run("vllm", [asked])[0] for one in entries_of(before.running)]
    for one in views:
        assert one.run_ms == pytest.approx(30.0 * (one.decoded % 10), abs=1.0)
    usual = load_request(token_ids=(0,) * 10, new_tokens=25, objective_ms=45.0)
    assert all(np.isnan(before.running.run_ms).all() for before, *_ in run("vllm", [usual])[0])


def test_who_has_a_row_and_no_token_awaits_its_first() -> None:
    asked = load_request(token_ids=(0,) * 1200, new_tokens=5, objective_ms=45.0)
    seen = [view.running.awaits_first[0] for _, _, view, _ in run("sarathi", [asked])[0]]
    assert seen == [True] * 3 + [False] * 4
