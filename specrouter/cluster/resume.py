"""Progress: what a sample has received so far, from whichever replicas, and how it goes on.

Contract: the text does not depend on where an attempt ended: noise is a function of seed and
position, and tokens that are handed on count as output. Whatever the caller was told is part of
the progress, and nothing else is: what a lost replica had produced beyond it is produced again. All
attempts share one clock, which begins with the first submission.
"""

import random
import time
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from specrouter.cluster.prefix_index import block_keys
from specrouter.cluster.state import RoutedRequest
from specrouter.engine.request import Request
from specrouter.request.detokenizer import Detokenizer
from specrouter.request.handle import RequestHandle
from specrouter.request.output import CycleDraft, Delta, FinishReason, RequestOutput, TokenLogprobs
from specrouter.request.receipt import encoded_logits
from specrouter.request.running import RunningRequest, last_delta
from specrouter.request.spec import RequestSpec


class Progress:
    """Args:
    asked: the call's arguments; `spec`: what was accepted of them, with the seed that was drawn.
    """

    def __init__(self, asked: Request, spec: RequestSpec) -> None:
        self.submitted_s = time.monotonic() - spec.elapsed_s
        self._asked = asked
        self._spec = spec
        self._tokens: list[int] = list(spec.generated)
        self._arrivals: list[tuple[float, int]] = list(spec.arrivals)
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._drafts: list[CycleDraft] = []
        self._cached_tokens = 0  # of the prompt, where it was read for another replica
        self.attempts = 0
        salt, is_cached = spec.params.cache_salt, spec.params.prefix_cache
        self.keys = block_keys(spec.token_ids, salt) if is_cached else ()  # of the prompt's blocks

    @property
    def sample(self) -> int:
        return self._spec.sample

    @property
    def has_begun(self) -> bool:
        return bool(self._arrivals)

    @property
    def rejects(self) -> bool:
        """Whether it ends where its objective cannot be attained."""
        objective = self._spec.objective
        return (
            objective is not None and objective.on_unattainable == "reject" and not self.has_begun
        )

    def elapsed_s(self) -> float:
        return time.monotonic() - self.submitted_s

    def left_s(self) -> float | None:
        """Until its time is up; None: it has no limit."""
        limit_s = self._spec.timeout_s
        return None if limit_s is None else max(0.0, limit_s - self.elapsed_s())

    def routed(self, number: int) -> RoutedRequest:
        spec = self._spec
        return RoutedRequest(
            number=number,
            prompt_tokens=len(spec.token_ids) + len(self._tokens),
            remaining=spec.params.max_new_tokens - len(self._tokens),
            objective=spec.objective,
            elapsed_ms=self.elapsed_s() * 1000,
            has_begun=self.has_begun,
            dice=draw(spec.seed, spec.sample, self.attempts),
        )

    def args(self) -> Request:
        """Of the next attempt."""
        spec = self._spec
        params = replace(spec.params, seed=spec.seed)
        if self._prompt_logprobs is not None:  # they came with the first tokens
            params = replace(params, prompt_logprobs=None)
        return replace(
            self._asked,
            prompt=spec.token_ids,
            is_tokenized=True,
            params=params,
            slo=spec.objective,  # in milliseconds: a ratio means the same at every replica
            generated=tuple(self._tokens),
            sample=spec.sample,
            elapsed_s=self.elapsed_s(),
            arrivals=tuple(self._arrivals),
        )

    def take(self, delta: Delta) -> Delta:
        """What the caller is told of a replica's news; the last has everything."""
        if delta.token_ids:
            self._tokens += delta.token_ids
            self._arrivals.append((self.elapsed_s(), len(delta.token_ids)))
        self._logprobs += delta.logprobs or ()
        self._drafts += () if delta.draft is None else (delta.draft,)
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs
        if delta.output is None:
            return delta
        if delta.goes_on:
            self._cached_tokens = delta.output.metrics.cached_tokens
            return replace(delta, finish_reason=None, output=None, goes_on=False)
        return replace(delta, output=self._whole(delta.output))

    def ended(
        self,
        reason: FinishReason,
        error: str | None,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: frozenset[int],
    ) -> Delta:
        """The last news where no replica is left to tell it: what there is, and why no more."""
        spec = replace(
            self._spec,
            generated=tuple(self._tokens),
            elapsed_s=self.elapsed_s(),
            arrivals=tuple(self._arrivals),
        )
        text = Detokenizer(tokenizer, spec.params, spec.token_ids)
        handle = RequestHandle(0, lambda: None)
        request = RunningRequest(spec, handle, text, eos_token_ids)
        delta = last_delta(request, reason, error)
        assert delta.output is not None, "it is the last"
        return replace(delta, output=self._whole(delta.output))

    def _whole(self, output: RequestOutput) -> RequestOutput:
        """With the log-probabilities, logits and drafts of all attempts."""
        logprobs = None if self._spec.params.logprobs is None else list(self._logprobs)
        cached_tokens = max(self._cached_tokens, output.metrics.cached_tokens)
        metrics = replace(output.metrics, cached_tokens=cached_tokens)
        told = self._prompt_logprobs
        drafts = list(self._drafts) if self._spec.params.return_drafts else None
        receipt = output.receipt
        if receipt is not None:  # the attempt's has logits of its own tokens alone
            logits = [one.logit for one in self._logprobs]
            receipt = receipt.model_copy(update={"logits": encoded_logits(logits)})
        return replace(
            output,
            logprobs=logprobs,
            prompt_logprobs=told,
            metrics=metrics,
            drafts=drafts,
            receipt=receipt,
        )


def draw(seed: int, sample: int, attempt: int) -> tuple[float, float]:
    """Two numbers below 1 that a request's seed gives each attempt, for policies that draw."""
    dice = random.Random(f"{seed} {sample} {attempt}")
    return dice.random(), dice.random()
