"""What a caller asks for: sampling parameters, an override of speculation, and their refusals."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model

from specrouter.request.fields import (
    Bias,
    Count,
    LogprobCount,
    MinP,
    Penalty,
    RepetitionPenalty,
    Samples,
    Temperature,
    Text,
    TokenId,
    Tokens,
    TopP,
)
from specrouter.request.fields import RequestError as RequestError
from specrouter.request.structure import Structure, TextForm

Chain = tuple[str, ...]  # names of models, the drafter first, the target last

LEAST_TEMPERATURE = 1e-6  # below it, quotients overflow and the text is greedy anyway
MAX_DEPTH = 20  # draft tokens; beyond it the chance that all are accepted is negligible
MAX_WIDTH = 8  # branches of a token tree
MAX_TREE_TOKENS = 64  # a tree's draft tokens: what one verification reads beside the last token
MAX_SALT_CHARACTERS = 1024
# How a token is chosen among the likely ones: what a checkpoint may recommend.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_LISTS = ("stop", "stop_token_ids", "shown_special_token_ids", "bad_words", "logits_processors")

_Word = Annotated[Text, Field(min_length=1)]
_Salt = Annotated[str, Field(min_length=1, max_length=2 * MAX_SALT_CHARACTERS)]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen, and when a text ends. The defaults are greedy.

    Attributes:
        max_new_tokens: at least 1; `max_tokens` is another name of it.
        temperature: 0 is greedy.
        top_k: 0 is off.
        top_p: 1.0 is off.
        seed: 0 .. 2**64 - 1; None draws one, which the output returns.
        stop: texts that end the output; they are not part of it.
        stop_token_ids: ids that end the output; they are part of it, and their text is not.
        ignore_eos: go on after the model's end-of-text id.
        min_p: 0 .. 1; leaves out tokens less probable than this share of the most probable one's
            probability. 0.0 is off.
        repetition_penalty: 1e-6 .. 1e6; divides the positive logits of tokens that the prompt or
            the output holds, and multiplies the negative ones. 1.0 is off.
        presence_penalty: -2 .. 2; taken from the logits of tokens that the output holds.
        frequency_penalty: -2 .. 2; the same, for each time that it holds them.
        logit_bias: token id to what its logit gains, -100 .. 100: a mapping or pairs, with ids
            that may be decimal strings, as JSON has them. Kept as a tuple of pairs by rising id.
        min_tokens: until there are so many, neither the end-of-text id nor one of `stop_token_ids`
            is chosen. A text of `stop` still ends the output.
        bad_words: texts that do not come about, at the beginning of a word.
        bad_words_ids: sequences of ids that do not come about.
        n: samples of each prompt, 1 .. MAX_SAMPLES. Greedy ones are equal.
        logprobs: None gives none; 0 those of the output's tokens; k those of the k most likely
            tokens too, up to MAX_LOGPROBS. They are the target's, before any processing.
        logits_processors: callables `(input_ids, scores) -> scores`, as `transformers` has them.
        prompt_logprobs: as `logprobs`, of the prompt's tokens, given the tokens before them.
        structure: a form that the text must have, such as a JSON schema. It goes before
            `min_tokens` and `ignore_eos`: where it is complete, the text ends. `min_tokens` holds
            the end back only where something else may follow, and `ignore_eos` does nothing.
        include_stop_str_in_output: what ended the output, of `stop` or `stop_token_ids`, is part of
            the text.
        skip_special_tokens: False shows them in the text, the end-of-text one included.
        shown_special_token_ids: those that the text shows all the same.
        prefix_cache: False reads the whole prompt, and keeps nothing of the request.
        cache_salt: only requests with the same one, or all without one, share what they have read.
        return_drafts: tells of every cycle what was drafted, by whom, and what the target took.
    """

    max_new_tokens: Tokens = 128
    temperature: Temperature = 0.0
    top_k: Count = 0
    top_p: TopP = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    stop: tuple[_Word, ...] = ()
    stop_token_ids: tuple[TokenId, ...] = ()
    ignore_eos: bool = False
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Any = ()  # a mapping comes in, pairs are kept: no type says both
    min_tokens: Count = 0
    bad_words: tuple[_Word, ...] = ()
    bad_words_ids: tuple[Annotated[tuple[TokenId, ...], Field(min_length=1)], ...] = ()
    n: Samples = 1
    logprobs: LogprobCount | None = None
    # Some cannot be hashed.
    logits_processors: tuple[Callable[..., Any], ...] = field(default=(), hash=False)
    prompt_logprobs: LogprobCount | None = None
    structure: Structure | TextForm | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_special_token_ids: tuple[TokenId, ...] = ()
    prefix_cache: bool = True
    cache_salt: Annotated[str, Field(min_length=1, max_length=2 * MAX_SALT_CHARACTERS)] | None = (
        None
    )
    return_drafts: bool = False
    max_tokens: InitVar[int | None] = None

    def __post_init__(self, max_tokens: int | None) -> None:
        if max_tokens is not None:
            if self.max_new_tokens not in (max_tokens, type(self).max_new_tokens):
                raise RequestError("max_tokens", "is max_new_tokens, and both are given")
            check_int("max_tokens", max_tokens, least=1)
            object.__setattr__(self, "max_new_tokens", max_tokens)
        for name in _LISTS:
            object.__setattr__(self, name, _tuple(name, getattr(self, name)))
        object.__setattr__(self, "logit_bias", _biases("logit_bias", self.logit_bias))
        object.__setattr__(self, "bad_words_ids", _sequences("bad_words_ids", self.bad_words_ids))
        _check(_SAMPLING_PARAMS, self)
        if 0.0 < self.temperature < LEAST_TEMPERATURE:
            raise RequestError("temperature", f"must be 0 or at least {LEAST_TEMPERATURE:g}")
        if self.min_tokens > self.max_new_tokens:
            reason = f"must be at most max_new_tokens, which is {self.max_new_tokens}"
            raise RequestError("min_tokens", reason)
        if not isinstance(self.structure, Structure | TextForm | None):
            raise RequestError("structure", "must be a Structure")

    @property
    def sampling(self) -> dict[str, float]:
        """How tokens are chosen among the likely ones."""
        return {name: getattr(self, name) for name in SAMPLING}

    @property
    def goes_on_after_eos(self) -> bool:
        """Whether the end-of-text id is a token like any other."""
        return self.ignore_eos and self.structure is None


