"""Requests to servers elsewhere: without a proxy, which would be measured too, and with a key.

Contract: a key's text is in no message and in no document.
"""

import http.client
import json
import os
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from modelpool.errors import ConfigError
from specrouter.config import is_api_key

API_KEY_VARIABLE = "SPECROUTER_API_KEY"  # the service's own
# What a call raises where the server is to blame, or the way to it.
FAILURES = (OSError, ValueError, LookupError, TypeError, http.client.HTTPException)

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def read_api_key(variable: str, given: str | None = None) -> str | None:
    """`given` by --api-key, or what the environment has; None: neither, or an empty variable.

    Raises `ConfigError` for one that cannot be sent.
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
    """A server at `url`, asked in JSON. Calls raise `FAILURES`."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url, self._key = url, key

    def open(
        self,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """The response, to be closed. Without a `body` it is a GET."""
        data = None if body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(self._url + path, data, sent)
        if self._key is not None:  # not for whom the server may redirect to
            request.add_unredirected_header("Authorization", f"Bearer {self._key}")
        return _direct.open(request, timeout=timeout_s)

    def ask(self, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        """The JSON that it answers."""
        with self.open(path, body, timeout_s) as response:
            return json.load(response)


def events(lines: Iterator[bytes]) -> Iterator[Mapping[str, Any]]:
    """The JSON objects of a stream of server-sent events; comments and empty lines are none. An
    event that is called an error becomes an object with `error`."""
    for line in lines:
        name, _, value = line.decode("utf-8").strip().partition(":")
        if name == "error":
            yield {"error": value.strip()}
        if name == "data" and value.strip() != "[DONE]":
            yield json.loads(value)
