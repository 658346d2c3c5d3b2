"""The parameters of a request: sampling, an override of speculation, and their checks."""

import math
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from numbers import Real
from typing import Annotated, Any, Self, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    SkipValidation,
    ValidationError,
    create_model,
)

from specrouter.request.structure import Structure, TextForm


class RequestError(ValueError):
    """A request that cannot be served as it is. Raised before anything is queued."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason

    def at(self, field: str, reason: str) -> Self:
        """Return the same refusal with another field and reason."""
        return type(self)(field, reason)


Chain = tuple[str, ...]  # names of models, the drafter first, the target last

LEAST_TEMPERATURE = 1e-6  # below it, quotients overflow and the text is greedy anyway
MAX_DEPTH = 20  # draft tokens; beyond it the chance that all are accepted is negligible
MAX_WIDTH = 8  # branches of a token tree
MAX_TREE_TOKENS = 64  # nodes of a tree, without its root
MAX_SAMPLES = 128
MAX_LOGPROBS = 20
MAX_SALT_CHARACTERS = 1024
# Parameters of the choice among likely tokens, which a checkpoint may recommend.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def _tuple(value: Any) -> tuple[object, ...]:
    if isinstance(value, str):
        return (value,)
    try:
        return tuple(value)
    except TypeError:
        raise ValueError(f"must be a list, not {type(value).__name__}") from None


def _biases(value: Any) -> tuple[tuple[object, object], ...]:
    try:
        pairs = value.items() if isinstance(value, Mapping) else value
        return tuple((_token_id(token), bias) for token, bias in pairs)
    except (TypeError, ValueError):
        raise ValueError("must map token ids to numbers") from None


def _number(value: Any) -> Any:
    """Refuse a boolean of numpy, which would be read as 0 or 1."""
    if not isinstance(value, Real):
        raise ValueError("must be a number")
    return value


def _token_id(key: Any) -> Any:
    """Return a token id; JSON has ids as decimal strings."""
    if not isinstance(key, str):
        return key
    if not (key.isascii() and key.isdigit() and len(key) < 20):
        raise ValueError
    return int(key)


def _by_rising_id(pairs: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    by_id = dict(pairs)
    if len(by_id) < len(pairs):
        raise ValueError("has a token twice")
    return tuple(sorted(by_id.items()))


# Ranges of sampling parameters, for all interfaces. Outside the ranges of penalties, penalised
# logits overflow.
Natural = Annotated[int, Field(ge=0)]
_NUMBER = BeforeValidator(_number)
Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False), _NUMBER]
TopP = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False), _NUMBER]
MinP = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), _NUMBER]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False), _NUMBER]
RepetitionPenalty = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False), _NUMBER]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False), _NUMBER]
Samples = Annotated[int, Field(ge=1, le=MAX_SAMPLES)]
LogprobCount = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Depth = Annotated[int, Field(ge=1, le=MAX_DEPTH)]
Width = Annotated[int, Field(ge=1, le=MAX_WIDTH)]
_List = BeforeValidator(_tuple)
_Texts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], _List]
_TokenIds = Annotated[tuple[Natural, ...], _List]
_Bans = Annotated[tuple[Annotated[_TokenIds, Field(min_length=1)], ...], _List]
_Salt = Annotated[str, Field(min_length=1, max_length=2 * MAX_SALT_CHARACTERS)]
_Biases = Annotated[
    tuple[tuple[Natural, Bias], ...], BeforeValidator(_biases), AfterValidator(_by_rising_id)
]
_AS_BIASES = GetPydanticSchema(lambda _, handler: handler.generate_schema(_Biases))


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The choice of tokens, and the end of a text. The defaults are greedy.

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
        presence_penalty: -2 .. 2; subtracted from the logits of tokens that the output holds.
        frequency_penalty: -2 .. 2; the same, for each time that it holds them.
        logit_bias: what is added to the logit of a token id, -100 .. 100: a mapping or pairs, with
            ids that may be decimal strings, as JSON has them. Kept as a tuple of pairs by ascending
            id.
        min_tokens: before so many tokens, neither the end-of-text id nor one of `stop_token_ids` is
            chosen, and no text of `stop` ends the output, as in vLLM.
        bad_words: texts that are not generated, at the beginning of a word.
        bad_words_ids: sequences of ids that are not generated.
        n: samples of each prompt, 1 .. MAX_SAMPLES. Greedy ones are equal.
        logprobs: None gives none; 0 those of the output's tokens; k those of the k most likely
            tokens too, up to MAX_LOGPROBS. They are the target's, before any processing.
        logits_processors: callables `(input_ids, scores) -> scores`, as in `transformers`.
        prompt_logprobs: as `logprobs`, for the prompt's tokens, given the tokens before them.
        structure: a form that the text must have, such as a JSON schema. It overrides `min_tokens`
            and `ignore_eos`: where it is complete, the text ends. `min_tokens` holds the end back
            only if something else may follow, and `ignore_eos` does nothing.
        include_stop_str_in_output: the text or token of `stop` or `stop_token_ids` that ended the
            output is part of the text.
        skip_special_tokens: False shows them in the text, the end-of-text one included.
        shown_special_token_ids: special tokens that the text shows all the same.
        prefix_cache: False reads the whole prompt, and keeps nothing of the request.
        cache_salt: only requests with the same one, or all without one, share cached prefixes.
        return_drafts: the output has the drafts of every cycle, their proposers, and the accepted
            part.
        receipt: the output has a receipt, by which `specrouter verify` computes it again;
            log-probabilities of its tokens come with it.
    """

    max_new_tokens: Annotated[int, Field(ge=1)] = 128
    temperature: Temperature = 0.0
    top_k: Natural = 0
    top_p: TopP = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    stop: _Texts = ()
    stop_token_ids: _TokenIds = ()
    ignore_eos: bool = False
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[Any, _AS_BIASES] = ()  # accepts a mapping too: no type says both
    min_tokens: Natural = 0
    bad_words: _Texts = ()
    bad_words_ids: _Bans = ()
    n: Samples = 1
    logprobs: LogprobCount | None = None
    logits_processors: Annotated[tuple[Callable[..., Any], ...], _List] = field(
        default=(),
        hash=False,  # some cannot be hashed
    )
    prompt_logprobs: LogprobCount | None = None
    structure: Structure | TextForm | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_special_token_ids: _TokenIds = ()
    prefix_cache: bool = True
    cache_salt: _Salt | None = None
    return_drafts: bool = False
    receipt: bool = False
    max_tokens: InitVar[int | None] = None

    def __post_init__(self, max_tokens: int | None) -> None:
        if max_tokens is not None:
            if self.max_new_tokens not in (max_tokens, type(self).max_new_tokens):
                raise RequestError("max_tokens", "is max_new_tokens, and both are given")
            check_int("max_tokens", max_tokens, least=1)
            object.__setattr__(self, "max_new_tokens", max_tokens)
        _check(self, _SAMPLING_PARAMS)
        if 0.0 < self.temperature < LEAST_TEMPERATURE:
            raise RequestError("temperature", f"must be 0 or at least {LEAST_TEMPERATURE:g}")
        if self.min_tokens > self.max_new_tokens:
            reason = f"must be at most max_new_tokens, which is {self.max_new_tokens}"
            raise RequestError("min_tokens", reason)
        if self.receipt:
            self._prepare_receipt()

    def _prepare_receipt(self) -> None:
        if self.logits_processors or not isinstance(self.structure, Structure | None):
            reason = "cannot hold processors or forms of one's own, which are code"
            raise RequestError("receipt", reason)
        if self.logprobs is None:
            object.__setattr__(self, "logprobs", 0)

    @property
    def sampling(self) -> dict[str, float]:
        """The parameters of `SAMPLING`, which change the choice among likely tokens."""
        return {name: getattr(self, name) for name in SAMPLING}

    @property
    def goes_on_after_eos(self) -> bool:
        """True if the end-of-text id is a token like any other."""
        return self.ignore_eos and self.structure is None


