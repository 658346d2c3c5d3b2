"""ChainRouter: accepts requests, and drives the decoding cycle that serves them.

Contract: a request that is accepted ends in exactly one last delta; one that cannot be served is
refused with `RequestError` before it is queued. Requests join and leave at any cycle. One thread
of the router's own runs the cycles, so callers may be threads, coroutines or a script.
Source: SpecRouter, section 4.1 and Listing 1.
"""

import asyncio
import itertools
import logging
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prometheus_client.metrics_core import Metric

from modelpool import ModelPool
from modelpool.config import validate_config
from specrouter.calibration import CalibrationFigures
from specrouter.config import RouterConfig, SchedulerConfig, TreesConfig, check_chain
from specrouter.decision_record import DecisionRecord
from specrouter.decode_counts import DecodeFigures
from specrouter.engine import Engine, EngineState
from specrouter.errors import OverloadedError, UnavailableError
from specrouter.grammar import GrammarCompiler
from specrouter.hang_guard import Abandoned
from specrouter.output import Delta, RequestOutput
from specrouter.params import RequestError, SamplingParams, Speculation, check_int
from specrouter.prediction import PerformanceSnapshot, TreeKey
from specrouter.profiler import EngineStatistics
from specrouter.request import (
    MAX_PRIORITY,
    Listener,
    Prompt,
    RequestHandle,
    RunningRequest,
    SpeculationOverride,
)
from specrouter.slo import SLO, SloLike, check_positive, resolve
from specrouter.slo_accounts import SloCounts, SloReport

logger = logging.getLogger(__name__)

PromptLike = str | Sequence[int]

_MOST_CRASHES, _CRASHES_S = 3, 600.0  # of the engine within so many seconds; then it stays down
_PROMPT_FIELDS = ("prompt", "input_ids")
_LOOK_S = 1.0  # how often, at least, the engine's thread is looked after


@dataclass(frozen=True)
class _Asked:
    """A call's arguments, for one prompt."""

    prompt: PromptLike
    params: SamplingParams | None
    speculation: SpeculationOverride
    slo: SloLike
    priority: int = 0
    timeout_s: float | None = None