@dataclass(frozen=True)
class Speculation:
    """An override of the scheduler for one request.

    Attributes:
        chain: models from the drafter to the target; None leaves it to the scheduler. The target
            alone means no speculation.
        depth: draft tokens a cycle, 1 .. MAX_DEPTH; None takes the configured one.
        width: branches of the tree, 1 .. MAX_WIDTH, times depth at most MAX_TREE_TOKENS; or None.
        prediction: what the output may resemble, as text or token ids. If wrong, it costs speed.
        reuse_outputs: it may quote its tenant's earlier outputs, and later ones its own.
    """

    chain: Annotated[Chain, Field(min_length=1)] | None = None
    depth: Annotated[int, Field(ge=1, le=MAX_DEPTH)] | None = None
    width: Annotated[int, Field(ge=1, le=MAX_WIDTH)] | None = None
    prediction: str | Sequence[int] | None = None
    reuse_outputs: bool = True

    def __post_init__(self) -> None:
        if self.chain is not None:
            object.__setattr__(self, "chain", _tuple("speculation.chain", self.chain))
        _check(_SPECULATION, self, "speculation.")
        if (self.depth or 1) * (self.width or 1) > MAX_TREE_TOKENS:
            reason = f"times the depth must be at most {MAX_TREE_TOKENS}"
            raise RequestError("speculation.width", reason)
        if self.prediction is not None and not isinstance(self.prediction, str):
            object.__setattr__(self, "prediction", _tuple("prediction", self.prediction))

    def check_members(
        self, names: tuple[str, ...], target: str, draft_only: Collection[str] = ()
    ) -> None:
        """Raises `RequestError` unless the chain is one of this pool, whose `draft_only` members
        have no model: they draft, and cannot verify."""
        chain, field = self.chain or (target,), "speculation.chain"
        for name in chain:
            if name not in names:
                raise RequestError(field, f"{name!r} is not in the pool ({', '.join(names)})")
        if chain[-1] != target:
            raise RequestError(field, f"must end in the target {target!r}, not {chain[-1]!r}")
        if len(set(chain)) != len(chain):
            raise RequestError(field, "names a model twice")
        for name in chain[1:]:
            if name in draft_only:
                raise RequestError(field, f"{name!r} has no model: it can only stand first")


def _checking(kind: type, *unchecked: str) -> type[BaseModel]:
    """What checks the fields of a dataclass by their types."""
    hints = get_type_hints(kind, include_extras=True)
    fields: Any = {name: (hint, ...) for name, hint in hints.items() if name not in unchecked}
    return create_model(kind.__name__, __config__=ConfigDict(strict=True), **fields)


_SAMPLING_PARAMS = _checking(SamplingParams, "structure", "logit_bias", "max_tokens")
_SPECULATION = _checking(Speculation, "prediction")


def _check(checking: type[BaseModel], asked: object, prefix: str = "") -> None:
    try:
        checking(**vars(asked))
    except ValidationError as error:
        [first, *_] = error.errors(include_url=False)
        raise RequestError(f"{prefix}{first['loc'][0]}", first["msg"]) from None


def _tuple(field: str, value: object) -> tuple[object, ...]:
    if isinstance(value, str):
        return (value,)
    try:
        return tuple(value)  # type: ignore[arg-type]
    except TypeError:
        raise RequestError(field, f"must be a list, not {type(value).__name__}") from None


def _sequences(field: str, value: object) -> tuple[tuple[object, ...], ...]:
    return tuple(_tuple(field, ids) for ids in _tuple(field, value))


_BIAS: TypeAdapter[float] = TypeAdapter(Bias)


def _biases(field: str, value: object) -> tuple[tuple[int, float], ...]:
    pairs = _tuple(field, value.items() if isinstance(value, Mapping) else value)
    biases: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise RequestError(field, "must map token ids to numbers")
        token, bias = _token_id(field, pair[0]), pair[1]
        if token in biases:
            raise RequestError(field, f"has token {token} twice")
        try:
            biases[token] = float(_BIAS.validate_python(bias, strict=True))
        except ValidationError as error:
            raise RequestError(field, error.errors(include_url=False)[0]["msg"]) from None
    return tuple(sorted(biases.items()))


def _token_id(field: str, key: object) -> int:
    if isinstance(key, str):
        if not (key.isascii() and key.isdigit() and len(key) < 20):
            raise RequestError(field, f"must have token ids as keys, not {key[:20]!r}")
        return int(key)
    check_int(field, key, least=0)
    assert isinstance(key, int)
    return key


def check_unicode(field: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(field, "holds half a surrogate pair") from None


def is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond any float
        return False


def check_int(field: str, value: object, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(field, f"must be a whole number, not {value!r}")
    if value < least:
        raise RequestError(field, f"must be at least {least}, not {value}")
    if most is not None and value > most:
        raise RequestError(field, f"must be at most {most}, not {value}")
