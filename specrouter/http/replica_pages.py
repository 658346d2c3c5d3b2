"""`POST /router/restart`: replaces the replicas one after the other, while requests go on."""

from __future__ import annotations

import asyncio
import logging

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from specrouter.engine.serving import ServingRouter
from specrouter.http.answer_schemas import RestartAnswer
from specrouter.http.error_answer import error_response
from specrouter.http.openapi import ROUTER, answers

logger = logging.getLogger(__name__)


def add_replica_pages(app: FastAPI, router: ServingRouter) -> None:
    under_way = set[asyncio.Task[None]]()

    @app.post(
        "/router/restart",
        tags=[ROUTER],
        summary="Restarts the replicas one after the other; their requests go on elsewhere",
        responses=answers(RestartAnswer, 401),
    )
    async def restart() -> Response:
        if not router.health().replicas:
            return error_response(409, "there are no replicas", code="no_replicas")
        if under_way:
            return error_response(409, "a restart is under way", code="restarting")
        task = asyncio.create_task(_restarted(router))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
        return JSONResponse({"status": "restarting"})


async def _restarted(router: ServingRouter) -> None:
    """Nobody waits for it: how it ends is for the log, and `/health` says what is ready."""
    try:
        await asyncio.to_thread(router.restart_replicas)
    except Exception:
        logger.exception("the replicas could not be restarted")
    else:
        logger.info("all replicas have been restarted")
