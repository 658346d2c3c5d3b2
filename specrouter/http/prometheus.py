"""GET /metrics: the router's state in Prometheus' text format, or in OpenMetrics on request.

Contract: each application has a registry of its own, so that several routers may live in one
process. A scrape copies totals that were counted anyway, and never waits for a cycle. All values
are since the start of the engine, one that began anew after a failure starts at 0 as a process
would. Units are in the names, times are seconds. Labels are bounded: models and classes by the
configuration, chains by `DecodeCounts`, positions by `MAX_DEPTH`, estimates by `_TREES`.
vLLM's names stand beside ours: dashboards and load balancers know them. Refusals are counted here,
since the router never hears of most of them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from typing import Any, Literal, get_args

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from specrouter.engine.engine_state import EngineState
from specrouter.engine.serving import ServingRouter
from specrouter.engine.slo_accounts import AdmissionCounts, SloAccounts, SloCounts
from specrouter.http.metric_table import families
from specrouter.http.openapi import OPERATION
from specrouter.profile.profiler import EngineStatistics
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.request.objective import BY_VALUE, NO_OBJECTIVE
from specrouter.request.params import Chain

Refusal = Literal["bad_request", "overloaded", "unavailable", "unauthorized"]
PREDICTED_TOKENS = (1, 8, 64)  # n of the T(n) that are shown
_TREES = 64  # estimates of drafters and verifiers that are shown, those with most evidence


def add_metrics(app: FastAPI, router: ServingRouter) -> None:
    """Mounts the page, and gives the application the counter for `count_refusal`."""
    registry = CollectorRegistry()
    refusals = app.state.refusals = _Refusals()
    registry.register(refusals)
    registry.register(RouterCollector(router))

    @app.get(
        "/metrics",
        tags=[OPERATION],
        summary="Prometheus metrics, as text",
        response_class=PlainTextResponse,
    )
    def metrics(request: Request) -> Response:  # not async: what it reads is behind locks
        encode, content_type = _encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"Content-Type": content_type})


def _encoder(accepted: str) -> tuple[Callable[[CollectorRegistry], bytes], str]:
    """The plain format where a version in `accepted` is none that can be compared ("0.0.4" in
    quotes, "x")."""
    try:
        return choose_encoder(accepted)
    except (TypeError, ValueError):
        return choose_encoder("")


def count_refusal(app: FastAPI, reason: Refusal) -> None:
    """A request was refused before it was queued; nothing happens without `add_metrics`."""
    refusals: _Refusals | None = getattr(app.state, "refusals", None)
    if refusals is not None:
        refusals.counts[reason] += 1


class _Refusals(Collector):
    def __init__(self) -> None:
        self.counts = dict.fromkeys(get_args(Refusal), 0)  # all are there from the start

    def collect(self) -> list[Metric]:
        text = "Requests that were refused before they were queued."
        family = CounterMetricFamily("specrouter_requests_refused", text, labels=["reason"])
        for reason, count in self.counts.items():
            family.add_metric([reason], count)
        return [family]


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
            (_joined(proposers), verifier, str(sampled).lower()): tree
            for (proposers, verifier, sampled), tree in shown
        },
        "promised": {
            (drafter, verifier, str(sampled).lower()): alpha
            for (drafter, verifier, sampled), alpha in known.promised_alpha.items()
        },
    }


def _joined(chain: Chain) -> str:
    return ">".join(chain)
