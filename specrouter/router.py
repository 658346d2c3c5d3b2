"""ChainRouter: the public entry point, which queues checked requests and returns their outputs.

Contract: an accepted request ends in exactly one last delta; one that cannot be served is refused
with `RequestError` before it is queued. Requests join and leave at any cycle. An `EngineThread`
runs the cycles, so callers may be threads, coroutines or a script. Source: SpecRouter, section 4.1
and Listing 1.
"""

import itertools
import logging
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from modelpool import ModelPool
from modelpool.config import validate_config
from modelpool.progress import LoadProgress
from specrouter.config import (
    EngineConfig,
    RouterConfig,
    SchedulerConfig,
    TreesConfig,
    check_chain,
)
from specrouter.engine.engine import Engine
from specrouter.engine.engine_thread import EngineThread
from specrouter.engine.fingerprint import fingerprint_of, served_model, with_bits
from specrouter.engine.input_validation import InputValidation
from specrouter.engine.instruments import EngineInstruments
from specrouter.engine.request import PromptLike, Request, args_of_each
from specrouter.engine.serving import Health, streamed
from specrouter.request.chat_template import ChatTemplate
from specrouter.request.delta_stream import DeltaStream, DeltaStreams
from specrouter.request.detokenizer import Detokenizer
from specrouter.request.errors import EngineDeadError, UnavailableError
from specrouter.request.handle import Listener, RequestHandle
from specrouter.request.lanes import Lanes
from specrouter.request.objective import SloLike
from specrouter.request.output import Delta, RequestOutput
from specrouter.request.params import RequestError, SamplingParams
from specrouter.request.receipt import ServedModel
from specrouter.request.running import RunningRequest
from specrouter.request.spec import RequestSpec, SpeculationOverride
from specrouter.request.structure import Structure

logger = logging.getLogger(__name__)

_PATIENCE_S = 30.0


