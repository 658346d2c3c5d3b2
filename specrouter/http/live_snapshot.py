"""What the page shows of a router at one moment: counts and times, and no text of any request.

Counts are totals since the engine's start, so that whoever reads takes the differences.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from specrouter.engine.cycle_log import CycleTimes
from specrouter.engine.decode_counts import DecodeFigures
from specrouter.engine.engine_state import EngineState
from specrouter.engine.serving import Instruments, ServingRouter
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.request.params import Chain
from specrouter.routing.decision_record import DecisionRecord
from specrouter.view import SCHEDULED, ChainDecision

PREDICTED_TOKENS = (1, 2, 4, 8, 16, 32, 64)  # n of the T(n) that are shown
_SWITCHES = 24  # the last ones that are shown


def live_snapshot(router: ServingRouter) -> dict[str, Any]:
    """As JSON has it. Waits for no cycle."""
    told: Instruments = router.instruments
    state, decoded = told.engine_state(), told.decoded()
    known, config = told.performance(), router.config
    cluster = config.cluster
    return {
        "unix_s": round(time.time(), 3),
        "target": router.pool.target,
        "bits_depend_on": router.pool.bits_depend_on,
        "policy": {"scheduler": config.scheduler.policy, "admission": config.engine.admission},
        "requests": {"running": state.running, "waiting": state.waiting, "rows": state.rows},
        "totals": {
            "produced_tokens": decoded.produced_tokens,
            "drafted_tokens": decoded.drafted_tokens,
            "accepted_tokens": decoded.accepted_tokens,
        },
        "chains": _chains(decoded),
        "decision": _decision(told.decision(), known.machine),
        "switches": _switches(told.decisions()),
        "cycles": [_cycle(one) for one in told.cycles()],
        "models": [_model(router, name, state, known) for name in router.pool.names],
        "objectives": {
            name: [one.attained, one.judged, one.requests]
            for name, one in told.slo_accounts.counts().items()
        },
        "cache": {
            **asdict(state.cache),
            "kv_cached_tokens": state.kv_cached_tokens,
            "kv_reserved_tokens": state.kv_reserved_tokens,
            "kv_capacity_tokens": state.kv_capacity_tokens,
        },
        "replicas": dict(router.health().replicas),
        "pairs": [one.name for one in cluster.pairs] if cluster else [],
    }


def _chains(decoded: DecodeFigures) -> list[dict[str, Any]]:
    return [{"chain": chain, **_rounded(asdict(one))} for chain, one in decoded.chains.items()]


def _cycle(one: CycleTimes) -> list[Any]:
    """By place, since there are many."""
    parts_ms = (one.elapsed_ms, one.draft_ms, one.rescore_ms, one.verify_ms)
    return [one.chain, *(round(each, 2) for each in parts_ms), one.requests, one.tokens]


def _decision(decision: ChainDecision | None, machine: float) -> dict[str, Any] | None:
    """`predicted`: milliseconds per token by chain, the quickest first, of the machine as it is."""
    if decision is None:
        return None
    options = [one for one in (decision.predicted, *decision.alternatives) if one is not None]
    known: Mapping[Chain, float] = decision.predicted_ms or {
        one.chain: one.ms_per_token for one in options
    }
    ranked = sorted(known.items(), key=lambda each: each[1])
    return {
        "chain": decision.chain,
        **asdict(decision.shape),
        "reason": decision.reason,
        "predicted": [[chain, round(ms * machine, 3)] for chain, ms in ranked],
    }


def _switches(records: Sequence[DecisionRecord]) -> list[dict[str, Any]]:
    scheduled = [one for one in records if one.asked == SCHEDULED]
    return [
        {
            "unix_s": round(one.unix_s, 3),
            "requests": one.requests,
            "chain": one.decision.chain,
            **asdict(one.decision.shape),
            "reason": one.decision.reason,
        }
        for one in scheduled[-_SWITCHES:]
    ]


def _model(
    router: ServingRouter, name: str, state: EngineState, known: PerformanceSnapshot
) -> dict[str, Any]:
    loaded = "loaded" if name in state.weight_bytes else "not loaded"
    curve = known.times.get(name)
    shown = {
        "name": name,
        "state": "resting after a failure" if name in state.quarantined else loaded,
        "weight_bytes": state.weight_bytes.get(name, 0),
        "kv_bytes": state.kv_bytes.get(name, 0),
        "times": []
        if curve is None
        else [[n, round(known.machine * curve.at(n), 3)] for n in PREDICTED_TOKENS],
    }
    if name in router.pool.draft_only:
        return {**shown, "device": None, "dtype": None, "weights": None}
    plan = router.pool.plan(name)
    return {
        **shown,
        "device": ", ".join(plan.placement.devices),
        "dtype": plan.dtype,
        "weights": plan.weights,
    }


def _rounded(figures: dict[str, Any]) -> dict[str, Any]:
    return {
        name: round(each, 3) if isinstance(each, float) else each for name, each in figures.items()
    }
