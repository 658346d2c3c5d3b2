"""Runs the HTTP service until it is told to stop, and says where it listens once it does.

Contract: the first SIGTERM or SIGINT lets running requests finish within `server.drain_s`, while
new ones and `/health` get 503; what is left then is ended, each request with its last message. A
second signal ends it at once, a third waits for nothing. A service whose engine has failed for good
stops, too: `EngineFailureError`.

Kept apart from the command line, so that `specrouter generate` need not wait for the import of a
web framework.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from modelpool.errors import ConfigError
from specrouter.config import RouterConfig, ServerConfig
from specrouter.http.app import create_app
from specrouter.http.drain import Drain
from specrouter.http.guards import add_guards, api_keys
from specrouter.http.request_log import RequestLog
from specrouter.http.transport import protocol_settings
from specrouter.router import ChainRouter

logger = logging.getLogger(__name__)

_POLL_S = 0.2  # how often a signal or a failure is looked for
_LAST_MESSAGES_S = 5.0  # for requests that were ended to be answered
_CLOSE_S = 1  # for connections to close once their requests are answered, and cycles to end


class EngineFailureError(RuntimeError):
    """The engine has stopped for good; a new process has to take over."""


def serve(config: RouterConfig) -> None:
    """Blocks until the process is told to stop; every request has been ended then.

    Raises:
        ConfigError: naming the setting, also where the address cannot be listened on.
        EngineFailureError: with the cause; every request has been told.
    """
    check_server(config.server)
    host, port = config.server.host, config.server.port
    with _bound_socket(host, port) as listener, ChainRouter.from_config(config) as router:
        has_keys = bool(api_keys(config.server))
        announcement = _announcement(router, host, listener.getsockname()[1], has_keys)
        server = _Server(router, config.server, announcement)
        server.run(sockets=[listener])
        failure = server.failure
    if failure is not None:
        raise EngineFailureError(f"the engine has failed: {failure}")
    print("SpecRouter has stopped", flush=True)


def check_server(config: ServerConfig) -> None:
    """What depends on this machine. Raises `ConfigError`."""
    api_keys(config)
    template = config.chat_template
    if template is not None and not template.is_file():
        raise ConfigError("server.chat_template", f"there is no file {str(template.absolute())!r}")


def _application(router: ChainRouter, config: ServerConfig, drain: Drain) -> ASGIApp:
    app = create_app(router, drain)
    add_guards(app, config, drain)
    return RequestLog(app)


class _Server(uvicorn.Server):
    """Announces the start; drains before uvicorn stops, which closes the listener first of all.

    `failure`: of the engine, where that is why it has stopped.
    """

    def __init__(self, router: ChainRouter, config: ServerConfig, announcement: str) -> None:
        self._drain = Drain()
        app = _application(router, config, self._drain)
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=_CLOSE_S,
                **protocol_settings(config),
            )
        )
        self.failure: str | None = None
        self._drain_s = config.drain_s
        self._router = router
        self._announcement = announcement
        self._signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._announcement, flush=True)

    async def main_loop(self) -> None:
        ticking = asyncio.ensure_future(super().main_loop())
        await self._until_over()
        self.should_exit = True
        await ticking

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn would stop at the first signal, and raise it again in the end."""
        self._signals += 1
        self.force_exit = self._signals > 2

    async def _until_over(self) -> None:
        """Until there is nobody left to answer, or no time."""
        while not self._signals and self._is_engine_well():
            await asyncio.sleep(_POLL_S)
        if self._signals:
            await self._drained()
        if self._drain.in_flight and self.failure is None:
            threading.Thread(target=self._router.close, args=(_CLOSE_S,), daemon=True).start()
        await self._drain.wait_until_idle(_LAST_MESSAGES_S, lambda: self.force_exit)

    async def _drained(self) -> None:
        self._drain.begin()
        running = self._drain.in_flight
        logger.info("stopping: %d requests run, and have %g s to finish", running, self._drain_s)
        ended = await self._drain.wait_until_idle(
            self._drain_s, lambda: self._signals > 1 or not self._is_engine_well()
        )
        if not ended:
            logger.warning("%d requests did not finish and are ended", self._drain.in_flight)

    def _is_engine_well(self) -> bool:
        if not self._router.is_healthy:
            self.failure = self._router.failure or "it has stopped"
        return self.failure is None


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


def _announcement(router: ChainRouter, host: str, port: int, has_keys: bool) -> str:
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
    # Its shell has the key or is given it; a secret is not for the journal.
    key = """    -H "Authorization: Bearer $SPECROUTER_API_KEY" \\\n""" if has_keys else ""
    return (
        f"SpecRouter serves {router.pool.target} at {url} (Ctrl-C stops it). Try:\n"
        f"  curl {url}/generate -H 'Content-Type: application/json' \\\n{key}"
        """    -d '{"prompt": "def fib(n):", "max_new_tokens": 32}'"""
    )