class ChainRouter:
    """An engine with a pool of models, which routes prompts through chains of them.

        with ChainRouter.from_config("tiny") as router:
            [output] = router.generate("def fib(n):", SamplingParams(max_new_tokens=64))
            print(output.text, output.metrics.acceptance_length)

    `generate` waits for whole outputs, `stream` and `astream` yield their parts as they come,
    `chat` answers a conversation, and `submit` returns a handle to wait for or cancel. All may be
    called from any thread; requests of all callers share the models. Close it, or use it as a
    context manager.

    Attributes:
        config: the configuration.
        pool: the models.
        slo_classes: objectives by the name that requests ask for.
        sampling_defaults: sampling parameters for what a request leaves out.
        lanes: threads in which `submit_each` is called.
        streams: source of the streams that `submit_each` takes.
        limits: limits of a request's length.
        fingerprint: changes where the same seed may give another text.
        instruments: statistics, decisions, metrics, and settings for measurements.
    """

    def __init__(
        self,
        config: RouterConfig,
        progress: LoadProgress | None = None,
        loads_later: bool = False,
    ) -> None:
        self.config = config
        for warning in config.warnings:
            logger.warning(warning)
        if config.cluster is not None:
            logger.warning("cluster: this is one engine; `specrouter serve` starts replicas")
        engine = config.engine
        self.pool = ModelPool.from_config(
            config.pool,
            kv_tokens=engine.kv_limit or engine.kv_tokens,
            row_states=engine.row_states,
            progress=progress,
        )
        thread = EngineThread(Engine(config, self.pool), engine.step_timeout_s, loads_later)
        self._validation = InputValidation(config, self.pool, lambda: thread.engine)
        self.slo_classes = self._validation.slo_classes
        self.sampling_defaults = self._validation.sampling_defaults
        self.lanes = Lanes()
        self.limits = self._validation.context
        self.fingerprint = fingerprint_of(config.pool, self.pool)
        self._ids = itertools.count(1)
        self.streams = DeltaStreams()
        self._thread = thread
        self.instruments = EngineInstruments(thread)
        thread.start()  # raises errors of the target
        self.fingerprint = with_bits(self.fingerprint, self.pool)
        self._served: ServedModel | None = None
        self._reading = threading.Lock()

    @classmethod
    def from_config(
        cls,
        source: "str | Path | Mapping[str, Any] | RouterConfig",
        progress: LoadProgress | None = None,
        loads_later: bool = False,
    ) -> "ChainRouter":
        """Make a router from a YAML file, a bundled scenario's name, a mapping or a configuration.

        Returns when the models are loaded. Raises `ConfigError`.

        Args:
            source: one of these.
            progress: gets each step of loading.
            loads_later: return when the target is loaded. Drafters are loaded while requests are
                served, which wait for at most one of them; `health` lists those still to load.
        """
        return cls(RouterConfig.load(source), progress, loads_later)

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        speculation: SpeculationOverride | Sequence[SpeculationOverride] = None,
        slo: SloLike | Sequence[SloLike] = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> list[RequestOutput]:
        """Serve all prompts together, and return their outputs in the same order.

        The samples of a prompt (`params.n`) are consecutive, by index.

        Args:
            prompts: texts or lists of token ids; a single one of either is a list of one.
            params: one for all prompts, or one for each.
            speculation: one for all prompts, or one for each.
            slo: an objective or the name of a class of the configuration; one for all, or one for
                each.
            priority: lower numbers are admitted first: each step is worth ten seconds of waiting,
                so no request starves.
            timeout_s: time after which a request ends with what it has, and the finish reason
                "timeout".

        Raises:
            RequestError: a prompt or a parameter is refused; of several prompts, it says which.
                None of them is served then.
        """
        each = args_of_each(prompts, params, speculation, slo, priority, timeout_s)
        accepted = [sample for _, sample in self._validation.accept_all(each)]
        handles = self._enqueue(accepted)
        try:
            return [handle.result() for handle in handles]
        except BaseException:  # such as Ctrl-C: the caller no longer waits for them
            for handle in handles:
                handle.cancel()
            raise

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        speculation: SpeculationOverride = None,
        slo: SloLike = None,
    ) -> RequestOutput:
        """Answer a conversation; with `params.n` above 1, return the first sample.

        Args:
            messages: each with a `role` and a `content`, in OpenAI's format.
            params: as in `generate`.
            speculation: as in `generate`.
            slo: as in `generate`.

        Raises:
            RequestError: the chat template cannot take the messages, or as in `generate`.
            ConfigError: `server.chat_template` cannot be read, or is not a template.
        """
        return self.generate(self.chat_template.prompt(messages), params, speculation, slo)[0]

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The template of `chat`. Raises `ConfigError` if `server.chat_template` cannot be read."""
        server = self.config.server
        return ChatTemplate(self.tokenizer, server.chat_template, server.literal_user_text)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer, which all models share."""
        return self.pool.tokenizer

    def stream(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        speculation: SpeculationOverride = None,
        slo: SloLike = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Iterator[Delta]:
        """Yield the deltas of all samples as they come. Raises `RequestError` at the call.

        The request is submitted when the first delta is asked for; leaving the loop cancels it.
        """
        asked = _asked(prompt, params, speculation, slo, priority, timeout_s)
        return self._deltas(self._validation.accept_samples(asked))

    def _deltas(self, accepted: Sequence[RequestSpec]) -> Iterator[Delta]:
        deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        handles = self._enqueue(accepted, [deltas.put] * len(accepted))
        try:
            running = len(handles)
            while running:
                delta = deltas.get()
                EngineDeadError.check(delta.output)
                yield delta
                running -= delta.finish_reason is not None
        finally:
            for handle in handles:
                handle.cancel()

    async def astream(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        speculation: SpeculationOverride = None,
        slo: SloLike = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Delta]:
        """Yield deltas like `stream`, for coroutines; closing the generator cancels the request."""
        asked = _asked(prompt, params, speculation, slo, priority, timeout_s)
        async with streamed(self, [asked]) as deltas:
            async for _, delta in deltas:
                EngineDeadError.check(delta.output)
                yield delta

    def submit(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        speculation: SpeculationOverride = None,
        generated: Sequence[int] = (),
        slo: SloLike = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> RequestHandle:
        """Queue one request for one sample.

        `generated` holds the output tokens of an earlier attempt. They count as output: the text
        continues after them exactly as if it had not been interrupted. `slo` is judged over the
        tokens of this attempt. The other arguments are those of `generate`.

        Raises:
            RequestError: names the field; nothing was queued.
        """
        asked = _asked(prompt, params, speculation, slo, priority, timeout_s, generated)
        accepted = self._validation.accept(asked)
        if accepted.params.n > 1:
            raise RequestError("n", "must be 1 here: submit_all gives a handle for each sample")
        return self._enqueue([accepted])[0]

    def submit_all(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        speculation: SpeculationOverride = None,
        slo: SloLike = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> list[RequestHandle]:
        """Queue all samples of one prompt, and return `params.n` handles, by index.

        Raises:
            RequestError: names the field; nothing was queued.
        """
        asked = _asked(prompt, params, speculation, slo, priority, timeout_s)
        return self._enqueue(self._validation.accept_samples(asked))

    def submit_each(
        self, asked: Sequence[Request], stream: DeltaStream, max_waiting: int | None = None
    ) -> None:
        """Queue all samples of several requests, or none of them.

        A request with a `sample` is served only that one of its `params.n`. With `generated` it
        continues an attempt of another replica: the text is exactly as if it had not been
        interrupted, and with `elapsed_s` and `arrivals` its times count from the first submission.

        Args:
            asked: the requests.
            stream: one of `streams`, which receives their deltas.
            max_waiting: most requests that may wait.

        Raises:
            RequestError: names the field.
            OverloadedError: more than `max_waiting` - 1 requests wait already.
            UnavailableError: the router is closed or has failed.
        """
        accepted = self._validation.accept_all(asked)
        listeners = [partial(stream.put, number) for number, _ in accepted]
        samples = [sample for _, sample in accepted]
        stream.begin(self._enqueue(samples, listeners, max_waiting))

    def check_structure(self, structure: Structure) -> None:
        """Compile a structure, which may take a second, for the requests that will ask for it.

        Raises:
            RequestError: for the field "structure".
        """
        self._validation.check_structure(structure)

    def check_room(self, max_waiting: int | None = None) -> None:
        """Check for room before work that a request needs, such as tokenizing its prompt.

        Raises:
            OverloadedError: more than `max_waiting` - 1 requests wait.
            UnavailableError: the router is closed or has failed.
        """
        self._thread.check_room(max_waiting)

    def health(self) -> Health:
        engine = self._thread.engine
        return Health(
            "ok" if self.is_healthy else "stopped",
            loading=engine.awaited,
            unloadable=engine.unloadable,
        )

    @property
    def is_healthy(self) -> bool:
        return self._thread.is_healthy

    @property
    def failure(self) -> str | None:
        """Why the engine has stopped for good; None while it runs, and after `close`."""
        return self._thread.failure

    def restart_replicas(self) -> None:
        raise UnavailableError("there are no replicas")

    def set_policy(
        self,
        policy: str,
        trees: Mapping[str, Any] | None = None,
        admission: str | None = None,
        **settings: Any,
    ) -> None:
        """Route by another policy from now on; what the profiler has learned stays.

        Args:
            policy: name of the chain policy.
            trees: keys of the section `trees` (`TreesConfig`); None keeps the configured ones.
            admission: as in the section `engine`; None keeps the configured one.
            settings: keys of the scheduler (`SchedulerConfig`), such as a chain for `static`.

        Raises:
            ConfigError: names the field.
            UnavailableError: the router is closed or has failed.
        """
        scheduler = {**settings, "policy": policy}
        checked = validate_config(SchedulerConfig, scheduler, "scheduler")
        check_chain(self.config.model_copy(update={"scheduler": checked}))
        shapes = self.config.trees
        if trees is not None:
            shapes = validate_config(TreesConfig, dict(trees), "trees")
        chosen = self.config.engine.model_dump() | ({"admission": admission} if admission else {})
        admits = validate_config(EngineConfig, chosen, "engine").admission
        engine = self._thread.engine
        self._thread.run_idle(lambda: engine.set_policy(checked, shapes, admits))

    def close(self, patience_s: float = _PATIENCE_S) -> None:
        """End running requests with "cancelled", and the router's threads.

        If a forward of the target takes longer than `patience_s`, its requests end with an error,
        and its thread ends with the process.
        """
        _close(self.lanes, self._thread, patience_s)

    def __enter__(self) -> "ChainRouter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _served_model(self) -> ServedModel:
        """Return the identity of the target's files, which are read once. Raises `RequestError`."""
        with self._reading:
            if self._served is None:
                try:
                    self._served = served_model(self.config.pool, self.pool)
                except (OSError, ValueError) as error:
                    raise RequestError("receipt", f"cannot be had: {error}") from error
            return self._served

    def _enqueue(
        self,
        prompts: Sequence[RequestSpec],
        listeners: Sequence[Listener] | None = None,
        max_waiting: int | None = None,
    ) -> list[RequestHandle]:
        """Queue all of the requests, or none."""
        each: Sequence[Listener | None] = listeners or [None] * len(prompts)
        requests = [
            RunningRequest(
                prompt,
                RequestHandle(next(self._ids), self._thread.wake, listener),
                Detokenizer(self.pool.tokenizer, prompt.params, prompt.token_ids),
                self.pool.eos_token_ids,
                served=self._served_model() if prompt.params.receipt else None,
            )
            for prompt, listener in zip(prompts, each, strict=True)
        ]
        self._thread.enqueue(requests, max_waiting)
        return [request.handle for request in requests]


def close_when_dropped(router: ChainRouter) -> Callable[[], object]:
    """Close the router when its last reference is gone or the interpreter ends.

    Returns a function that closes it at once.
    """
    return weakref.finalize(router, _close, router.lanes, router._thread, _PATIENCE_S)


def _close(lanes: Lanes, thread: EngineThread, patience_s: float) -> None:
    lanes.close()
    thread.close(patience_s)


def _asked(
    prompt: PromptLike,
    params: SamplingParams | None,
    speculation: SpeculationOverride,
    slo: SloLike,
    priority: int,
    timeout_s: float | None,
    generated: Sequence[int] = (),
) -> Request:
    return Request(
        prompt=prompt,
        params=params,
        speculation=speculation,
        slo=slo,
        priority=priority,
        timeout_s=timeout_s,
        generated=generated,
    )
