"""A request while it lives: what was asked, what has come out, who listens.

Contract: every accepted request ends in exactly one last delta, whatever happens.
`RequestHandle` is the caller's side and may be used from any thread; `RunningRequest` belongs to
the engine's thread.
"""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from transformers import PreTrainedTokenizerBase

from specrouter.logs import REQUEST_ID
from specrouter.request.detokenizer import Detokenizer
from specrouter.request.grammar import CompiledGrammar
from specrouter.request.objective import Objective, tpot_of_runs
from specrouter.request.output import (
    Delta,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from specrouter.request.params import Chain, RequestError, SamplingParams, Speculation

logger = logging.getLogger(__name__)

MAX_PRIORITY = 1000
_PRIORITY_S = 10.0  # of waiting that a step of priority is worth

SpeculationOverride = Speculation | Literal["off"] | None
Listener = Callable[[Delta], None]


class RequestHandle:
    """Iterate for deltas, or wait for the `result`; either, from one thread at a time."""

    def __init__(
        self, request_id: int, wake_engine: Callable[[], None], listener: Listener | None = None
    ) -> None:
        self.request_id = request_id
        self.log_extra = {"request_id": REQUEST_ID.get()}  # of the HTTP request, if it is one
        self._wake_engine = wake_engine
        self._listener = listener
        self._deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        self._done = threading.Event()
        self._delivering = threading.Lock()
        self._cancelled = threading.Event()
        self._output: RequestOutput | None = None

    def __iter__(self) -> Iterator[Delta]:
        while True:
            delta = self._deltas.get()
            yield delta
            if delta.finish_reason is not None:
                return

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Waits for the end. Raises `TimeoutError` after `timeout` seconds."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"request {self.request_id} has not ended within {timeout} s")
        assert self._output is not None
        return self._output

    def cancel(self) -> None:
        """Ends the request within one cycle; nothing happens if it has ended."""
        self._cancelled.set()
        self._wake_engine()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def deliver(self, delta: Delta) -> bool:
        """For the engine, which a caller's mistake must not reach.

        Whether it counts: a request ends once, even if two threads end it because one of them
        seemed to be stuck.
        """
        with self._delivering:
            if self.is_done:
                return False
            self._hand_over(delta)
            return True

    def _hand_over(self, delta: Delta) -> None:
        if self._listener is None:
            self._deltas.put(delta)
        else:
            try:
                self._listener(delta)
            except Exception:
                logger.warning(
                    "request %d: nobody listens any more", self.request_id, extra=self.log_extra
                )
                self._cancelled.set()
        if delta.output is not None:
            self._output = delta.output
            self._done.set()


@dataclass(frozen=True)
class Prompt:
    """What was accepted: committed tokens to start from, and how to go on.

    Attributes:
        generated: output tokens of an earlier attempt.
        sample: 0 .. n - 1; the samples of one prompt share its seed, and draw from it each a
            stream of their own.
        bad_words_ids: all that must not come about, the texts of `params.bad_words` included.
        objective: None: throughput traffic.
        priority: the lowest is admitted first; a step of it is worth ten seconds of waiting.
        timeout_s: after which the request ends, waiting or running, with what it has.
        grammar: of `params.structure`.
    """

    token_ids: tuple[int, ...]
    generated: tuple[int, ...]
    params: SamplingParams
    speculation: SpeculationOverride
    seed: int
    sample: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    objective: Objective | None = None
    priority: int = 0
    timeout_s: float | None = None
    grammar: CompiledGrammar | None = None

    @property
    def committed(self) -> tuple[int, ...]:
        return self.token_ids + self.generated

    @property
    def reserve_tokens(self) -> int:
        return len(self.token_ids) + self.params.max_new_tokens


class RunningRequest:
    """Raises `RequestError` where the tokens of the earlier attempt already end the text."""

    def __init__(
        self,
        prompt: Prompt,
        handle: RequestHandle,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.prompt = prompt
        self.handle = handle
        self.row: int | None = None
        self._eos = frozenset() if prompt.params.goes_on_after_eos else eos_token_ids
        self._stop_ids = frozenset(prompt.params.stop_token_ids)
        self._detokenizer = Detokenizer(
            tokenizer,
            prompt.params.stop,
            prompt.params.include_stop_str_in_output,
            prompt.params.skip_special_tokens,
            prompt.token_ids,
        )
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None if prompt.params.logprobs is None else []
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._chains: Counter[Chain] = Counter()
        self._committed = 0  # tokens that cycles brought, those after a stop included
        self._drafted = self._accepted = 0  # tokens that the target verified, and that are output
        self.submitted_s = time.perf_counter()
        # Who has the least is admitted first. It never changes, so the priority of those that came
        # later cannot keep a request waiting for ever.
        self.admission_key = self.submitted_s + _PRIORITY_S * prompt.priority
        self._commits: list[tuple[float, int]] = []  # when tokens came, in seconds, and how many
        self.finished = False
        for token in prompt.generated:
            self._tokens.append(token)
            self._detokenizer.push(token)
            if self._ending(token) is not None:
                raise RequestError("generated", f"the text ends with token {len(self._tokens)}")

    @property
    def remaining(self) -> int:
        """Tokens that the text may still gain."""
        return self.prompt.params.max_new_tokens - len(self._tokens)

    @property
    def is_late(self) -> bool:
        """Whether its time is up."""
        limit = self.prompt.timeout_s
        return limit is not None and time.perf_counter() - self.submitted_s > limit

    @property
    def cycles(self) -> int:
        """In which it gained tokens."""
        return sum(self._chains.values())

    @property
    def objective(self) -> Objective | None:
        return self.prompt.objective

    @property
    def produced_tokens(self) -> int:
        """In this attempt."""
        return len(self._tokens) - len(self.prompt.generated)

    @property
    def decoded_tokens(self) -> int:
        """Produced in this attempt after its first token: those that TPOT is the mean of."""
        return max(0, self.produced_tokens - 1)

    def decode_ms(self, now: float) -> float:
        """Since the first token came; 0.0 before it. `now` is `time.perf_counter()`'s."""
        return (now - self._commits[0][0]) * 1000 if self._commits else 0.0

    @property
    def last_gap_s(self) -> float | None:
        """From the cycle that brought tokens before to the last one; None before there were two."""
        return self._commits[-1][0] - self._commits[-2][0] if len(self._commits) > 1 else None

    def accept(
        self,
        tokens: Sequence[int],
        chain: Chain,
        logprobs: Sequence[TokenLogprobs] | None = None,
        prompt_logprobs: Sequence[TokenLogprobs | None] | None = None,
        drafted: int = 0,
    ) -> Delta:
        """Takes a cycle's tokens up to the first at which the text ends: news for the caller.

        The last of them is the target's own; of the `drafted` ones it took those before.
        `logprobs` has one entry for each token if the request asks for them, and so has
        `prompt_logprobs` for each token of the prompt, with the first tokens.
        """
        if prompt_logprobs is not None:
            self._prompt_logprobs = list(prompt_logprobs)
        came_s = time.perf_counter()
        self._chains[chain] += 1
        self._committed += len(tokens)
        text: list[str] = []
        fresh: list[int] = []
        reason: FinishReason | None = None
        for token in tokens:
            self._tokens.append(token)
            fresh.append(token)
            text.append(self._detokenizer.push(token))
            reason = self._ending(token)
            if reason is not None:
                break
        self._commits.append((came_s, len(fresh)))
        self._drafted += drafted
        self._accepted += min(len(fresh), len(tokens) - 1)
        kept: list[TokenLogprobs] | None = None
        if self._logprobs is not None:
            assert logprobs is not None, "the request asks for them"
            assert len(logprobs) == len(tokens)
            kept = list(logprobs[: len(fresh)])
            self._logprobs += kept
        if reason is None:
            news = Delta("".join(text), fresh, index=self.prompt.sample, logprobs=kept)
        else:
            news = self.finish(reason, text="".join(text), tokens=fresh, logprobs=kept)
        return (
            news
            if prompt_logprobs is None
            else replace(news, prompt_logprobs=list(prompt_logprobs))
        )

    def finish(
        self,
        reason: FinishReason,
        error: str | None = None,
        text: str = "",
        tokens: Sequence[int] = (),
        logprobs: Sequence[TokenLogprobs] | None = None,
    ) -> Delta:
        """The last delta. Only after a failure of the engine may it be asked for twice."""
        self.finished = True
        index, asked = self.prompt.sample, self._logprobs is not None
        try:
            text += self._detokenizer.finish()
        except Exception as failure:  # of the tokenizer's own code: the request ends all the same
            logger.exception("request %d: no text", self.handle.request_id)
            if error is None:
                reason, error = "error", f"the tokenizer failed on the text's end: {failure}"
        output = RequestOutput(
            self._detokenizer.text,
            list(self._tokens),
            reason,
            self._metrics(reason),
            self.prompt.seed,
            error,
            index,
            list(self._logprobs) if self._logprobs is not None else None,
            self._prompt_logprobs,
            self._stop_reason(tokens) if reason == "stop" else None,
        )
        fresh = list(logprobs or ()) if asked else None
        return Delta(text, list(tokens), reason, output, index, fresh)

    def _stop_reason(self, tokens: Sequence[int]) -> str | int | None:
        by_text = self._detokenizer.stopped_by
        return tokens[-1] if by_text is None and tokens else by_text

    def _ending(self, token: int) -> FinishReason | None:
        if self._detokenizer.stopped or token in self._stop_ids:
            return "stop"
        if token in self._eos:
            return "eos"
        if len(self._tokens) >= self.prompt.params.max_new_tokens:
            return "length"
        return None

    def _metrics(self, reason: FinishReason) -> RequestMetrics:
        cycles, decoded = self.cycles, self.decoded_tokens
        ttft_ms, decode_ms = None, 0.0
        if self._commits:
            ttft_ms = (self._commits[0][0] - self.submitted_s) * 1000
            decode_ms = self.decode_ms(self._commits[-1][0])
        attained = None
        if self.objective is not None:
            ended_by_itself = reason in ("eos", "stop", "length")
            attained = ended_by_itself and self.objective.is_attained(ttft_ms, decode_ms, decoded)
        return RequestMetrics(
            ttft_ms,
            decode_ms / decoded if decoded else None,
            self._committed / cycles if cycles else 0.0,
            cycles,
            dict(self._chains),
            len(self.prompt.token_ids),
            len(self._tokens),
            self.objective,
            attained,
            tuple(tpot_of_runs(self._commits)),
            self._drafted,
            self._accepted,
        )
