"""Process of the HTTP service: it loads, announces its address, and stops on a signal.

Contract: the port answers from the start on, with 503 and the progress while models are loaded; a
failed load ends the service. The first SIGTERM or SIGINT lets running requests finish within
`server.drain_s`, while new ones and `/health` get 503; requests that are left are ended then, each
with a last message. A second signal ends them at once, and a third does not wait for the messages
either. A service whose engine has failed for good stops, too: `EngineFailureError`.

Imports neither PyTorch nor the application: the thread that loads the models does.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import HANDLED_SIGNALS

from modelpool.errors import ConfigError
from modelpool.progress import LoadProgress
from specrouter.config import RouterConfig, ServerConfig
from specrouter.http.drain import Drain
from specrouter.http.keys import api_keys
from specrouter.http.request_log import RequestLog
from specrouter.http.startup import Startup
from specrouter.http.transport import protocol_settings
from specrouter.logs import adopt_transformers
from specrouter.profile.speedup import summary
from specrouter.progress import Progress, ShownLoad, is_live

if TYPE_CHECKING:
    from specrouter.engine.serving import ServingRouter

    _Loaded = tuple[ServingRouter, ASGIApp]  # the application is the service in front of it

logger = logging.getLogger(__name__)

_SHOW_S = 10.0  # between two lines of the log during a long load
_POLL_S = 0.2  # between two checks for a signal or a failure
_LAST_MESSAGES_S = 5.0  # time to answer requests that were ended
_KEEP_ALIVE_S = 75  # idle connections: longer than load balancers keep them, 60 s
_CLOSE_S = 1  # time for cycles to end, and for answered connections to close


class EngineFailureError(RuntimeError):
    """The engine has stopped for good, or could not start; a new process has to take over."""


class StoppedWhileLoadingError(RuntimeError):
    """The service was stopped before it was ready, and a thread still loads models."""


def serve(config: RouterConfig) -> None:
    """Run the service until a signal stops it; every request has been ended then.

    Raises:
        ConfigError: names the setting, also if the service cannot listen on its address.
        EngineFailureError: with the cause; every request has been answered.
        StoppedWhileLoadingError: end the process without waiting for its threads.
    """
    check_server(config.server)
    host, port = config.server.host, config.server.port
    with _bound_socket(host, port) as listener, ExitStack() as stack:
        server = _Server(config, listener.getsockname()[1], stack)
        server.run(sockets=[listener])
    if server.load_error is not None:
        raise server.load_error
    if server.failure is not None:
        raise EngineFailureError(f"the engine has failed: {server.failure}")
    print("SpecRouter has stopped", flush=True)
    if not server.is_loaded:
        raise StoppedWhileLoadingError


def check_server(config: ServerConfig) -> None:
    """Check the settings that depend on this machine, or raise `ConfigError`."""
    api_keys(config)
    template = config.chat_template
    if template is not None and not template.is_file():
        raise ConfigError("server.chat_template", f"there is no file {str(template.absolute())!r}")


def _load(config: RouterConfig, drain: Drain, progress: LoadProgress) -> _Loaded:
    """Import PyTorch, load the models and make the application: seconds to minutes of work."""
    from specrouter.http.app import create_app
    from specrouter.http.guards import add_guards

    if config.server.log_format == "json":
        adopt_transformers()
    router = _router(config, progress)
    try:
        app = create_app(router, drain)
        add_guards(app, config.server, drain)
    except BaseException:
        router.close()
        raise
    return router, app


def _router(config: RouterConfig, progress: LoadProgress) -> ServingRouter:
    """Return a router with an engine in this process, or with replicas in others."""
    from specrouter.router import ChainRouter

    if config.cluster is None:
        return ChainRouter.from_config(config, progress, loads_later=True)
    from specrouter.cluster.router import ClusterRouter

    try:
        from specrouter.cluster.serve_link import ServeHost
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        reason = "needs Ray Serve: pip install 'specrouter[cluster]'"
        raise ConfigError("cluster", reason) from error
    start = partial(ServeHost, config, ChainRouter.from_config, progress)
    return ClusterRouter(config, start, progress)


class _Server(uvicorn.Server):
    """Server that loads once it listens, and drains before uvicorn stops and closes the listener.

    `load_error`: why loading failed. `failure`: that of the engine, if the service stopped because
    of it. `stack`: closes the router at the end.
    """

    def __init__(self, config: RouterConfig, port: int, stack: ExitStack) -> None:
        self._drain = Drain()
        self._shown = Progress("starting") if is_live(sys.stderr) else None
        self._progress = ShownLoad(self._shown) if self._shown else LoadProgress()
        self._startup = Startup(config.pool.target, self._progress, config.server.page)
        super().__init__(
            uvicorn.Config(
                RequestLog(self._startup),
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=_CLOSE_S,
                timeout_keep_alive=_KEEP_ALIVE_S,
                **protocol_settings(config.server),
            )
        )
        self.load_error: Exception | None = None
        self.failure: str | None = None
        self._settings = config
        self._stack = stack
        self._router: ServingRouter | None = None
        self._port = port
        self._signals = 0

    @property
    def is_loaded(self) -> bool:
        return self._router is not None

    async def main_loop(self) -> None:
        ticking = asyncio.ensure_future(super().main_loop())
        router = await self._loaded_router()
        if router is not None:
            await self._until_over(router)
        self.should_exit = True
        await ticking

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Count a signal; uvicorn would stop at the first one, and raise it again at the end."""
        self._signals += 1
        self.force_exit = self._signals > 2

    async def _loaded_router(self) -> ServingRouter | None:
        """Return the loaded router, or None if loading failed or a signal came first."""
        loading = asyncio.wrap_future(
            _in_thread(lambda: _load(self._settings, self._drain, self._progress))
        )
        shown_s = time.monotonic()
        with self._shown or nullcontext():
            while not loading.done() and not self._signals:
                await asyncio.wait({loading}, timeout=_POLL_S)
                is_due = self._shown is None and time.monotonic() - shown_s >= _SHOW_S
                if is_due and not loading.done():
                    logger.info("%s", self._startup.message)
                    shown_s = time.monotonic()
        if not loading.done():
            logger.info("stopping before the models are loaded")
            return None
        try:
            router, service = loading.result()
        except ConfigError as error:
            self.load_error = error
            return None
        except Exception as error:
            logger.exception("loading has failed")
            self.load_error = EngineFailureError(f"cannot load: {type(error).__name__}: {error}")
            return None
        for sig in HANDLED_SIGNALS:  # libraries may have replaced the handlers: Ray does
            signal.signal(sig, self.handle_exit)
        self._router = self._stack.enter_context(router)
        gc.freeze()  # all of it stays, and collecting it would delay every stream
        gc.enable()
        self._startup.hand_over(service)
        print(self._announcement(router.pool.target), flush=True)
        return self._router

    def _announcement(self, target: str) -> str:
        host, port = self._settings.server.host, self._port
        reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        url = f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
        asks = "Open it in a browser, or try" if self._settings.server.page else "Try"
        # The user's shell provides the key, which must not get into a log.
        has_keys = bool(api_keys(self._settings.server))
        key = """    -H "Authorization: Bearer $SPECROUTER_API_KEY" \\\n""" if has_keys else ""
        return (
            f"SpecRouter serves {target} at {url} (Ctrl-C stops it). {asks}:\n"
            f"  curl {url}/generate -H 'Content-Type: application/json' \\\n{key}"
            """    -d '{"prompt": "def fib(n):", "max_new_tokens": 32}'"""
        )

    async def _until_over(self, router: ServingRouter) -> None:
        """Wait for a signal or a failure, and then for the last answers or their timeout."""
        awaited = router.health().loading
        while not self._signals and self._is_engine_well(router):
            await asyncio.sleep(_POLL_S)
            if awaited and not router.health().loading:
                logger.info("%s", _drafters_of(router, awaited))
                awaited = ()
                gc.freeze()
        if self._signals:
            await self._drained(router)
        if self._drain.in_flight and self.failure is None:
            threading.Thread(target=router.close, args=(_CLOSE_S,), daemon=True).start()
        await self._drain.wait_until_idle(_LAST_MESSAGES_S, lambda: self.force_exit)

    async def _drained(self, router: ServingRouter) -> None:
        self._drain.begin()
        state, drain_s = router.instruments.engine_state(), self._settings.server.drain_s
        logger.info(
            "stopping: %d requests run and %d wait, and have %g s to finish",
            state.running,
            state.waiting,
            drain_s,
        )
        ended = await self._drain.wait_until_idle(
            drain_s, lambda: self._signals > 1 or not self._is_engine_well(router)
        )
        if not ended:
            logger.warning("%d requests did not finish and are ended", self._drain.in_flight)
        speedups = router.instruments.engine_state().speedups
        if speedups:
            logger.info("speed with drafts over that without, measured: %s", summary(speedups))

    def _is_engine_well(self, router: ServingRouter) -> bool:
        if not router.is_healthy:
            self.failure = router.failure or "it has stopped"
        return self.failure is None


def _drafters_of(router: ServingRouter, awaited: Iterable[str]) -> str:
    """Return a message: loaded drafters, and why the other `awaited` ones are not loaded."""
    known, why = router.instruments.engine_state().weight_bytes, router.health().unloadable
    loaded = [name for name in known if name != router.pool.target]
    full = "the pool is full (it is loaded when it is first used)"
    others = (f"{name} is not: {why.get(name, full)}" for name in awaited if name not in known)
    return "; ".join([f"drafters that are loaded: {', '.join(loaded) or 'none'}", *others])


def _in_thread(work: Callable[[], _Loaded]) -> Future[_Loaded]:
    """Run `work` in a daemon thread: the end of the process does not wait for it."""
    result: Future[_Loaded] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="specrouter-load", daemon=True).start()
    return result


def _bound_socket(host: str, port: int) -> socket.socket:
    """Bind a socket before the models are loaded, so that a port in use is reported at once."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        what = "port" if getattr(error, "errno", None) == errno.EADDRINUSE else "host"
        raise ConfigError(f"server.{what}", f"cannot listen on {host}:{port}: {reason}") from error
    return listener
