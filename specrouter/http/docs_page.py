"""`GET /docs` shows `/openapi.json` and sends requests.

Contract: the page needs nothing from elsewhere, so it works without the internet, and its policy
lets it load nothing. Paths are relative: behind a proxy it may stand under a prefix.
"""

from __future__ import annotations

from importlib import resources

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def add_docs_page(app: FastAPI) -> None:
    text = resources.files("specrouter.http").joinpath("docs_page.html").read_text("utf-8")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(text, headers={"Content-Security-Policy": _POLICY})
