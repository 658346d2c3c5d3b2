"""What a request must say: an unpatched `transformers` model, one request at a time.

Contract: nothing of the engine is used but the noise function, whose own distribution
`tests.exact.distribution` checks. Greedy references come from `generate`; seeded ones from the
model's logits, `transformers`' own warpers (temperature, top-k, top-p, in that order), and
argmax(processed + Gumbel(seed, position)).

Not covered: stop strings.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from processors.noise import gumbel
from specrouter import SamplingParams


@dataclass(frozen=True)
class Choice:
    """What was chosen at one output position, and from what."""

    token: int
    logits: Tensor  # [V] float64
    scores: Tensor  # [V] float64, -inf where top-k or top-p cut, noise included
    params: SamplingParams

    def margin(self, other: int) -> float:
        """How little would have to change for `other` to be chosen.

        Either its score, or one of the two tokens across the edge of top-k or top-p. `other`
        outside the vocabulary can never be.
        """
        if not 0 <= other < len(self.scores):
            return float("inf")
        ways = [float(self.scores[self.token] - self.scores[other])]
        if self.params.temperature > 0:
            ways += [cut_distance(self.logits, self.params, t) for t in (self.token, other)]
        return min(ways)

    def top_two_margin(self) -> float:
        first, second = self.scores.topk(2).values
        return float(first - second)


class Oracle:
    """A target, loaded by `transformers` as any program would load it."""

    def __init__(
        self, path: Path, dtype: str, *, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        # Eager attention takes its softmax in float32 whatever the dtype, SDPA does not.
        loaded = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
        self.model = cast(Any, loaded).eval()
        self.model.generation_config = _generation_config()  # no defaults but ours
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        rows = self.model.get_output_embeddings().weight.shape[0]
        self._padding_ids = list(range(vocab_size, rows))

    def tokens(self, prompt: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
        """The whole output of a request; it ends with the id that stopped it, if one did."""
        if params.temperature == 0:
            return self.generate(prompt, params)
        return tuple(choice.token for choice in self.choices(prompt, params))

    @torch.inference_mode()
    def generate(self, prompt: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
        """Greedy decoding by `transformers` itself."""
        config = _generation_config(
            do_sample=False,
            max_new_tokens=params.max_new_tokens,
            eos_token_id=sorted(self.stop_ids(params)) or None,
            pad_token_id=0,
            suppress_tokens=self._padding_ids or None,
        )
        inputs = torch.tensor([prompt])
        mask = torch.ones_like(inputs)
        output = self.model.generate(inputs, attention_mask=mask, generation_config=config)
        return tuple(output[0, len(prompt) :].tolist())

    @torch.inference_mode()
    def choices(self, prompt: tuple[int, ...], params: SamplingParams) -> list[Choice]:
        """Decoding step by step, at any temperature."""
        cache = DynamicCache()
        pending, choices = list(prompt), list[Choice]()
        while len(choices) < params.max_new_tokens:
            logits = self._forward(pending, cache)
            choices.append(self.choose(logits, params, len(choices)))
            pending = [choices[-1].token]
            if choices[-1].token in self.stop_ids(params):
                break
        return choices

    @torch.inference_mode()
    def choice_after(
        self, prompt: tuple[int, ...], generated: tuple[int, ...], params: SamplingParams
    ) -> Choice:
        """The choice at output position `len(generated)`, given what stands before it."""
        logits = self._forward([*prompt, *generated], DynamicCache())
        return self.choose(logits, params, len(generated))

    @torch.inference_mode()
    def processed_logits(self, contexts: Tensor, params: SamplingParams) -> Tensor:
        """Processed logits [N, V] float64 after each of the contexts [N, L]."""
        logits = self.model(contexts).logits[:, -1, : self.vocab_size]
        return process(logits.double(), params)

    def choose(self, logits: Tensor, params: SamplingParams, position: int) -> Choice:
        """`logits` [V] of the model, `position` of the output."""
        scores = process(logits.double().unsqueeze(0), params)[0]
        if params.temperature > 0:
            assert params.seed is not None, "a sampled reference needs a seed"
            noise = gumbel(params.seed, position, self.vocab_size)
            scores = scores + torch.from_numpy(np.asarray(noise))
        return Choice(_lowest_argmax(scores), logits.double(), scores, params)

    def stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """The ids that end a request."""
        eos = frozenset[int]() if params.ignore_eos else self.eos_token_ids
        return eos | frozenset(params.stop_token_ids)

    def _forward(self, tokens: list[int], cache: DynamicCache) -> Tensor:
        """Logits [V] after `tokens`, which follow what the cache holds."""
        output = self.model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
        logits: Tensor = output.logits[0, -1, : self.vocab_size]
        return logits


def process(logits: Tensor, params: SamplingParams) -> Tensor:
    """Temperature, top-k, top-p by `transformers`: logits [N, V] float64 -> the same."""
    if params.temperature == 0:
        return logits
    ids = torch.empty(0, dtype=torch.long)
    processed: Tensor = TemperatureLogitsWarper(params.temperature)(ids, logits)
    if params.top_k > 0:
        processed = TopKLogitsWarper(params.top_k)(ids, processed)
    if params.top_p < 1:
        processed = TopPLogitsWarper(params.top_p)(ids, processed)
    return processed


def cut_distance(logits: Tensor, params: SamplingParams, token: int) -> float:
    """How far `token` is from being kept instead of cut, or cut instead of kept.

    For top-k in logits, for top-p in probability; infinite where neither is set. In float32 a
    token on the very edge of the nucleus may fall either way. `logits` are unprocessed, [V].
    """
    distances = [float("inf")]
    scaled = logits.double() / params.temperature
    if 0 < params.top_k < scaled.numel():
        ordered = scaled.sort(descending=True).values
        edge = ordered[params.top_k - 1 : params.top_k + 1]
        distances.append(float((edge - scaled[token]).abs().max()))
        scaled = scaled.masked_fill(scaled < ordered[params.top_k - 1], -torch.inf)
    if params.top_p < 1:
        probabilities = scaled.softmax(-1)
        above = probabilities[probabilities > probabilities[token]].sum()
        distances.append(float((above - params.top_p).abs()))
    return min(distances)


def _generation_config(**settings: Any) -> GenerationConfig:
    config: GenerationConfig = cast(Any, GenerationConfig)(**settings)
    return config


def _lowest_argmax(scores: Tensor) -> int:
    """Ties go to the lowest id; `torch.argmax` does not promise it."""
    return int((scores == scores.max()).nonzero()[0, 0])
