"""`GET /health`; what the router decided and did: `/router/` `decisions`, `statistics`,
`calibration`, `slo`; and `POST /router/restart`, which replaces the replicas one after the other,
while requests go on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from specrouter.engine.serving import ServingRouter
from specrouter.http.answer_schemas import (
    CalibrationAnswer,
    DecisionsAnswer,
    HealthAnswer,
    RestartAnswer,
    SloAnswer,
    StatisticsAnswer,
)
from specrouter.http.drain import Drain
from specrouter.http.error_answer import error_payload, error_response
from specrouter.http.openapi import OPERATION, ROUTER, described

logger = logging.getLogger(__name__)

_Page = Callable[[], Awaitable[Response]]


def add_health(app: FastAPI, router: ServingRouter, drain: Drain) -> None:
    @app.get("/health", **described(OPERATION, "Whether requests are taken", HealthAnswer, (503,)))
    async def health() -> Response:
        health = router.health()
        replicas = {"replicas": dict(health.replicas)} if health.replicas else {}
        if health.status == "stopped":
            error = error_payload(503, "the engine has stopped", code="engine_stopped")
            if router.is_healthy:
                error = error_payload(503, "no replica is ready", code="no_replica_ready")
            return JSONResponse({"status": "stopped", **error, **replicas}, status_code=503)
        if drain.is_draining:
            error = error_payload(503, "the service is shutting down", code="shutting_down")
            return JSONResponse({"status": "draining", **error}, status_code=503)
        return JSONResponse({"status": health.status, **replicas})


def add_router_pages(app: FastAPI, router: ServingRouter) -> None:
    def page(name: str, summary: str, answer: type[BaseModel]) -> Callable[[_Page], _Page]:
        return app.get(f"/router/{name}", **described(ROUTER, summary, answer))

    @page(
        "decisions",
        "The last changes of chain or tree, and of admission; cached prefixes",
        DecisionsAnswer,
    )
    async def decisions() -> Response:
        records: dict[str, Sequence[Any]] = {
            "decisions": router.instruments.decisions(),
            "admissions": router.instruments.admissions(),
            "prefixes": router.instruments.prefixes(),
        }
        found = {name: [one.to_json() for one in each] for name, each in records.items()}
        return JSONResponse({**found, "routings": list(router.instruments.routings())})

    @page("statistics", "Totals since the start", StatisticsAnswer)
    async def statistics() -> Response:
        return JSONResponse(asdict(router.instruments.statistics()))

    @page("calibration", "How well predicted acceptance holds", CalibrationAnswer)
    async def calibration() -> Response:
        return JSONResponse({"calibration": _calibration(router)})

    @page("slo", "Attainment of objectives, by class", SloAnswer)
    async def slo_report() -> Response:
        return JSONResponse(asdict(router.instruments.slo_accounts.report()))


def add_replica_pages(app: FastAPI, router: ServingRouter) -> None:
    under_way = threading.Lock()

    @app.post(
        "/router/restart",
        **described(
            ROUTER,
            "Restarts the replicas one after the other; their requests go on elsewhere",
            RestartAnswer,
        ),
    )
    async def restart() -> Response:
        if not router.health().replicas:
            return error_response(409, "there are no replicas", code="no_replicas")
        if not under_way.acquire(blocking=False):
            return error_response(409, "a restart is under way", code="restarting")
        # A service that is told to stop does not wait for a daemon.
        threading.Thread(target=_restart, args=(router, under_way), daemon=True).start()
        return JSONResponse({"status": "restarting"})


def _restart(router: ServingRouter, under_way: threading.Lock) -> None:
    """Nobody waits for it: how it ends is for the log, and `/health` says what is ready."""
    try:
        router.restart_replicas()
    except CancelledError:
        logger.info("the service ends before all replicas have been restarted")
    except Exception:
        logger.exception("the replicas could not be restarted")
    else:
        logger.info("all replicas have been restarted")
    finally:
        under_way.release()


def _calibration(router: ServingRouter) -> list[dict[str, Any]]:
    return [
        {
            "proposers": list(proposers),
            "verifier": verifier,
            "sampled": sampled,
            **asdict(seen.calibration),
        }
        for (proposers, verifier, sampled), seen in router.instruments.performance().trees.items()
    ]
