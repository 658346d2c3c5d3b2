"""Progress: what a sample has received so far, from all replicas, and how it continues.

Contract: the text does not depend on where an attempt ended: noise is a function of seed and
position, and tokens of earlier attempts count as output. The progress is exactly what the caller
has received: tokens that a lost replica had produced beyond it are produced again. All attempts
share one clock, which begins with the first submission.
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


class StreamProgress:
    """The tokens and metrics that a sample has received so far.

    Args:
        asked: the call's arguments.
        spec: the accepted request, with the seed that was drawn.
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
        self._cached_tokens = 0  # of the prompt, as reported by a prefill half
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
        """True if an unattainable objective ends it with an error, before its first token."""
        objective = self._spec.objective
        return (
            objective is not None and objective.on_unattainable == "reject" and not self.has_begun
        )

    def elapsed_s(self) -> float:
        return time.monotonic() - self.submitted_s

    def left_s(self) -> float | None:
        """Return the time until its time limit; None without a limit."""
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
        """Return the arguments of the next attempt."""
        spec = self._spec
        params = replace(spec.params, seed=spec.seed)
        if self._prompt_logprobs is not None:  # they have been received
            params = replace(params, prompt_logprobs=None)
        return replace(
            self._asked,
            prompt=spec.token_ids,
            is_tokenized=True,
            params=params,
            slo=spec.objective,  # in milliseconds, so that a ratio is the same at every replica
            generated=tuple(self._tokens),
            sample=spec.sample,
            elapsed_s=self.elapsed_s(),
            arrivals=tuple(self._arrivals),
        )

    def take(self, delta: Delta) -> Delta:
        """Add a replica's delta, and return the caller's; the last one has the whole output."""
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
        """Return the last delta where no replica can send it: the text so far, and why it ends."""
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
        """Return the output with log-probabilities, logits and drafts of all attempts."""
        logprobs = None if self._spec.params.logprobs is None else list(self._logprobs)
        cached_tokens = max(self._cached_tokens, output.metrics.cached_tokens)
        metrics = replace(output.metrics, cached_tokens=cached_tokens)
        drafts = list(self._drafts) if self._spec.params.return_drafts else None
        receipt = output.receipt
        if receipt is not None:  # an attempt's receipt has only the logits of its own tokens
            logits = [one.logit for one in self._logprobs]
            receipt = receipt.model_copy(update={"logits": encoded_logits(logits)})
        return replace(
            output,
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs,
            metrics=metrics,
            drafts=drafts,
            receipt=receipt,
        )


def draw(seed: int, sample: int, attempt: int) -> tuple[float, float]:
    """Return two numbers below 1 for an attempt, from the request's seed, for random policies."""
    dice = random.Random(f"{seed} {sample} {attempt}")
    return dice.random(), dice.random()
