"""What a request must say: an unpatched `transformers` model, one request at a time.

Contract: nothing of the engine is used but the noise function, whose own distribution
`checks.exact.distribution` checks. Plain greedy references come from `generate`; others from the
model's logits, `transformers`' own processors and warpers in the documented order, two lines for
the presence and frequency penalties, `llguidance` for structures, and argmax(processed +
Gumbel(seed, position)).

Not covered: structures with `min_tokens`, stop strings, bad words that are texts, samples but the
first.
"""

import functools
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from checks.exact.recurrences import by_recurrence
from processors.noise import gumbel
from specrouter import SamplingParams, Structure
from test_support.structures import Reference


@dataclass(frozen=True)
class Choice:
    """What was chosen at one output position, and from what."""

    token: int
    logits: Tensor  # [V] float64, with all that comes before the temperature
    scores: Tensor  # [V] float64, -inf where top-k, top-p or min-p cut, noise included
    params: SamplingParams

    def margin(self, other: int) -> float:
        """How little would have to change for `other` to be chosen.

        Either its score, or one of the two tokens across the edge of top-k, top-p or min-p.
        `other` outside the vocabulary can never be, nor can an excluded one.
        """
        if not 0 <= other < len(self.scores) or self.logits[other] == -torch.inf:
            return float("inf")
        ways = [float(self.scores[self.token] - self.scores[other])]
        if self.params.temperature > 0:
            ways += [cut_distance(self.logits, self.params, t) for t in (self.token, other)]
        return min(ways)


class Oracle:
    """A target, loaded by `transformers` as any program would load it."""

    def __init__(
        self, path: Path, dtype: str, *, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        # Eager attention takes its softmax in float32 whatever the dtype, SDPA does not; but SDPA
        # leaves out the caps of Gemma 2's attention.
        kind = AutoConfig.from_pretrained(str(path)).model_type
        loaded = AutoModelForCausalLM.from_pretrained(
            str(path),
            dtype=getattr(torch, dtype),
            attn_implementation="eager" if kind == "gemma2" else "sdpa",
        )
        self.model = cast(Any, by_recurrence(loaded)).eval()
        self.model.generation_config = _generation_config()  # no defaults but ours
        self._path = path
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        rows = self.model.get_output_embeddings().weight.shape[0]
        self._padding_ids = list(range(vocab_size, rows))

    def tokens(self, prompt: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
        """The whole output of a request; it ends with the id that stopped it, if one did."""
        if params.temperature == 0 and not _edits(params):
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
        cache = DynamicCache(config=self.model.config)
        pending, choices = list(prompt), list[Choice]()
        while len(choices) < params.max_new_tokens:
            logits = self._forward(pending, cache)
            history = (*prompt, *(choice.token for choice in choices))
            choices.append(self.choose(logits, params, history, len(prompt)))
            pending = [choices[-1].token]
            if choices[-1].token in self.stop_ids(params):
                break
        return choices

    @torch.inference_mode()
    def choice_after(
        self, prompt: tuple[int, ...], generated: tuple[int, ...], params: SamplingParams
    ) -> Choice:
        """The choice at output position `len(generated)`, given what stands before it."""
        cache = DynamicCache(config=self.model.config)
        logits = self._forward([*prompt, *generated], cache)
        return self.choose(logits, params, (*prompt, *generated), len(prompt))

    @torch.inference_mode()
    def processed_logits(
        self, contexts: Tensor, params: SamplingParams, prompt_length: int | None = None
    ) -> Tensor:
        """Processed logits [N, V] float64 after each of the contexts [N, L].

        `prompt_length`: of every context; None: all of it.
        """
        logits = self.model(contexts).logits[:, -1, : self.vocab_size]
        length = contexts.shape[1] if prompt_length is None else prompt_length
        asked = self._with_structure(params, length)
        return process(logits.double(), asked, contexts, length, self.stop_ids(params))

    def choose(
        self, logits: Tensor, params: SamplingParams, history: tuple[int, ...], prompt_length: int
    ) -> Choice:
        """`logits` [V] of the model after `history`, which is the prompt and the output so far."""
        params = self._with_structure(params, prompt_length)
        texts = torch.tensor([history])
        edited = edit(
            logits.double().unsqueeze(0), params, texts, prompt_length, self.stop_ids(params)
        )
        scores = warp(edited, params)[0]
        if params.temperature > 0:
            assert params.seed is not None, "a sampled reference needs a seed"
            noise = gumbel(params.seed, len(history) - prompt_length, self.vocab_size)
            scores = scores + torch.from_numpy(np.asarray(noise))
        return Choice(_lowest_argmax(scores), edited[0], scores, params)

    def stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """The ids that end a request."""
        goes_on = params.ignore_eos and params.structure is None
        eos = frozenset[int]() if goes_on else self.eos_token_ids
        return eos | frozenset(params.stop_token_ids)

    def _with_structure(self, params: SamplingParams, prompt_length: int) -> SamplingParams:
        """The same with the last of the logits processors in the place of the structure."""
        if params.structure is None:
            return params
        assert isinstance(params.structure, Structure)
        assert not params.min_tokens, "it is held back only where something else may follow"
        reference = Reference(params.structure, self._tokens, prompt_length)
        processors: tuple[Any, ...] = (*params.logits_processors, reference)
        return replace(params, structure=None, logits_processors=processors)

    @functools.cached_property
    def _tokens(self) -> LLTokenizer:
        tokenizer = cast(Any, AutoTokenizer).from_pretrained(str(self._path))
        return from_tokenizer(tokenizer, self.vocab_size, sorted(self.eos_token_ids))

    def _forward(self, tokens: list[int], cache: DynamicCache) -> Tensor:
        """Logits [V] after `tokens`, which follow what the cache holds."""
        output = self.model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
        logits: Tensor = output.logits[0, -1, : self.vocab_size]
        return logits


def process(
    logits: Tensor,
    params: SamplingParams,
    texts: Tensor | None = None,
    prompt_length: int = 0,
    end_ids: frozenset[int] = frozenset(),
) -> Tensor:
    """What a token is chosen from but for the noise: logits [N, V] float64 -> the same.

    Args:
        texts: [N, L] what stands before; None: nothing.
        prompt_length: of every text; the rest is output.
        end_ids: which `min_tokens` keeps away.
    """
    return warp(edit(logits, params, texts, prompt_length, end_ids), params)


def edit(
    logits: Tensor,
    params: SamplingParams,
    texts: Tensor | None,
    prompt_length: int,
    end_ids: frozenset[int],
) -> Tensor:
    """`process` up to the temperature."""
    assert not params.bad_words, "references take bad_words_ids"
    ids = torch.empty((len(logits), 0), dtype=torch.long) if texts is None else texts
    edited = logits.clone()
    for token, bias in _biases(params):
        edited[:, token] += bias
    if params.repetition_penalty != 1:
        edited = RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))(ids, edited)
    output = ids[:, prompt_length:]
    counts = torch.zeros_like(edited).scatter_add_(1, output, torch.ones_like(output).to(edited))
    edited -= params.frequency_penalty * counts + params.presence_penalty * counts.clamp(max=1)
    if params.bad_words_ids:
        edited = NoBadWordsLogitsProcessor([list(word) for word in params.bad_words_ids])(
            ids, edited
        )
    if params.min_tokens and end_ids:
        edited = MinNewTokensLengthLogitsProcessor(
            prompt_length, params.min_tokens, sorted(end_ids)
        )(ids, edited)
    for processor in params.logits_processors:
        edited = processor(ids, edited)
    return edited


