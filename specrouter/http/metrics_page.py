"""GET /metrics: the router's metrics in Prometheus' text format, or in OpenMetrics on request.

Contract: each application has a registry of its own, so that several routers may live in one
process. Reading the page never waits for a cycle. Refusals are counted here, since the router never
hears of most of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from specrouter.engine.serving import ServingRouter
from specrouter.http.openapi import OPERATION
from specrouter.http.prometheus import RouterCollector

Refusal = Literal["bad_request", "overloaded", "unavailable", "unauthorized"]


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
