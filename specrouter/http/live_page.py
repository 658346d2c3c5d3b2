"""Pages of the service: the live page at `/` and `/page/...`, and the API's page at `/docs`.

The first shows how requests are routed; the second shows `/openapi.json` and sends requests.

Contract: files of the package, unchanged and read once, without data of any request. They load
nothing from other hosts, so they work without the internet. The content security policy of the
first lets a browser load these files and call this service, nothing else; that of the second lets
it load no files. Paths are relative: a proxy may serve them under a prefix. The guards
(`specrouter.http.guards`) decide who may ask.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

if TYPE_CHECKING:
    from fastapi import FastAPI

_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    "": "text/plain",
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    ),
    "Cache-Control": "no-cache",  # browsers ask again, and get 304
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

_DOCS_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


_FOLDER = Path(__file__).parent
_Answer = Callable[[Request], Awaitable[Response]]


def _answering(file: Path) -> _Answer:
    content, media_type = file.read_bytes(), _TYPES[file.suffix]
    headers = {**_HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:16]}"'}

    async def answer(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return answer


PAGE_FILES = {
    f"/{file.relative_to(_FOLDER).as_posix()}": _answering(file)
    for file in (_FOLDER / "page").rglob("*")
    if file.is_file()
}
PAGE_FILES["/"] = PAGE_FILES.pop("/page/index.html")
PAGE_PATHS = frozenset(PAGE_FILES)


def add_live_page(app: FastAPI) -> None:
    for path, answer in PAGE_FILES.items():
        app.get(path, include_in_schema=False)(answer)


def add_docs_page(app: FastAPI) -> None:
    text = (_FOLDER / "docs_page.html").read_text("utf-8")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(text, headers={"Content-Security-Policy": _DOCS_POLICY})
