"""RouterCollector: the router's state as Prometheus reads it, at the moment of a scrape.

Contract: a scrape copies totals that were counted anyway, and never waits for a cycle. All values
are since the start of the engine, one that began anew after a failure starts at 0 as a process
would. Units are in the names, times are seconds. Labels are bounded: models and classes by the
configuration, chains by `DecodeCounts`, positions by `MAX_DEPTH`, estimates by `_TREES`.
vLLM's names stand beside ours: dashboards and load balancers know them.

Not here: refusals, which the HTTP layer counts (`specrouter.http.metrics_page`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from specrouter.engine.engine_state import EngineState
from specrouter.engine.serving import ServingRouter
from specrouter.engine.slo_accounts import AdmissionCounts, SloAccounts, SloCounts
from specrouter.http.metric_table import families
from specrouter.profile.profiler import EngineStatistics
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.request.objective import BY_VALUE, NO_OBJECTIVE
from specrouter.request.params import Chain

PREDICTED_TOKENS = (1, 8, 64)  # n of the T(n) that are shown
_TREES = 64  # estimates of drafters and verifiers that are shown, those with most evidence


class RouterCollector(Collector):
    def __init__(self, router: ServingRouter) -> None:
        self._router = router

    def collect(self) -> Iterator[Metric]:
        yield from self._router.instruments.ended_requests()
        yield from families(sources(self._router), self._router.pool.target)
        yield from self._router.instruments.replica_metrics()


def sources(router: ServingRouter) -> dict[str, Any]:
    """What the table of metrics reads, by the first names of its paths."""
    told = router.instruments
    state, decoded = told.engine_state(), told.decoded()
    totals, known = told.statistics(), told.performance()
    return {
        "state": state,
        "decoded": decoded,
        "totals": totals,
        "known": known,
        "restarts": told.restarts,
        "control_share": totals.control_ms / totals.cycle_ms if totals.cycle_ms else 0.0,
        "kv_share": state.kv_reserved_tokens / state.kv_capacity_tokens,
        "chains": {_joined(chain): counts for chain, counts in decoded.chains.items()},
        **objective_sources(told.slo_accounts, router.slo_classes),
        **_model_sources(router.pool.names, state, totals, known),
        **_estimate_sources(known),
    }


def objective_sources(accounts: SloAccounts, configured: Iterable[str]) -> dict[str, Any]:
    """What admission decided about objectives, and which were attained, by class.

    `configured`: classes, which show up before their first request, so that it is an increase.
    """
    classes = (*configured, BY_VALUE, NO_OBJECTIVE)
    stages = {
        (slo_class, str(place)): pair
        for slo_class, pairs in accounts.stages().items()
        for place, pair in enumerate(pairs)
    }
    return {
        "admissions": {**dict.fromkeys(classes, AdmissionCounts()), **accounts.admissions()},
        "ended": {**dict.fromkeys(classes, SloCounts()), **accounts.counts()},
        "stages_kept": {key: kept for key, (_, kept) in stages.items()},
        "stages_missed": {key: all_ - kept for key, (all_, kept) in stages.items()},
    }


def _model_sources(
    names: Sequence[str],
    state: EngineState,
    totals: EngineStatistics,
    known: PerformanceSnapshot,
) -> dict[str, Any]:
    def counted(values: Mapping[str, float]) -> dict[str, float]:
        return {name: values.get(name, 0) for name in names}

    memory = {"weights": state.weight_bytes, "kv": state.kv_bytes}
    return {
        "forwards": counted(totals.forwards),
        "pack_tokens": counted(totals.pack_tokens),
        "model_ms": counted(totals.model_ms),
        "predicted_ms": {
            (name, str(tokens)): known.machine * curve.at(tokens)
            for name, curve in known.times.items()
            for tokens in PREDICTED_TOKENS
        },
        "loaded": {name: float(name in state.weight_bytes) for name in names},
        "memory": {
            (name, kind): held.get(name, 0) for kind, held in memory.items() for name in names
        },
        "quarantines": counted(state.quarantines),
        "quarantined": {name: float(name in state.quarantined) for name in names},
    }


def _estimate_sources(known: PerformanceSnapshot) -> dict[str, Any]:
    shown = nlargest(_TREES, known.trees.items(), key=lambda each: each[1].trials)
    return {
        "trees": {
            (_joined(proposers), verifier, _flag(sampled)): tree
            for (proposers, verifier, sampled), tree in shown
        },
        "promised": {
            (drafter, verifier, _flag(sampled)): alpha
            for (drafter, verifier, sampled), alpha in known.promised_alpha.items()
        },
    }


def _joined(chain: Chain) -> str:
    return ">".join(chain)


def _flag(value: bool) -> str:
    return "true" if value else "false"
