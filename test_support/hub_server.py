"""A hub in a thread of its own: as much of the Hugging Face hub's protocol as its library asks for.

Contract: a repository is files by their names, all of one commit. Faults are attributes, and last
until they are changed. `requests` has what was asked for, with the first byte of a range.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

from huggingface_hub import constants

COMMIT = "c0ffee" + 34 * "0"


class Hub:
    """
    Attributes:
        files: by repository and name.
        breaks_at: bytes of a file after which each connection ends.
        damage: what a file's bytes are replaced by.
        has_hashes: the listing has the SHA-256 of files.
        is_gated: files are for others. `is_down`: it answers no question.
    """

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.url = ""
        self.files = dict[str, dict[str, bytes]]()
        self.requests = list[str]()
        self.breaks_at: int | None = None
        self.damage: bytes | None = None
        self.has_hashes = True
        self.is_gated = self.is_down = False

    @property
    def transfers(self) -> list[str]:
        """Files that were asked for, each with the first byte that was."""
        return [one.removeprefix("GET ") for one in self.requests if " from " in one]

    def listing(self, repository: str) -> list[dict[str, Any]]:
        """As it stands in a tree, and in what is told of a model."""
        found = []
        for name, data in self.files[repository].items():
            digest = hashlib.sha256(data).hexdigest()
            one: dict[str, Any] = {"type": "file", "path": name, "rfilename": name}
            one |= {"size": len(data), "oid": digest[:40], "blobId": digest[:40]}
            if self.has_hashes:
                size = {"size": len(data), "pointerSize": 130}
                one["lfs"] = {"oid": digest, "sha256": digest, **size}
            found.append(one)
        return found


@contextmanager
def serving_hub(cache: Path) -> Iterator[Hub]:
    """While it lasts the hub's library asks this hub, and keeps files in `cache`."""
    hub = Hub(cache)
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        hub.url = f"http://127.0.0.1:{server.server_port}"
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        try:
            with mock.patch.multiple(
                constants,
                ENDPOINT=hub.url,
                HUGGINGFACE_CO_URL_TEMPLATE=template,
                HF_HUB_CACHE=str(cache),
                HF_HUB_OFFLINE=False,
            ):
                yield hub
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/").split("/")
        first = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-")
        is_file = "resolve" in path
        self.hub.requests.append(
            f"GET {self.path}" if not is_file else f"GET {path[-1]} from {first}"
        )
        if is_file:
            self._file(path, int(first))
            return
        repository = "/".join(path[2:4])
        if self.hub.is_down:
            self._refuse(503, "")
        elif repository not in self.hub.files:
            self._refuse(404, "RepoNotFound")
        elif "tree" in path:
            self._answer(self.hub.listing(repository))
        elif path[5:] in ([], ["main"], [COMMIT]):
            siblings = self.hub.listing(repository)
            self._answer({"id": repository, "sha": COMMIT, "siblings": siblings})
        else:
            self._refuse(404, "RevisionNotFound")

    def do_HEAD(self) -> None:
        self.hub.requests.append(f"HEAD {self.path}")
        self._file(self.path.strip("/").split("/"), None)

    def _file(self, path: list[str], first: int | None) -> None:
        """`first`: of the bytes that are sent; None: none are."""
        data = self.hub.files.get("/".join(path[:2]), {}).get("/".join(path[4:]))
        if self.hub.is_gated:
            self._refuse(403, "GatedRepo")
            return
        if data is None:
            self._refuse(404, "EntryNotFound")
            return
        sent = data if self.hub.damage is None else self.hub.damage
        self.send_response(206 if first else 200)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(sent) - 1}/{len(sent)}")
        self.send_header("Content-Length", str(len(sent) - (first or 0)))
        self.end_headers()
        if first is not None:
            self.wfile.write(sent[first : self.hub.breaks_at])

    def _answer(self, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...
