"""Startup: answers requests until the service can, and then passes all of them on to it.

Contract: until then every request gets 503 with `Retry-After`, except for the page at `/`, which
shows the progress and asks again; `/health` has the progress, too.
From `hand_over` on, requests reach the service, on the same port and the same connections.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from modelpool.progress import LoadProgress
from specrouter.http.answers import error_payload, error_response
from specrouter.http.live_page import PAGE_FILES

_RETRY_AFTER = {"Retry-After": "5"}


class Startup:
    """App until the service is loaded; `target`: its model; `has_page`: there is a page at `/`."""

    def __init__(self, target: str, progress: LoadProgress, has_page: bool = True) -> None:
        self._target = target
        self._progress = progress
        self._files = PAGE_FILES if has_page else {}
        self._service: ASGIApp | None = None

    def hand_over(self, service: ASGIApp) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._service is not None:
            await self._service(scope, receive, send)
        elif scope["type"] == "http":
            answer = await self._answer(Request(scope, receive))
            await answer(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        path = request.url.path
        if request.method == "GET" and path in self._files:
            return await self._files[path](request)
        return self._health() if path == "/health" else self._refusal()

    def _health(self) -> Response:
        step = self._progress.step
        body = {
            "status": "loading",
            "target": self._target,
            "stage": step.stage,
            "model": step.model,
            "done_bytes": step.done_bytes,
            "total_bytes": step.total_bytes,
            "elapsed_s": round(self._progress.elapsed_s, 1),
            **error_payload(503, self.message, code="loading"),
        }
        return JSONResponse(body, status_code=503, headers=_RETRY_AFTER)

    def _refusal(self) -> Response:
        # The rest of a body that is still being sent is not read.
        headers = {**_RETRY_AFTER, "Connection": "close"}
        return error_response(503, self.message, code="loading", headers=headers)

    @property
    def message(self) -> str:
        """Refusal with the current step of the load, and the time since its start."""
        progress = self._progress
        return f"the service is not ready yet: {progress.step}, {progress.elapsed_s:.0f} s so far"
