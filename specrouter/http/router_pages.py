"""`GET /health`, the pages below `/router/`, and `POST /router/restart`.

The pages `decisions`, `statistics`, `calibration` and `slo` show what the router decided and did. A
restart replaces the replicas one after the other, while requests go on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from specrouter.engine.serving import ServingRouter
from specrouter.http.answers import AnswerModel, Loose, error_payload, error_response
from specrouter.http.drain import Drain
from specrouter.http.openapi import OPERATION, ROUTER, described
from specrouter.profile.profiler import EngineStatistics

logger = logging.getLogger(__name__)

_Page = Callable[[], Awaitable[Response]]


class HealthAnswer(Loose):
    status: str
    """`ok`, or `degraded` if fewer replicas serve than configured."""
    replicas: dict[str, str] | None = None
    """State of each replica, if there are any."""
    loading: list[str] | None = None
    """Drafters that are still being loaded, if any; texts do not depend on them."""
    unloadable: dict[str, str] | None = None
    """Drafters that could not be loaded, if any, each with the reason."""


class RestartAnswer(AnswerModel):
    status: str
    """Always `restarting`; `/health` shows which replicas are ready."""


class DecisionsAnswer(AnswerModel):
    speedups: dict[str, dict[str, Any]]
    """Measured tokens/s with drafts over those without, by the number of requests, rounded up to a
    power of 2."""
    decisions: list[dict[str, Any]]
    """Changes of chain or tree, oldest first, with reason, prediction and alternatives."""
    admissions: list[dict[str, Any]]
    """Admission decisions about objectives, oldest first, with reasons."""
    prefixes: list[dict[str, Any]]
    """Cached parts of the prompts of recent requests, oldest first."""
    routings: list[dict[str, Any]]
    """Choices of a replica, oldest first, with the terms of each replica and the reason."""


class CalibrationAnswer(AnswerModel):
    calibration: list[dict[str, Any]]
    """Errors of predicted acceptance, by proposers, verifier and mode of sampling."""


class SloAnswer(AnswerModel):
    duration_s: float
    """Seconds from the first submission to the latest end."""
    total: dict[str, Any]
    """Figures of all requests: attained objectives, goodput, percentiles."""
    classes: dict[str, dict[str, Any]]
    """The same figures by class; `default` for objectives by value, `none` for requests without
    one."""


def add_router_pages(app: FastAPI, router: ServingRouter, drain: Drain) -> None:
    under_way = threading.Lock()

    def page(name: str, summary: str, answer: type) -> Callable[[_Page], _Page]:
        return app.get(f"/router/{name}", **described(ROUTER, summary, answer))

    @app.get(
        "/health",
        **described(OPERATION, "Health of the service", HealthAnswer, refusals=(503,)),
    )
    async def health() -> Response:
        health = router.health()
        facts = {
            "replicas": dict(health.replicas),
            "loading": list(health.loading),
            "unloadable": dict(health.unloadable),
        }
        stated = {name: each for name, each in facts.items() if each}
        if health.status == "stopped":
            error = error_payload(503, "the engine has stopped", code="engine_stopped")
            if router.is_healthy:
                error = error_payload(503, "no replica is ready", code="no_replica_ready")
            return JSONResponse({"status": "stopped", **error, **stated}, status_code=503)
        if drain.is_draining:
            error = error_payload(503, "the service is shutting down", code="shutting_down")
            return JSONResponse({"status": "draining", **error}, status_code=503)
        return JSONResponse({"status": health.status, **stated})

    @page(
        "decisions",
        "Recent choices of chain, tree, admission and replica; cached prefixes",
        DecisionsAnswer,
    )
    async def decisions() -> Response:
        records: dict[str, Sequence[Any]] = {
            "decisions": router.instruments.decisions(),
            "admissions": router.instruments.admissions(),
            "prefixes": router.instruments.prefixes(),
        }
        found: dict[str, Any] = {
            name: [one.to_json() for one in each] for name, each in records.items()
        }
        speedups = router.instruments.engine_state().speedups
        found["speedups"] = {str(load): asdict(one) for load, one in speedups.items()}
        return JSONResponse({**found, "routings": list(router.instruments.routings())})

    @page("statistics", "Totals since the start", EngineStatistics)
    async def statistics() -> Response:
        return JSONResponse(asdict(router.instruments.statistics()))

    @page("calibration", "Errors of predicted acceptance", CalibrationAnswer)
    async def calibration() -> Response:
        return JSONResponse({"calibration": _calibration(router)})

    @page("slo", "Attainment of objectives, by class", SloAnswer)
    async def slo_report() -> Response:
        return JSONResponse(asdict(router.instruments.slo_accounts.report()))

    @app.post(
        "/router/restart",
        **described(
            ROUTER,
            "Restarts the replicas one by one; their requests move to others",
            RestartAnswer,
        ),
    )
    async def restart() -> Response:
        if not router.health().replicas:
            return error_response(409, "there are no replicas", code="no_replicas")
        if not under_way.acquire(blocking=False):
            return error_response(409, "a restart is under way", code="restarting")
        # The end of the process does not wait for a daemon thread.
        threading.Thread(target=_restart, args=(router, under_way), daemon=True).start()
        return JSONResponse({"status": "restarting"})


def _restart(router: ServingRouter, under_way: threading.Lock) -> None:
    """Restart the replicas, and log how it ends; `/health` shows which are ready."""
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
