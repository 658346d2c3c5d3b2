"""Snapshot of a router for the live page: counts and times, and no text of any request.

Counts are totals since the engine's start; the page takes the differences.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple
from typing import Any

from specrouter.engine.engine_state import EngineState
from specrouter.engine.serving import Instruments, ServingRouter
from specrouter.http.prometheus import PREDICTED_TOKENS
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.profile.speedup import requests_of
from specrouter.request.params import Chain
from specrouter.routing.decision_record import DecisionRecord
from specrouter.view import SCHEDULED, ChainDecision

_SWITCHES = 24  # number of the latest ones that are shown


def live_snapshot(router: ServingRouter) -> dict[str, Any]:
    """Return a snapshot that JSON can hold, without waiting for a cycle."""
    instruments: Instruments = router.instruments
    state, decoded = instruments.engine_state(), instruments.decoded()
    known, config = instruments.performance(), router.config
    cluster = config.cluster
    return {
        "unix_s": time.time(),
        "target": router.pool.target,
        "chats": bool(config.server.chat_template or router.pool.tokenizer.chat_template),
        "bits_depend_on": router.pool.bits_depend_on,
        "policy": {"scheduler": config.scheduler.policy},
        "requests": {"running": state.running, "waiting": state.waiting, "rows": state.rows},
        "totals": {
            "produced_tokens": decoded.produced_tokens,
            "drafted_tokens": decoded.drafted_tokens,
            "accepted_tokens": decoded.accepted_tokens,
        },
        "chains": [{"chain": chain, **asdict(one)} for chain, one in decoded.chains.items()],
        "decision": _decision(instruments.decision(), known.machine),
        "switches": _switches(instruments.decisions()),
        "speedups": [
            {"requests": requests_of(load), **asdict(one)}
            for load, one in sorted(state.speedups.items())
        ],
        "cycles": [astuple(one) for one in instruments.cycles()],  # as arrays, since there are many
        "models": [_model(router, name, state, known) for name in router.pool.names],
        "objectives": {
            name: [one.attained, one.judged]
            for name, one in instruments.slo_accounts.counts().items()
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


def _decision(decision: ChainDecision | None, machine: float) -> dict[str, Any] | None:
    """Return the decision as the page shows it.

    `predicted`: ms per token by chain, the fastest first, at the machine's current speed.
    """
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
        "predicted": [[chain, ms * machine] for chain, ms in ranked],
    }


def _switches(records: Sequence[DecisionRecord]) -> list[dict[str, Any]]:
    scheduled = [one for one in records if one.asked == SCHEDULED]
    return [
        {
            "unix_s": one.unix_s,
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
    if name in state.quarantined:
        doing = "resting after a failure"
    else:
        doing = "loaded" if name in state.weight_bytes else "not loaded"
    curve = known.times.get(name)
    plan = None if name in router.pool.draft_only else router.pool.plan(name)
    return {
        "name": name,
        "state": doing,
        "weight_bytes": state.weight_bytes.get(name, 0),
        "kv_bytes": state.kv_bytes.get(name, 0),
        "times": [[n, known.machine * curve.at(n)] for n in PREDICTED_TOKENS] if curve else [],
        "device": plan and ", ".join(plan.placement.devices),
        "dtype": plan and plan.dtype,
        "weights": plan and plan.weights,
    }
