"""`GET /` and `/page/...`: the page that shows how requests are routed. `GET /docs`: the page that
shows `/openapi.json` and sends requests.

Contract: files of the package as they are, read once, and nothing of any request. They need nothing
from elsewhere, so they work without the internet. The policy of the first lets a browser load these
files and ask this service, nothing else; that of the second lets it load nothing. Paths are
relative: behind a proxy they may stand under a prefix. Who may ask: see `specrouter.http.guards`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath
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
    "Cache-Control": "no-cache",  # asked for again, and answered with 304
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

_DOCS_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def _files(folder: Traversable, path: str) -> Iterator[tuple[str, bytes]]:
    for one in folder.iterdir():
        if one.is_dir():
            yield from _files(one, f"{path}{one.name}/")
        else:
            yield f"{path}{one.name}", one.read_bytes()


_FILES = dict(_files(resources.files("specrouter.http").joinpath("page"), "/page/"))
_FILES["/"] = _FILES.pop("/page/index.html")


class _File:
    def __init__(self, path: str, content: bytes) -> None:
        self._content = content
        self._type = _TYPES[PurePosixPath(path).suffix if path != "/" else ".html"]
        self._headers = {**_HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:16]}"'}

    async def answer(self, request: Request) -> Response:
        if request.headers.get("if-none-match") == self._headers["ETag"]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, media_type=self._type, headers=self._headers)


PAGE_FILES = {path: _File(path, content) for path, content in _FILES.items()}
PAGE_PATHS = frozenset(PAGE_FILES)


def add_live_page(app: FastAPI) -> None:
    for path, file in PAGE_FILES.items():
        app.get(path, include_in_schema=False)(file.answer)


def add_docs_page(app: FastAPI) -> None:
    text = resources.files("specrouter.http").joinpath("docs_page.html").read_text("utf-8")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(text, headers={"Content-Security-Policy": _DOCS_POLICY})
