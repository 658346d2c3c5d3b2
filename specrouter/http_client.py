"""HTTP client for JSON servers, with an API key and without a proxy.

A proxy would be part of what benchmarks measure. Contract: no message and no document contains a
key.
"""

import http.client
import json
import os
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from modelpool.errors import ConfigError
from specrouter.config import is_api_key

API_KEY_VARIABLE = "SPECROUTER_API_KEY"  # the service reads the same one
# What a call raises if the server or the network fails.
FAILURES = (OSError, ValueError, LookupError, TypeError, http.client.HTTPException)

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def read_api_key(variable: str, given: str | None = None) -> str | None:
    """Return the key given by --api-key, else that of the environment variable.

    An unset or empty variable gives None. Raises `ConfigError` for a key that a header cannot hold.
    """
    key = os.environ.get(variable) or None if given is None else given
    if key is not None and not is_api_key(key):
        reason = "must be printable ASCII without spaces"
        raise ConfigError(variable if given is None else "--api-key", reason)
    return key


def check_url(argument: str, url: str) -> None:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(argument, f"{url!r} is no http address")


class Server:
    """A JSON server at `url`; calls raise `FAILURES`."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url, self._key = url, key

    def open(
        self,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Return the open response, which the caller closes; without a `body` the method is GET."""
        data = None if body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(self._url + path, data, sent)
        if self._key is not None:  # not sent to a host that the server redirects to
            request.add_unredirected_header("Authorization", f"Bearer {self._key}")
        return _direct.open(request, timeout=timeout_s)

    def ask(self, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        """Return the answer's JSON."""
        with self.open(path, body, timeout_s) as response:
            return json.load(response)


def events(lines: Iterator[bytes]) -> Iterator[Mapping[str, Any]]:
    """Yield the JSON objects of a stream of server-sent events; skip comments and empty lines.

    An event named "error" becomes an object with the key `error`.
    """
    for line in lines:
        name, _, value = line.decode("utf-8").strip().partition(":")
        if name == "error":
            yield {"error": value.strip()}
        if name == "data" and value.strip() != "[DONE]":
            yield json.loads(value)
