"""Runs the HTTP service until Ctrl-C or SIGTERM, and says where it listens once it does.

Kept apart from the command line, so that `specrouter generate` need not wait for the import of a
web framework.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn

from modelpool.errors import ConfigError
from specrouter import ChainRouter
from specrouter.config import RouterConfig
from specrouter.server import create_app

_DRAIN_S = 5  # how long running requests may go on after the signal to stop


def serve(config: RouterConfig) -> None:
    """Blocks until the process is told to stop; every request has been ended then.

    Raises:
        ConfigError: naming the setting, also where the address cannot be listened on.
    """
    host, port = config.server.host, config.server.port
    with _bound_socket(host, port) as listener, ChainRouter.from_config(config) as router:
        app = create_app(router)
        settings = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=_DRAIN_S)
        server = _Server(settings, _announcement(router, host, listener.getsockname()[1]))
        # uvicorn raises the signal again once it has stopped
        with _sigterm_as_interrupt(), suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
    print("SpecRouter has stopped", flush=True)


class _Server(uvicorn.Server):
    """Prints `announcement` when connections are accepted."""

    def __init__(self, config: uvicorn.Config, announcement: str) -> None:
        super().__init__(config)
        self._announcement = announcement

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._announcement, flush=True)


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Makes SIGTERM, which service managers send, the same clean stop as Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _bound_socket(host: str, port: int) -> socket.socket:
    """Bound before the models are loaded: a port in use is then known at once.

    Not listening yet: until the service is ready, connections are refused instead of hanging.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError("server", f"cannot listen on {host}:{port}: {reason}") from error
    return listener


def _announcement(router: ChainRouter, host: str, port: int) -> str:
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
    return (
        f"SpecRouter serves {router.pool.target} at {url} (Ctrl-C stops it). Try:\n"
        f"  curl {url}/generate -H 'Content-Type: application/json' \\\n"
        """    -d '{"prompt": "def fib(n):", "max_new_tokens": 32}'"""
    )