def warp(logits: Tensor, params: SamplingParams) -> Tensor:
    """Temperature, top-k, top-p, min-p by `transformers`."""
    if params.temperature == 0:
        return logits
    ids = torch.empty(0, dtype=torch.long)
    warped: Tensor = TemperatureLogitsWarper(float(params.temperature))(ids, logits)
    if params.top_k > 0:
        warped = TopKLogitsWarper(params.top_k)(ids, warped)
    if params.top_p < 1:
        warped = TopPLogitsWarper(params.top_p)(ids, warped)
    if params.min_p > 0:
        warped = cast(Any, MinPLogitsWarper(params.min_p))(ids, warped)
    return warped


def cut_distance(logits: Tensor, params: SamplingParams, token: int) -> float:
    """How far `token` is from being kept instead of cut, or cut instead of kept.

    For top-k and min-p in logits, for top-p in probability; infinite where none is set. In float32
    a token on the very edge of the nucleus may fall either way. `logits` [V] are those that the
    temperature is applied to.
    """
    distances = [float("inf")]
    scaled = logits.double() / params.temperature
    own = float(scaled[token])
    if 0 < params.top_k < scaled.numel():
        ordered = scaled.sort(descending=True).values
        edge = ordered[params.top_k - 1 : params.top_k + 1]
        distances.append(float((edge - own).abs().max()))
        scaled = scaled.masked_fill(scaled < ordered[params.top_k - 1], -torch.inf)
    if params.top_p < 1:
        probabilities = scaled.softmax(-1)
        above = probabilities[probabilities > probabilities[token]].sum()
        distances.append(float((above - params.top_p).abs()))
    if params.min_p > 0:
        distances.append(abs(float(scaled.max()) - own + math.log(params.min_p)))
    return min(distances)


def _edits(params: SamplingParams) -> bool:
    """Whether anything but the warpers touches the logits."""
    return bool(
        params.logit_bias
        or params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
        or params.bad_words
        or params.bad_words_ids
        or params.min_tokens
        or params.logits_processors
        or params.structure
    )


def _biases(params: SamplingParams) -> tuple[tuple[int, float], ...]:
    return cast(tuple[tuple[int, float], ...], params.logit_bias)  # a mapping is stored as pairs


def _generation_config(**settings: Any) -> GenerationConfig:
    config: GenerationConfig = cast(Any, GenerationConfig)(**settings)
    return config


def _lowest_argmax(scores: Tensor) -> int:
    """Ties go to the lowest id; `torch.argmax` does not promise it."""
    return int((scores == scores.max()).nonzero()[0, 0])