class ChainRouter:
    """See the module. Close it, or use it as a context manager."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        engine = config.engine
        self.pool = ModelPool.from_config(config.pool, kv_tokens=engine.kv_tokens)
        self.pool.check_architectures()
        self.slo_classes: Mapping[str, SLO] = {
            name: one.slo() for name, one in config.slo_classes.items()
        }
        self._engine = Engine(config, self.pool)
        self._grammars = GrammarCompiler(
            self.pool.tokenizer, self.pool.vocab_size, self.pool.eos_token_ids
        )
        self._ids = itertools.count(1)
        self._wakeup = threading.Condition()
        self._arrived: deque[RunningRequest] = deque()
        self._closing = False
        self._failure: str | None = None
        self._stuck = False  # the engine's thread: nothing can end it
        self._crashes: deque[float] = deque(maxlen=_MOST_CRASHES)  # when the engine failed
        self._restarts = 0
        self._errand: tuple[Callable[[], Any], Future[Any]] | None = None
        self._ended = threading.Event()
        self._threads: dict[str, threading.Thread] = {}
        loaded: Future[None] = Future()
        self._start_thread("engine", self._load_and_run, loaded)
        loaded.result()  # raises what is wrong with the target

    @classmethod
    def from_config(cls, source: "str | Path | Mapping[str, Any] | RouterConfig") -> "ChainRouter":
        """From a YAML file, a mapping or a configuration. Raises `modelpool.ConfigError`."""
        return cls(RouterConfig.load(source))

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
            RequestError: a prompt or a parameter is refused; none of the prompts is served then.
        """
        several: list[PromptLike] = _as_prompts(prompts)
        each_params = _one_each("params", params, SamplingParams, several)
        each_override = _one_each("speculation", speculation, (Speculation, str), several)
        each_slo = _one_each("slo", slo, (SLO, str), several)
        accepted = [
            sample
            for asked in zip(several, each_params, each_override, each_slo, strict=True)
            for sample in self._accept_samples(_Asked(*asked, priority, timeout_s))
        ]
        handles = self._enqueue(accepted)
        try:
            return [handle.result() for handle in handles]
        except BaseException:  # Ctrl-C: nobody waits for them any more
            for handle in handles:
                handle.cancel()
            raise

    def stream(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        speculation: SpeculationOverride = None,
        slo: SloLike = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Iterator[Delta]:
        """Deltas of all samples as they come; leaving the loop cancels the request."""
        asked = _Asked(prompt, params, speculation, slo, priority, timeout_s)
        accepted = self._accept_samples(asked)
        deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        handles = self._enqueue(accepted, [deltas.put] * len(accepted))
        try:
            running = len(handles)
            while running:
                delta = deltas.get()
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
        together = self.astream_all([prompt], params, speculation, slo, priority, timeout_s)
        async with aclosing(together):
            async for _, delta in together:
                yield delta

    async def astream_all(
        self,
        prompts: Sequence[PromptLike],
        params: SamplingParams | None = None,
        speculation: SpeculationOverride = None,
        slo: SloLike = None,
        priority: int = 0,
        timeout_s: float | None = None,
        max_waiting: int | None = None,
    ) -> AsyncGenerator[tuple[int, Delta]]:
        """Deltas of several prompts as they come, each with its prompt's number.

        All of them are queued or none; closing the generator cancels what still runs.

        Args:
            max_waiting: requests that may be waiting already.

        Raises:
            RequestError: names the field.
            OverloadedError: more wait than `max_waiting` - 1.
            UnavailableError: the router is closed or has failed.
        """
        asked = [_Asked(one, params, speculation, slo, priority, timeout_s) for one in prompts]
        self._check_room(max_waiting)  # before anything is done for it, and again at the end
        # A long prompt, or a structure, takes long, and other streams must go on meanwhile.
        accepted = await asyncio.to_thread(self._accept_all, asked)
        loop = asyncio.get_running_loop()
        deltas: asyncio.Queue[tuple[int, Delta]] = asyncio.Queue()

        def listener(number: int) -> Listener:
            return lambda delta: _hand_over(loop, deltas, (number, delta))

        listeners = [listener(number) for number, _ in accepted]
        handles = self._enqueue([sample for _, sample in accepted], listeners, max_waiting)
        try:
            running = len(handles)
            while running:
                number, delta = await deltas.get()
                yield number, delta
                running -= delta.finish_reason is not None
        finally:
            for handle in handles:
                handle.cancel()

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
        asked = _Asked(prompt, params, speculation, slo, priority, timeout_s)
        accepted = self._accept(asked, generated)
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
        asked = _Asked(prompt, params, speculation, slo, priority, timeout_s)
        return self._enqueue(self._accept_samples(asked))

    @property
    def is_healthy(self) -> bool:
        return self._failure is None and not self._closing

    @property
    def max_request_tokens(self) -> int:
        """The most tokens that a request may have, prompt and output."""
        limit, budget = self._engine.max_request_tokens, self.config.engine.kv_budget_tokens
        return limit if budget is None else min(limit, budget)

    @property
    def failure(self) -> str | None:
        """Why the engine has stopped for good; None while it runs, and after a close."""
        return self._failure

    @property
    def restarts(self) -> int:
        """Times that the engine has failed and begun anew."""
        return self._restarts

    def performance(self) -> PerformanceSnapshot:
        """What the scheduler knows now."""
        return self._engine.profiler.snapshot()

    def statistics(self) -> EngineStatistics:
        """Totals since the start: cycles, tokens, and where the time went."""
        return self._engine.profiler.statistics()

    def decoded(self) -> DecodeFigures:
        """Totals of the engine since it began: by chain, by position, against what was planned."""
        return self._engine.profiler.decoded()

    def engine_state(self) -> EngineState:
        """Requests, KV memory and quarantines now."""
        state = self._engine.state()
        return replace(state, waiting=state.waiting + len(self._arrived))

    def ended_requests(self) -> Iterator[Metric]:
        """Of the requests that have ended, in Prometheus' form."""
        return self._engine.meter.collect()

    def slo_counts(self) -> dict[str, SloCounts]:
        """What `slo_report` counts, by class."""
        return self._engine.slo_accounts.counts()

    def slo_report(self) -> SloReport:
        """Of the requests that have ended: objectives attained, goodput, percentiles, by class."""
        return self._engine.slo_accounts.report()

    def calibration(self) -> dict[TreeKey, CalibrationFigures]:
        """How true the probabilities were that trees were selected by: by who proposed, in how many
        inner rounds, who verified, and whether tokens were sampled."""
        known = self._engine.profiler.snapshot().trees
        return {key: seen.calibration for key, seen in known.items()}

    def decisions(self) -> list[DecisionRecord]:
        """The last switches of chain or trees, each with its alternatives, oldest first."""
        return self._engine.decisions

    def set_policy(
        self, policy: str, trees: Mapping[str, Any] | None = None, **settings: Any
    ) -> None:
        """Routes by another policy from now on; what was learned stays.

        Args:
            trees: of the section `trees` (`TreesConfig`); None keeps the configured ones.
            settings: of the scheduler (`SchedulerConfig`), such as a chain for `static`.

        Raises:
            ConfigError: names the field.
        """
        data = self.config.model_dump(mode="python", exclude={"pool", "engine", "server"})
        kept = {name: data["scheduler"][name] for name in ("groups",)}
        scheduler = {**kept, **settings, "policy": policy}
        checked = validate_config(SchedulerConfig, scheduler, "scheduler")
        whole = self.config.model_copy(update={"scheduler": checked})
        check_chain(whole)
        shapes = self.config.trees
        if trees is not None:
            shapes = validate_config(TreesConfig, dict(trees), "trees")
        self._engine.set_policy(checked, shapes)

    def predict(
        self,
        chain: Sequence[str],
        depth: int,
        width: int = 1,
        nodes: int | None = None,
        inner_rounds: int = 1,
        requests: int = 1,
    ) -> float:
        """Milliseconds per token of a request that are predicted now for a way to decode.

        Args:
            nodes: of each tree that the target verifies; None: all.
            requests: that decode together, sampled.
        """
        return self._engine.predict(tuple(chain), depth, width, nodes, inner_rounds, requests)

    def set_learning(self, is_learning: bool) -> None:
        """Whether cycles teach the scheduler. Off, a benchmark's other runs teach it nothing."""
        self._engine.profiler.is_learning = is_learning

    def run_idle(self, errand: Callable[[], Any]) -> Any:
        """Runs something in the engine's thread, whose OpenMP workers it shares, between requests.

        For measurements. Raises what `errand` raises.
        """
        result: Future[Any] = Future()
        with self._wakeup:
            if not self.is_healthy or self._errand is not None:
                raise RuntimeError(self._failure or "the router is closed or runs an errand")
            self._errand = (errand, result)
            self._wakeup.notify()
        return result.result()

    def _run_errand(self) -> None:
        assert self._errand is not None
        errand, result = self._errand
        try:
            result.set_result(errand())
        except Exception as error:
            result.set_exception(error)
        finally:
            self._errand = None

    def check_integrity(self) -> None:
        """Asserts the invariants of all state. For when no request runs."""
        self._engine.check_integrity()

    def close(self) -> None:
        """Ends what runs with "cancelled", and the router's thread."""
        with self._wakeup:
            self._closing = True
            self._wakeup.notify()
        self._ended.wait()
        # To their very end: one that the interpreter's end meets in torch would abort the process.
        for role, thread in self._threads.items():
            if not (self._stuck and role == "engine"):
                thread.join()

    def __enter__(self) -> "ChainRouter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept_all(self, asked: Sequence[_Asked]) -> list[tuple[int, Prompt]]:
        """All samples, each with its prompt's number; the refusal of a prompt tells the number."""
        accepted: list[tuple[int, Prompt]] = []
        for number, one in enumerate(asked):
            try:
                accepted += [(number, sample) for sample in self._accept_samples(one)]
            except RequestError as error:
                if len(asked) == 1 or error.field not in _PROMPT_FIELDS:
                    raise
                raise RequestError(f"{error.field}[{number}]", error.reason) from error
        return accepted

    def _accept_samples(self, asked: _Asked) -> list[Prompt]:
        accepted = self._accept(asked)
        return [replace(accepted, sample=index) for index in range(accepted.params.n)]

    def _accept(self, asked: _Asked, generated: Sequence[int] = ()) -> Prompt:
        """Everything about a request that can be refused is refused here."""
        params = SamplingParams() if asked.params is None else asked.params
        speculation = asked.speculation
        if not isinstance(params, SamplingParams):
            raise RequestError("params", "must be SamplingParams")
        check_int("priority", asked.priority, -MAX_PRIORITY, MAX_PRIORITY)
        if asked.timeout_s is not None:
            check_positive("timeout_s", asked.timeout_s)
        if isinstance(speculation, Speculation):
            names = self.pool.names
            weightless = [name for name in names if self.pool.is_weightless(name)]
            speculation.check_members(names, self.pool.target, weightless)
        elif speculation not in (None, "off"):
            raise RequestError(
                "speculation", f'must be None, "off" or a Speculation, not {speculation!r}'
            )
        tokens = self._token_ids(asked.prompt)
        made = self._checked_ids("generated", generated)
        if len(made) >= params.max_new_tokens:
            raise RequestError("max_new_tokens", f"{len(made)} tokens are generated already")
        self._check_length(tokens, params)
        vocabulary = self.pool.vocab_size
        if any(token >= vocabulary for token in params.stop_token_ids):
            raise RequestError("stop_token_ids", f"must be below {vocabulary}")
        if any(token >= vocabulary for token, _ in params.logit_bias):
            raise RequestError("logit_bias", f"token ids must be below {vocabulary}")
        bad_words = self._bad_words(params)
        grammar = None
        if params.structure is not None:
            grammar = self._grammars.compile(params.structure)
            grammar.check(made)
        objective = resolve(asked.slo, self.slo_classes, self._engine.baseline_tpot_ms)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        return Prompt(
            tokens,
            made,
            params,
            speculation,
            seed,
            bad_words_ids=bad_words,
            objective=objective,
            priority=asked.priority,
            timeout_s=asked.timeout_s,
            grammar=grammar,
        )

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """The banned sequences, those of the texts first."""
        words = [ids for word in params.bad_words for ids in self._spellings(word)]
        for field, banned in (("bad_words", words), ("bad_words_ids", params.bad_words_ids)):
            for ids in banned:
                if max(ids) >= self.pool.vocab_size:
                    raise RequestError(field, f"token ids must be below {self.pool.vocab_size}")
                if len(ids) == 1 and ids[0] in self.pool.eos_token_ids:
                    reason = f"token {ids[0]} ends the text; min_tokens is what holds it back"
                    raise RequestError(field, reason)
        return (*words, *params.bad_words_ids)

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        """Ids of a word at the beginning of a text, and after a space, as vLLM has them.

        The spaced form counts only where the space is part of the first token; where it is a token
        of its own, the plain form bans the word already.
        """
        plain, spaced = (
            tuple(self.pool.tokenizer(text, add_special_tokens=False)["input_ids"])
            for text in (word.lstrip(), " " + word.lstrip())
        )
        if not plain:
            raise RequestError("bad_words", f"{word!r} has no tokens")
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            return [plain, spaced]
        return [plain]

    def _token_ids(self, prompt: PromptLike) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            tokens = self._checked_ids("input_ids", prompt)
            if not tokens:
                raise RequestError("input_ids", "is empty")
            return tokens
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise RequestError("prompt", "holds half a surrogate pair") from None
        tokens = tuple(self.pool.tokenizer(prompt)["input_ids"])
        if not tokens:
            raise RequestError("prompt", "is empty")
        return tokens

    def _checked_ids(self, field: str, ids: Sequence[int]) -> tuple[int, ...]:
        try:
            tokens = tuple(int(token) for token in ids if not isinstance(token, str | bool))
            whole = len(tokens) == len(ids) and all(
                a == b for a, b in zip(tokens, ids, strict=True)
            )
        except (TypeError, ValueError, OverflowError):
            whole = False
        if not whole:
            raise RequestError(field, "must be a list of token ids")
        vocabulary = self.pool.vocab_size
        if any(not 0 <= token < vocabulary for token in tokens):
            raise RequestError(field, f"token ids must be from 0 to {vocabulary - 1}")
        return tokens

    def _check_length(self, tokens: Sequence[int], params: SamplingParams) -> None:
        limit = self._engine.max_request_tokens
        field = "prompt"
        if len(tokens) >= limit:
            raise RequestError(
                field, f"has {len(tokens)} tokens, and the model's length is {limit}"
            )
        total = len(tokens) + params.max_new_tokens
        if total > limit:
            raise RequestError(
                "max_new_tokens",
                f"{len(tokens)} prompt tokens and {params.max_new_tokens} new ones exceed the "
                f"model's length of {limit}; at most {limit - len(tokens)} fit",
            )
        if not self._engine.can_ever_fit(total):
            raise RequestError(
                "max_new_tokens",
                f"{total} tokens can never fit in the KV memory "
                f"(engine.kv_budget_tokens: {self.config.engine.kv_budget_tokens})",
            )

    def _enqueue(
        self,
        prompts: Sequence[Prompt],
        listeners: Sequence[Listener] | None = None,
        max_waiting: int | None = None,
    ) -> list[RequestHandle]:
        """All of them or none."""
        each: Sequence[Listener | None] = listeners or [None] * len(prompts)
        requests = [
            RunningRequest(
                prompt,
                RequestHandle(next(self._ids), self._wake, listener),
                self.pool.tokenizer,
                self.pool.eos_token_ids,
            )
            for prompt, listener in zip(prompts, each, strict=True)
        ]
        with self._wakeup:
            if not self.is_healthy:
                raise UnavailableError(self._failure or "the router is closed")
            self._check_room(max_waiting)
            self._arrived.extend(requests)
            self._wakeup.notify()
        return [request.handle for request in requests]

    def _check_room(self, max_waiting: int | None) -> None:
        """Raises `OverloadedError`. Requests that will be admitted at once do not count."""
        waiting = len(self._arrived) + self._engine.waiting - self._engine.free_rows
        if max_waiting is not None and waiting >= max_waiting:
            raise OverloadedError(waiting, self._engine.seconds_until_admitted(waiting))

    def _wake(self) -> None:
        with self._wakeup:
            self._wakeup.notify()

    def _start_thread(self, role: str, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(
            target=target, args=arguments, name=f"specrouter-{role}", daemon=True
        )
        self._threads[role] = thread  # one that hangs is left behind
        thread.start()

    def _load_and_run(self, loaded: "Future[None]") -> None:
        """The engine's thread. It loads the target too.

        A thread that uses torch starts OpenMP workers of its own, and with more of them than cores
        libgomp's workers sleep at every barrier instead of spinning: a forward of 29 ms took 34 ms
        where the caller's thread had loaded the model.
        """
        try:
            self.pool.get(self.pool.target)
            self._engine.warm_up()
        except BaseException as error:
            self._ended.set()
            loaded.set_exception(error)
            return
        self._start_thread("watch", self._watch)
        loaded.set_result(None)
        self._run()

    def _run(self, hung: str | None = None) -> None:
        """Serves until the router closes or the engine fails for good, and ends what is left.

        `hung`: takes over from a thread that hangs in a forward of this model.
        """
        try:
            cause = self._serve(hung)
            while cause is not None and not self._stuck and self._begins_anew(cause):
                cause = self._serve()
        except Abandoned:
            return  # another thread has taken over
        if not self._stuck:  # else all have been told
            self._finish(cause)

    def _serve(self, hung: str | None = None) -> str | None:
        """Sleeps while there is nothing to do. Returns why the engine failed, if it did."""
        try:
            if hung is not None:
                self._engine.take_over(hung)
            while self._wait_for_work():
                if self._errand is not None:
                    self._run_errand()
                else:
                    self._engine.step()
        except Abandoned:
            raise
        except BaseException as error:
            logger.exception("the engine has failed")
            return f"{type(error).__name__}: {error}"
        return None

    def _begins_anew(self, cause: str) -> bool:
        """Ends the requests that ran when the engine failed, and puts another one in its place.

        It serves those that waited. Not if engines fail all the time.
        """
        self._engine.abandon_running(cause)
        now = time.monotonic()
        self._crashes.append(now)
        if len(self._crashes) == _MOST_CRASHES and now - self._crashes[0] < _CRASHES_S:
            logger.error("the engine has failed %d times and stays down", _MOST_CRASHES)
            return False
        try:
            engine = self._engine.successor()
            engine.warm_up()
        except BaseException:
            logger.exception("the engine cannot begin anew")
            return False
        with self._wakeup:
            self._engine = engine
            self._restarts += 1
        logger.warning("the engine has begun anew")
        return True

    def _finish(self, cause: str | None) -> None:
        """Ends what is left, with `cause` if the engine failed."""
        with self._wakeup:
            self._failure = cause
            self._closing = True
            arrived, self._arrived = list(self._arrived), deque()
            errand, self._errand = self._errand, None
        for request in arrived:
            self._engine.enqueue(request)
        if cause is None:
            self._engine.cancel_all()
        else:
            self._engine.abandon(cause)
        if errand is not None:
            errand[1].set_exception(UnavailableError(cause or "the router is closed"))
        self._ended.set()

    def _watch(self) -> None:
        """Looks now and then whether the engine's thread hangs, in a drafter's forward or not.

        A drafter that hangs is given up. From a cycle that does not end nothing can be saved.
        """
        limit_s = self.config.engine.step_timeout_s
        while not self._ended.wait(min(_LOOK_S, self._engine.guard.limit_s / 4, limit_s / 4)):
            hung = self._engine.guard.give_up()
            if hung is not None:
                logger.warning("a forward of %s hangs; going on without it", hung)
                self._start_thread("engine", self._run, hung)
            elif self._engine.step_s > limit_s:
                cause = f"a cycle has taken more than {limit_s:g} s"
                logger.critical("%s: the engine is stuck", cause)
                self._stuck = True
                self._finish(cause)

    def _wait_for_work(self) -> bool:
        """Hands over what arrived; False when the router closes."""
        with self._wakeup:
            while not (self._closing or self._arrived or self._engine.has_work or self._errand):
                self._wakeup.wait()
            while self._arrived:
                self._engine.enqueue(self._arrived.popleft())
            return not self._closing


def _hand_over(
    loop: asyncio.AbstractEventLoop,
    deltas: asyncio.Queue[tuple[int, Delta]],
    item: tuple[int, Delta],
) -> None:
    loop.call_soon_threadsafe(deltas.put_nowait, item)


def _as_prompts(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError("prompts", f"must be texts or lists of ids, not {prompts!r}")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _one_each(field: str, value: Any, single: Any, prompts: Sequence[PromptLike]) -> list[Any]:
    """`value` for every prompt, or its elements if it is a sequence of as many."""
    if value is None or isinstance(value, single):
        return [value] * len(prompts)
    if not isinstance(value, Sequence):
        raise RequestError(field, f"must be one for all prompts or one for each, not {value!r}")
    if len(value) != len(prompts):
        raise RequestError(field, f"{len(value)} given for {len(prompts)} prompts")
    return list(value)
