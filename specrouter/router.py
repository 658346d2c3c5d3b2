"""ChainRouter: the public entry. It queues checked requests, and hands back what comes out.

Contract: a request that is accepted ends in exactly one last delta; one that cannot be served is
refused with `RequestError` before it is queued. Requests join and leave at any cycle. An
`EngineThread` runs the cycles, so callers may be threads, coroutines or a script.
Source: SpecRouter, section 4.1 and Listing 1.
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
    """Serves prompts with a pool of models, routed through chains of them.

        with ChainRouter.from_config("tiny") as router:
            [output] = router.generate("def fib(n):", SamplingParams(max_new_tokens=64))
            print(output.text, output.metrics.acceptance_length)

    `generate` waits for whole outputs, `stream` and `astream` give their parts as they come, `chat`
    answers a conversation, and `submit` gives a handle to wait for or cancel. All may be called
    from any thread; requests of all callers share the models. Close it, or use it as a context
    manager.

    Attributes:
        config: what it was made of.
        pool: the models.
        slo_classes: objectives by the name that requests ask for.
        sampling_defaults: sampling parameters of requests that do not say their own.
        lanes, streams: for `submit_each`: the threads in which it is called, what it tells.
        limits: how long a request may be.
        fingerprint: changes where the same seed may give another text.
        instruments: statistics, decisions, metrics, and what measurements set.
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
        thread.start()  # raises what is wrong with the target
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
        """From a YAML file, the name of a bundled scenario ("tiny"), a mapping or a configuration.

        Returns when the models are loaded. Raises `ConfigError`.

        Args:
            progress: told what is being done.
            loads_later: it returns when the target is loaded. Drafters are loaded while requests
                are served, which at most wait for one of them; `health` says which are left.
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
        """Serves all prompts together, and returns their outputs in the same order.

        The samples of a prompt (`params.n`) follow one another, by index.

        Args:
            prompts: texts or lists of token ids; one of either is a list of one.
            params, speculation: one for all prompts, or one for each.
            slo: an objective or the name of a class of the configuration; also for all or for each.
            priority: those of a lower number are admitted first: each step of it is worth ten
                seconds of waiting, so that nobody starves.
            timeout_s: after which a request ends with what it has, "timeout" its finish reason.

        Raises:
            RequestError: a prompt or a parameter is refused, and of several prompts which; none of
                them is served then.
        """
        each = args_of_each(prompts, params, speculation, slo, priority, timeout_s)
        accepted = [sample for _, sample in self._validation.accept_all(each)]
        handles = self._enqueue(accepted)
        try:
            return [handle.result() for handle in handles]
        except BaseException:  # Ctrl-C: nobody waits for them any more
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
        """The answer to a conversation; with `params.n` above 1 the first sample.

        Args:
            messages: each with a `role` and a `content`, as OpenAI has them.

        Raises:
            RequestError: for messages that the chat template cannot take, and as `generate`.
            ConfigError: `server.chat_template` cannot be read, or is no template.
        """
        return self.generate(self.chat_template.prompt(messages), params, speculation, slo)[0]

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """That of `chat`. Raises `ConfigError`: `server.chat_template` cannot be read."""
        server = self.config.server
        return ChatTemplate(self.tokenizer, server.chat_template, server.literal_user_text)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's, which all models share."""
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
        """Deltas of all samples as they come; the first one that is asked for submits the request,
        and leaving the loop cancels it. Raises `RequestError`, before that."""
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
        """`stream` for coroutines; closing the generator cancels the request."""
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
        """Queues one request for one sample.

        Args:
            generated: output tokens that an earlier attempt produced. They count as output: the
                text goes on after them exactly as if it had not been interrupted.
            slo: judged over the tokens of this attempt.

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
        """Queues all samples of one prompt: `params.n` handles, by index.

        Raises:
            RequestError: names the field; nothing was queued.
        """
        asked = _asked(prompt, params, speculation, slo, priority, timeout_s)
        return self._enqueue(self._validation.accept_samples(asked))

    def submit_each(
        self, asked: Sequence[Request], stream: DeltaStream, max_waiting: int | None = None
    ) -> None:
        """Queues all samples of several requests, or none; the stream tells what they say.

        One that asks for a `sample` is served that one of its `params.n`; with `generated`, from
        where an attempt elsewhere has got to: the text goes on exactly as if it had not been
        interrupted, and with `elapsed_s` and `arrivals` its times count from the first submission.

        Args:
            stream: of `streams`.
            max_waiting: requests that may be waiting already.

        Raises:
            RequestError: names the field.
            OverloadedError: more wait than `max_waiting` - 1.
            UnavailableError: the router is closed or has failed.
        """
        accepted = self._validation.accept_all(asked)
        listeners = [partial(stream.tell, number) for number, _ in accepted]
        samples = [sample for _, sample in accepted]
        stream.begin(self._enqueue(samples, listeners, max_waiting))

    def check_structure(self, structure: Structure) -> None:
        """Compiles it, which may take a second; a request that asks for it finds it compiled.

        Raises:
            RequestError: of the field "structure".
        """
        self._validation.check_structure(structure)

    def check_room(self, max_waiting: int | None = None) -> None:
        """For who has work to do before a request can be queued, such as to tokenize its prompt.

        Raises:
            OverloadedError: more wait than `max_waiting` - 1.
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
        """Why the engine has stopped for good; None while it runs, and after a close."""
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
        """Routes by another policy from now on; what was learned stays.

        Args:
            trees: of the section `trees` (`TreesConfig`); None keeps the configured ones.
            admission: of the section `engine`; None keeps the configured one.
            settings: of the scheduler (`SchedulerConfig`), such as a chain for `static`.

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
        """Ends what runs with "cancelled", and the router's threads.

        A forward of the target that goes on for `patience_s` longer is left behind: its requests
        end with an error, and its thread with the process.
        """
        _close(self.lanes, self._thread, patience_s)

    def __enter__(self) -> "ChainRouter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _served_model(self) -> ServedModel:
        """Reads the target's files, once. Raises `RequestError`."""
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
        """All of them or none."""
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
    """Called, it closes the router; as is done when nobody holds that, or the interpreter ends."""
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