@dataclass(frozen=True)
class Speculation:
    """An override of the scheduler for one request.

    Attributes:
        chain: models from the drafter to the target; None leaves it to the scheduler. The target
            alone means no speculation.
        depth: draft tokens a cycle, 1 .. MAX_DEPTH; None takes the configured one.
        width: branches of the tree, 1 .. MAX_WIDTH, times depth at most MAX_TREE_TOKENS; or None.
        prediction: text or token ids that the output may resemble. If wrong, it costs speed.
        reuse_outputs: it may quote its tenant's earlier outputs, and later ones its own.
    """

    chain: Annotated[tuple[str, ...], Field(min_length=1), _List] | None = None
    depth: Depth | None = None
    width: Width | None = None
    prediction: Annotated[str | Sequence[int] | None, SkipValidation] = None
    reuse_outputs: bool = True

    def __post_init__(self) -> None:
        _check(self, _SPECULATION, "speculation.")
        if self.depth and self.width and self.depth * self.width > MAX_TREE_TOKENS:
            reason = f"times the depth must be at most {MAX_TREE_TOKENS}"
            raise RequestError("speculation.width", reason)
        if not isinstance(self.prediction, str | None):
            try:
                object.__setattr__(self, "prediction", _tuple(self.prediction))
            except ValueError as error:
                raise RequestError("prediction", str(error)) from None

    def check_members(
        self, names: tuple[str, ...], target: str, draft_only: Collection[str] = ()
    ) -> None:
        """Raise `RequestError` unless the chain is one of this pool.

        `draft_only` members have no model: they draft, and cannot verify.
        """
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


def _fields_of(kind: type) -> type[BaseModel]:
    """Return a model of a dataclass's fields, from their annotations."""
    hints = get_type_hints(kind, include_extras=True)
    hints.pop("max_tokens", None)
    settings = ConfigDict(strict=True, arbitrary_types_allowed=True)
    fields: dict[str, Any] = {name: (hint, ...) for name, hint in hints.items()}
    return create_model(kind.__name__, __config__=settings, **fields)


def _check(asked: object, fields: type[BaseModel], prefix: str = "") -> None:
    """Check all values, and replace them by the converted ones. Raises `RequestError`."""
    try:
        made = fields.model_validate(vars(asked))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        reason = fault["msg"].removeprefix("Value error, ").replace("Input should", "must")
        with suppress(ValueError):  # of a number that is too long to be shown
            reason = f"{reason}, not {reprlib.repr(fault['input'])}"
        raise RequestError(f"{prefix}{fault['loc'][0]}", reason) from None
    vars(asked).update(vars(made))


_SAMPLING_PARAMS, _SPECULATION = _fields_of(SamplingParams), _fields_of(Speculation)


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
