"""Figures that are no sweep of loads: SLOs-Serve's example, where a cycle's time goes, and
speed-ups of batches."""

import time
from typing import Any

import numpy as np

from research.named_policies import NamedPolicy
from research.sim.machine import Machine
from research.sim.roofline import RooflineTime
from research.sim.service import SimulatedService
from research.sim.text import SimulatedText
from specrouter.bench.replay import LoadRequest, replay
from specrouter.config import TreesConfig
from specrouter.profile.time_curve import TimeCurve
from specrouter.routing.planner import Plan

_UNIT_MS = 100.0
_TOKENS = 6  # in a unit
_CYCLES = 60  # whose selections are timed
_REPEATS = 3
_BATCH_PROMPT, _BATCH_TOKENS = 8, 128  # of the requests of a batch


def figure_3(policy: str) -> dict[str, Any]:
    """How many of four new requests, with prompts of 6 tokens and a TTFT of 6 units, and of three
    that decode with a TPOT of 1 unit, are in time. Every run of ten tokens is judged."""
    batch = RooflineTime(((_UNIT_MS / _TOKENS, 0.0, 0.0),))
    curve = TimeCurve(((1.0, batch.ms(1)), (64.0, batch.ms(64))))
    machine = Machine(
        target="target",
        times={"target": curve},
        parameters={"target": 1},
        prefill_chunk=64,
        max_requests=16,
        batch=batch,
    )
    service = SimulatedService(
        machine=machine, acceptance=0.5, trees=TreesConfig(), batch_tokens=_TOKENS
    )
    service.use(policy)
    old = [_request(0.0, 1, 41, 0.0, place) for place in range(3)]
    new = [_request(1.0, 6, 11, 6.0, 3 + place) for place in range(4)]
    found = replay([*old, *new], service, service)
    return {
        "old": float(sum(bool(one.is_attained) for one in found[:3])),
        "new": float(sum(bool(one.is_attained) for one in found[3:])),
    }


def _request(at_s: float, prompt: int, tokens: int, ttft: float, seed: int) -> LoadRequest:
    return LoadRequest(
        at_s=at_s,
        category="example",
        token_ids=(0,) * prompt,
        new_tokens=tokens,
        temperature=1.0,
        seed=seed,
        objective_ms=_UNIT_MS,
        ttft_ms=_UNIT_MS * ttft or None,
        judges_runs=True,
    )


def shares_of(
    machine: Machine, policy: str, acceptance: float, requests: list[LoadRequest]
) -> dict[str, Any]:
    """Shares of a cycle's time: drafting and verification simulated, selection measured here."""
    plans: list[Plan | None] = []
    service = SimulatedService(
        machine=machine,
        acceptance=acceptance,
        trees=TreesConfig(),
        watch=lambda before, admission, view, plan: plans.append(plan),
    )
    service.use(policy)
    replay(requests, service, service)
    chosen = [one for one in plans if one is not None and one.selector is not None]
    draws, text = np.random.default_rng(0), SimulatedText(acceptance)
    drafting = selection = total = 0.0
    for plan in chosen[:: max(1, len(chosen) // _CYCLES)]:
        groups = [group for group in plan.groups if len(group.chain) > 1]
        for group in groups:
            shape, rows = group.shape, group.rows
            trees = text.draw(len(rows), (shape.width,) * shape.depth, draws)
            drafting += shape.depth * machine.times[group.chain[0]].at(len(rows) * shape.width)
            took = []
            for _ in range(_REPEATS):
                began_s = time.perf_counter()
                assert plan.selector is not None, "it was looked for"
                picked = plan.selector(rows, trees.candidates, 0)
                took.append(1000.0 * (time.perf_counter() - began_s))
            selection += min(took)
            tokens = len(rows) + int(picked.sum()) + int(plan.prefill_counts.sum())
            total += machine.times[machine.target].at(tokens)
    whole = drafting + selection + total
    return {
        "drafting": drafting / whole,
        "selection": selection / whole,
        "verification": total / whole,
    }


def speed_up(machine: Machine, policy: str, batch: int, seed: int) -> dict[str, Any]:
    """Tokens per second of requests that begin together, over those of the target alone.

    `policy`: one of `POLICIES`, or with paths only: `two-level`, the smallest drafter and the
    target, `three-level`, all models, both with 4 tokens, and `paths`, routed as `goodput` does.
    """
    smallest, *_, target = machine.names
    chains = {"two-level": (smallest, target), "three-level": machine.names}
    chosen = {
        name: NamedPolicy(
            chains="static",
            selection="whole",
            settings={"chain": chain, "depth": 4, "width": 1},
        )
        for name, chain in chains.items()
    }
    chosen["paths"] = NamedPolicy(chains="adaptive", selection="goodput", settings={"width": 1})
    requests = [
        LoadRequest(
            at_s=0.0,
            category="batch",
            token_ids=(0,) * _BATCH_PROMPT,
            new_tokens=_BATCH_TOKENS,
            temperature=1.0,
            seed=seed * 1000 + place,
        )
        for place in range(batch)
    ]

    def duration_s(used: str | NamedPolicy) -> float:
        service = SimulatedService(machine=machine, acceptance=0.5, trees=TreesConfig())
        service.use(used)
        return max(one.end_s for one in replay(requests, service, service))

    return {"speed_up": duration_s("target-only") / duration_s(chosen.get(policy, policy))}
