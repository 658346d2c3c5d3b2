"""A server that answers in JSON, as a test says."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JsonHandler(BaseHTTPRequestHandler):
    """For `do_GET` and `do_POST` of a test's own."""

    def body(self) -> Any:
        """What was sent."""
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def answer(self, body: object, status: int = 200) -> None:
        self.send(json.dumps(body).encode(), status)

    def send(self, data: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def serving(handler: type[JsonHandler]) -> Iterator[str]:
    """Its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
