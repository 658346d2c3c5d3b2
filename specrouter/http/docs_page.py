"""`GET /` leads to the other pages; `GET /docs` shows `/openapi.json` and sends requests.

Contract: a page needs nothing from elsewhere, so it works without the internet, and its policy
lets it load nothing. Paths are relative: behind a proxy it may stand under a prefix.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import resources

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def add_docs_page(app: FastAPI) -> None:
    for path, file in {"/": "home_page.html", "/docs": "docs_page.html"}.items():
        app.get(path, include_in_schema=False)(_page(file))


def _page(file: str) -> Callable[[], Awaitable[Response]]:
    text = resources.files("specrouter.http").joinpath(file).read_text("utf-8")

    async def page() -> Response:
        return HTMLResponse(text, headers={"Content-Security-Policy": _POLICY})

    return page
