"""RunningRequest: a request from submission to its end, and its output so far.

Contract: every accepted request ends in exactly one last delta, in all cases. Belongs to the
engine's thread; `RequestHandle` is the caller's side.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from specrouter.request.detokenizer import Detokenizer
from specrouter.request.handle import RequestHandle
from specrouter.request.objective import Objective
from specrouter.request.output import (
    BLAMED,
    CycleDraft,
    DecodeStep,
    Delta,
    Feasible,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from specrouter.request.pace import Pace, attained_stages, tpot_of_runs
from specrouter.request.params import Chain, RequestError
from specrouter.request.receipt import Receipt, ServedModel, receipt_of
from specrouter.request.spec import RequestSpec

logger = logging.getLogger(__name__)

_PRIORITY_S = 10.0  # waiting time that a step of priority is worth


class RunningRequest:
    """A request while it waits or runs.

    Args:
        detokenizer: makes its text.
        clock: returns seconds; all its times are of this clock.
        served: the model, for a receipt, if it asks for one.

    Attributes:
        row: None while it waits.
        rank, place: the least rank, then the least place, keeps its KV memory longest: by
            admission's choice, then in the order of admission. `place` is infinite before that.
        gave_way: it was preempted because KV memory was short, and waits for a row again.
        commits: arrivals of tokens, in seconds, and their numbers.
        pace: progress of its output, by its stages.
        preemptions: times that it was preempted.
        cached_tokens: tokens that it did not have to read.
        handed_tokens: tokens whose keys and values were handed out.
        is_declined: its objective will not be attained: it has none from now on, or it ends.
        is_promised: it got a row to attain its objective.
        feasible: what could have been attained instead, if that was asked.
        output_tokens: see `RequestTable`.

    Raises:
        RequestError: the tokens of the earlier attempt already end the text.
    """

    def __init__(
        self,
        spec: RequestSpec,
        handle: RequestHandle,
        detokenizer: Detokenizer,
        eos_token_ids: frozenset[int],
        clock: Callable[[], float] = time.perf_counter,
        served: ServedModel | None = None,
    ) -> None:
        self.spec, self.handle = spec, handle
        self._detokenizer, self._clock, self._served = detokenizer, clock, served
        self.objective: Objective | None = spec.objective
        self.has_objective = spec.objective is not None  # even if it was declined since
        self.row: int | None = None
        self.preemptions, self.cached_tokens, self.handed_tokens = 0, 0, 0
        self.is_declined = self.is_promised = False
        self.feasible: Feasible | None = None
        self.output_tokens: int | None = None
        self._eos = frozenset() if spec.params.goes_on_after_eos else eos_token_ids
        self._stop_ids = frozenset(spec.params.stop_token_ids)
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None if spec.params.logprobs is None else []
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._steps: list[DecodeStep] = []
        self._drafts: list[CycleDraft] | None = [] if spec.params.return_drafts else None
        self.submitted_s = clock() - spec.elapsed_s
        self._key = self.submitted_s + _PRIORITY_S * spec.priority
        self.rank, self.place, self.gave_way = 0.0, math.inf, False
        self.commits = [(self.submitted_s + at_s, count) for at_s, count in spec.arrivals]
        self.pace = Pace.of(spec, self.commits)
        self.finished = False
        for token in spec.generated:
            self._tokens.append(token)
            self._detokenizer.push(token)
            if self._ending(token) is not None:
                raise RequestError("generated", f"the text ends with token {len(self._tokens)}")

    @property
    def admission_key(self) -> float:
        """The key of admission, least first; a request that gave way comes before all others.

        Otherwise it never changes, so the priority of later requests cannot keep this one waiting
        for ever.
        """
        return -math.inf if self.gave_way else self._key

    @property
    def order(self) -> tuple[float, float]:
        """The order of keeping KV memory: the least of all never loses it."""
        return self.rank, self.place

    @property
    def continuation(self) -> RequestSpec:
        """The request from which a row goes on after all its tokens."""
        if not self.produced_tokens:
            return self.spec
        params = self.spec.params
        if self._prompt_logprobs:  # they came with the first tokens
            params = replace(params, prompt_logprobs=None)
        return replace(self.spec, generated=tuple(self._tokens), params=params)

    @property
    def has_begun(self) -> bool:
        """True if the caller has seen a token, of this attempt or of one before."""
        return bool(self.produced_tokens or self.spec.arrivals)

    @property
    def rejects(self) -> bool:
        """True if it ends if its objective will not be attained: no token was seen yet."""
        if self.objective is None or self.has_begun:
            return False
        return self.objective.on_unattainable == "reject"

    @property
    def committed_tokens(self) -> int:
        """The number of tokens of the prompt and the output so far."""
        return len(self.spec.token_ids) + len(self._tokens)

    @property
    def remaining(self) -> int:
        """The tokens that it may still gain in this attempt."""
        return self.spec.most_tokens - len(self._tokens)

    @property
    def is_late(self) -> bool:
        limit = self.spec.timeout_s
        return limit is not None and self._clock() - self.submitted_s > limit

    @property
    def cycles(self) -> int:
        """The number of cycles in which it gained tokens."""
        return len(self._steps)

    @property
    def produced_tokens(self) -> int:
        """The number of output tokens in this attempt."""
        return len(self._tokens) - len(self.spec.generated)

    @property
    def decoded_tokens(self) -> int:
        """The tokens after the first whose times are known: TPOT is their mean."""
        earlier = len(self.spec.generated) if self.spec.arrivals else 0
        return max(0, earlier + self.produced_tokens - 1)

    def decode_ms(self, now: float) -> float:
        """Return the time since the first token came; 0.0 before it."""
        return (now - self.commits[0][0]) * 1000 if self.commits else 0.0

    @property
    def last_gap_s(self) -> float | None:
        """Time between the last two cycles that brought tokens; None before there were two."""
        return self.commits[-1][0] - self.commits[-2][0] if len(self.commits) > 1 else None

    def accept(
        self,
        tokens: Sequence[int],
        chain: Chain,
        logprobs: Sequence[TokenLogprobs] | None = None,
        prompt_logprobs: Sequence[TokenLogprobs | None] | None = None,
        drafted: int = 0,
        draft: CycleDraft | None = None,
    ) -> Delta:
        """Take a cycle's tokens up to the first at which the text ends, and return the delta.

        The last of them is the target's own; the ones before are the accepted ones of the
        `drafted`. `logprobs` has one entry for each token if the request asks for them, and so has
        `prompt_logprobs` for each token of the prompt, with the first tokens. `draft` has the
        proposers of the tokens, if the request asks.
        """
        if prompt_logprobs is not None:
            self._prompt_logprobs = list(prompt_logprobs)
        came_s = self._clock()
        texts, reason = self._append(tokens)
        text, fresh = "".join(texts), list(tokens[: len(texts)])
        self.commits.append((came_s, len(fresh)))
        self.pace.take(self._tokens, came_s, drafted, len(tokens) - 1)
        self._steps.append(DecodeStep(chain, drafted, len(tokens), len(fresh)))
        kept: list[TokenLogprobs] | None = None
        if self._logprobs is not None:
            assert logprobs is not None, "the request asks for them"
            assert len(logprobs) == len(tokens)
            kept = list(logprobs[: len(fresh)])
            self._logprobs += kept
        if self._drafts is not None:
            traced = draft or CycleDraft(chain=chain[-1:])
            self._drafts.append(replace(traced, texts=tuple(texts), cycle=self.cycles))
        if reason is None:
            news = Delta(text=text, token_ids=fresh, index=self.spec.sample, logprobs=kept)
        else:
            news = self.finish(reason, text=text, tokens=fresh, logprobs=kept)
        if self._drafts is not None:
            news = replace(news, draft=self._drafts[-1])
        if prompt_logprobs is None:
            return news
        return replace(news, prompt_logprobs=list(prompt_logprobs))

    def _append(self, tokens: Sequence[int]) -> tuple[list[str], FinishReason | None]:
        """Return the text of each token that is part of the output, and why the output ends."""
        text: list[str] = []
        for token in tokens:
            self._tokens.append(token)
            is_shown = token not in self._stop_ids or self.spec.params.include_stop_str_in_output
            text.append(self._detokenizer.push(token) if is_shown else "")
            reason = self._ending(token)
            if reason is not None:
                return text, reason
        return text, None

    def finish(
        self,
        reason: FinishReason,
        error: str | None = None,
        text: str = "",
        tokens: Sequence[int] = (),
        logprobs: Sequence[TokenLogprobs] | None = None,
    ) -> Delta:
        """Return the last delta. Only after a failure of the engine may it be called twice."""
        self.finished = True
        index, asked = self.spec.sample, self._logprobs is not None
        # If the text goes on, held-back text comes with its next tokens.
        goes_on = reason == "length" and len(self._tokens) < self.spec.params.max_new_tokens
        try:
            rest = "" if goes_on else self._detokenizer.finish()
            text += rest
            self._add_to_drafts(rest)
        except Exception as failure:  # an error of the tokenizer: the request ends all the same
            logger.exception("request %d: no text", self.handle.request_id)
            if error is None:
                reason, error = "error", f"the tokenizer failed on the text's end: {failure}"
        output = RequestOutput(
            text=self._detokenizer.text,
            token_ids=list(self._tokens),
            finish_reason=reason,
            metrics=self._metrics(reason),
            seed=self.spec.seed,
            error=error,
            index=index,
            logprobs=list(self._logprobs) if self._logprobs is not None else None,
            prompt_logprobs=self._prompt_logprobs,
            stop_reason=self._stop_reason(tokens) if reason == "stop" else None,
            error_field=next(
                (what for said, what in BLAMED if (error or "").startswith(said)), None
            ),
            feasible=self.feasible,
            drafts=None if self._drafts is None else list(self._drafts),
            receipt=self._receipt(reason),
        )
        fresh = list(logprobs or ()) if asked else None
        return Delta(
            text=text,
            token_ids=list(tokens),
            finish_reason=reason,
            output=output,
            index=index,
            logprobs=fresh,
            goes_on=goes_on,
        )

    def _receipt(self, reason: FinishReason) -> Receipt | None:
        if self._served is None or not self._logprobs or reason in ("error", "engine_dead"):
            return None
        logits = [one.logit for one in self._logprobs]
        return receipt_of(self._served, self.spec, self._tokens, logits, reason)

    def _add_to_drafts(self, rest: str) -> None:
        """Add the held-back text to the last token."""
        if self._drafts and rest:
            last = self._drafts[-1]
            texts = (*last.texts[:-1], "".join((*last.texts[-1:], rest)))
            self._drafts[-1] = replace(last, texts=texts)

    def _stop_reason(self, tokens: Sequence[int]) -> str | int | None:
        by_text = self._detokenizer.stopped_by
        return tokens[-1] if by_text is None and tokens else by_text

    def _ending(self, token: int) -> FinishReason | None:
        if self._detokenizer.stopped or token in self._stop_ids:
            return "stop"
        if token in self._eos:
            return "eos"
        if len(self._tokens) >= self.spec.most_tokens:
            return "length"
        return None

    def _metrics(self, reason: FinishReason) -> RequestMetrics:
        steps, decoded = self._steps, self.decoded_tokens
        ttft_ms, decode_ms = None, 0.0
        if self.commits:
            ttft_ms = (self.commits[0][0] - self.submitted_s) * 1000
            decode_ms = self.decode_ms(self.commits[-1][0])
        attained, stages = None, self._attained_stages()
        if self.objective is not None:
            ended_by_itself = reason in ("eos", "stop", "length")
            in_time = self.objective.is_attained(ttft_ms, decode_ms, decoded)
            attained = ended_by_itself and in_time and all(stages)
        return RequestMetrics(
            ttft_ms=ttft_ms,
            tpot_ms=decode_ms / decoded if decoded else None,
            acceptance_length=sum(one.committed for one in steps) / max(len(steps), 1),
            cycles=len(steps),
            chains=dict(Counter(one.chain for one in steps)),
            prompt_tokens=len(self.spec.token_ids),
            output_tokens=len(self._tokens),
            objective=self.objective,
            attained=attained,
            tpot_ms_every_10=tuple(tpot_of_runs(self.commits)),
            drafted_tokens=sum(one.drafted for one in steps),
            accepted_tokens=sum(min(one.produced, one.committed - 1) for one in steps),
            e2e_ms=None if ttft_ms is None else ttft_ms + decode_ms,
            attained_stages=stages,
            cached_tokens=min(self.cached_tokens, len(self.spec.token_ids)),
            steps=tuple(steps),
            sampling=self.spec.params.sampling,
        )

    def run_ms(self, now_s: float) -> float | None:
        """Return None: no request is judged by runs of ten tokens; see `RequestTable`."""
        return None

    def _attained_stages(self) -> tuple[bool, ...]:
        """Return the results of the stages that had tokens with known times."""
        if self.objective is None or not self.objective.stages:
            return ()
        came_ms = [came_s * 1000 for came_s, count in self.commits for _ in range(count)]
        stages = self.objective.stages[self.pace.stages_before :]
        return attained_stages(stages, self.pace.ends, came_ms)


def last_delta(request: RunningRequest, reason: FinishReason, error: str | None = None) -> Delta:
    """Return the end of a request without ever raising.

    If the output cannot be made, it holds only an error.
    """
    try:
        return request.finish(reason, error)
    except Exception as failure:
        logger.exception("request %d: no output", request.handle.request_id)
        cause = error or f"the output could not be made: {type(failure).__name__}: {failure}"
        spec = request.spec
        request.finished = True
        output = RequestOutput(
            finish_reason="error",
            metrics=RequestMetrics(prompt_tokens=len(spec.token_ids), objective=spec.objective),
            seed=spec.seed,
            error=cause,
            index=spec.sample,
        )
        return Delta(finish_reason="error", output=output, index=spec.sample)
