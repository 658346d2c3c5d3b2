"""Services for a replay: a router in this process, or a server over HTTP.

Contract: a request that is refused or fails has an answer with its error. A router's times are the
engine's own; a server's are measured at the client, so they include HTTP.
"""

import threading
import time
import urllib.error
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelpool.errors import ConfigError
from specrouter.bench.contenders import MeasurementError
from specrouter.bench.replay import LoadRequest, Pending, ReplayAnswer
from specrouter.http_client import FAILURES, Server, events
from specrouter.request.handle import RequestHandle
from specrouter.request.objective import SLO
from specrouter.request.params import RequestError, SamplingParams
from specrouter.router import ChainRouter

_END_S = 60.0  # limit for the end of a cancelled request
_SILENCE_S = 600.0  # limit for a server's silence between two events
_FIRST_TIMEOUT_S = 10.0


class OwnService:
    """A router in this process."""

    def __init__(self, router: ChainRouter) -> None:
        self._router = router

    def send(self, request: LoadRequest) -> Pending:
        params = SamplingParams(
            max_new_tokens=request.new_tokens,
            temperature=request.temperature,
            seed=request.seed,
            ignore_eos=True,
            prefix_cache=False,  # the same prompts are sent several times
            cache_salt=request.tenant,
        )
        slo = None
        if request.has_objective:
            slo = SLO(tpot_ms=request.objective_ms, ttft_ms=request.ttft_ms, e2e_ms=request.e2e_ms)
        try:
            handle = self._router.submit(request.token_ids, params, request.speculation, slo=slo)
        except (RequestError, RuntimeError) as error:  # RuntimeError: the engine has failed
            return _OwnPending(None, str(error))
        return _OwnPending(handle)


@dataclass(frozen=True)
class _OwnPending:
    """A request to the router; `handle` is None if it was refused, for the reason `refusal`."""

    handle: RequestHandle | None
    refusal: str = ""

    @property
    def is_done(self) -> bool:
        return self.handle is None or self.handle.is_done

    def cancel(self) -> None:
        if self.handle is not None:
            self.handle.cancel()

    def answer(self) -> ReplayAnswer:
        if self.handle is None:
            return ReplayAnswer(error=self.refusal)
        try:
            output = self.handle.result(_END_S)
        except TimeoutError as error:
            return ReplayAnswer(error=str(error))
        metrics, reason = output.metrics, output.finish_reason
        return ReplayAnswer(
            ttft_ms=metrics.ttft_ms,
            tpot_ms=metrics.tpot_ms,
            tokens=metrics.output_tokens,
            acceptance_length=metrics.acceptance_length,
            error=None if reason == "length" else output.error or reason,
        )


class ServerService:
    """A SpecRouter server elsewhere, with a thread and a connection for each request.

    Raises `ConfigError` if the server is not healthy, or does not return its model.

    Attributes:
        model: name of the served model.
        max_request_tokens: most tokens of a request, prompt and output.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._server = Server(url.rstrip("/"), api_key)
        self._known_ids: dict[str, tuple[int, ...]] = {}
        try:
            self._server.open("/health", None, _FIRST_TIMEOUT_S).close()
        except FAILURES as error:
            raise ConfigError("--server", f"{url} is not healthy: {error}") from error
        try:
            model = self._server.ask("/v1/models", None, _FIRST_TIMEOUT_S)["data"][0]
            self.model, self.max_request_tokens = str(model["id"]), int(model["max_model_len"])
        except FAILURES as error:
            raise ConfigError("--server", f"{url} does not say what it serves: {error}") from error

    def tokenize(self, text: str) -> Sequence[int]:
        """Return the server's ids for a text, which is asked for once.

        Raises `MeasurementError`.
        """
        if text not in self._known_ids:
            try:
                answer = self._server.ask("/tokenize", {"prompt": text}, _FIRST_TIMEOUT_S)
                self._known_ids[text] = tuple(map(int, answer["tokens"]))
            except FAILURES as error:
                raise MeasurementError(f"the server does not tokenize: {error}") from error
        return self._known_ids[text]

    def send(self, request: LoadRequest) -> Pending:
        body = {
            "input_ids": list(request.token_ids),
            "max_new_tokens": request.new_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "ignore_eos": True,
            "prefix_cache": False,
            "cache_salt": request.tenant,
            "speculation": request.speculation,
            "stream": True,
        }
        objectives = {
            "x-slo-tpot-ms": request.objective_ms,
            "x-slo-ttft-ms": request.ttft_ms,
            "x-slo-e2e-ms": request.e2e_ms,
        }
        headers = {name: f"{ms:.6g}" for name, ms in objectives.items() if ms is not None}
        return _ServerPending(lambda: self._server.open("/generate", body, _SILENCE_S, headers))


class _ServerPending:
    """A request to the server; `send` opens the stream of its answer."""

    def __init__(self, send: Callable[[], Any]) -> None:
        self._send = send
        self._answer: ReplayAnswer | None = None
        self._is_cancelled = False
        self._started_s = time.perf_counter()  # before the thread's start, which may be delayed
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return self._answer is not None

    def cancel(self) -> None:
        """Close the connection at the next event, which the server notices."""
        self._is_cancelled = True

    def answer(self) -> ReplayAnswer:
        self._thread.join(_END_S)
        return self._answer or ReplayAnswer(error="the server does not end its answer")

    def _run(self) -> None:
        """Read the answer, with times measured at the client."""
        first_s = last_s = 0.0
        tokens = 0
        end: Mapping[str, Any] = {"error": "the answer has no end"}
        failure: str | None = None
        try:
            with self._send() as response:
                for event in events(response):
                    if event.get("token_ids"):
                        last_s = time.perf_counter()
                        first_s = first_s or last_s
                        tokens += len(event["token_ids"])
                    if "error" in event or "finish_reason" in event:
                        end = event
                    if self._is_cancelled:
                        raise TimeoutError("cancelled")
            failure = _cause(end)
        except urllib.error.HTTPError as error:
            failure = f"{error} {error.read(300).decode(errors='replace')}"
        except FAILURES as error:
            failure = f"{type(error).__name__}: {error}"
        except BaseException as error:
            failure = repr(error)
            raise
        finally:
            self._answer = ReplayAnswer(
                ttft_ms=(first_s - self._started_s) * 1000 if tokens else None,
                tpot_ms=(last_s - first_s) * 1000 / (tokens - 1) if tokens > 1 else None,
                tokens=tokens,
                acceptance_length=(end.get("metrics") or {}).get("acceptance_length"),
                error=failure,
            )


def _cause(end: Mapping[str, Any]) -> str | None:
    """Return why an answer is not as requested, from the event that ended it."""
    error = end.get("error")
    if isinstance(error, Mapping):
        error = error.get("message")
    reason = error or end.get("finish_reason")
    return None if reason == "length" else str(reason)
