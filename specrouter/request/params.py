"""What a caller asks for: sampling parameters, an override of speculation, and their refusals."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, Self

from specrouter.request.structure import Structure, TextForm


class RequestError(ValueError):
    """A request that cannot be served as it stands. Raised before anything is queued."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason

    def at(self, field: str, reason: str) -> Self:
        """The same refusal, told otherwise."""
        return type(self)(field, reason)


Chain = tuple[str, ...]  # names of models, the drafter first, the target last

LEAST_TEMPERATURE = 1e-6  # below it, quotients overflow and the text is greedy anyway
REPETITION_PENALTIES = (1e-6, 1e6)  # outside of it, penalised logits overflow
PENALTIES = (-2.0, 2.0)
LARGEST_BIAS = 100.0
MAX_DEPTH = 20  # draft tokens; beyond it the chance that all are accepted is negligible
MAX_WIDTH = 8  # branches of a token tree
MAX_TREE_TOKENS = 64  # a tree's draft tokens: what one verification reads beside the last token
MAX_SAMPLES = 128
MAX_LOGPROBS = 20
MAX_SALT_CHARACTERS = 1024
# How a token is chosen among the likely ones: what a checkpoint may recommend.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_TOKEN_IDS = ("stop_token_ids", "shown_special_token_ids")
_SWITCHES = (
    *("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "prefix_cache"),
    "return_drafts",
)


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

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Any = ()  # a mapping comes in, pairs are kept: no type says both
    min_tokens: int = 0
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    n: int = 1
    logprobs: int | None = None
    logits_processors: tuple[Any, ...] = field(default=(), hash=False)  # some cannot be hashed
    prompt_logprobs: int | None = None
    structure: Structure | TextForm | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_special_token_ids: tuple[int, ...] = ()
    prefix_cache: bool = True
    cache_salt: str | None = None
    return_drafts: bool = False
    max_tokens: InitVar[int | None] = None

    def __post_init__(self, max_tokens: int | None) -> None:
        if max_tokens is not None:
            if self.max_new_tokens not in (max_tokens, type(self).max_new_tokens):
                raise RequestError("max_tokens", "is max_new_tokens, and both are given")
            check_int("max_tokens", max_tokens, least=1)
            object.__setattr__(self, "max_new_tokens", max_tokens)
        for name in ("stop", *_TOKEN_IDS, "bad_words", "logits_processors"):
            object.__setattr__(self, name, _tuple(name, getattr(self, name)))
        object.__setattr__(self, "logit_bias", _biases("logit_bias", self.logit_bias))
        object.__setattr__(self, "bad_words_ids", _sequences("bad_words_ids", self.bad_words_ids))
        self._check_choice()
        self._check_ending()
        self._check_bans()
        self._check_cache()
        check_int("n", self.n, least=1, most=MAX_SAMPLES)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), least=0, most=MAX_LOGPROBS)
        if not isinstance(self.structure, Structure | TextForm | None):
            raise RequestError("structure", "must be a Structure")
        if not all(callable(processor) for processor in self.logits_processors):
            raise RequestError("logits_processors", "must hold callables (input_ids, scores)")

    @property
    def sampling(self) -> dict[str, float]:
        """How tokens are chosen among the likely ones."""
        return {name: getattr(self, name) for name in SAMPLING}

    @property
    def goes_on_after_eos(self) -> bool:
        """Whether the end-of-text id is a token like any other."""
        return self.ignore_eos and self.structure is None

    def _check_choice(self) -> None:
        _check_number("temperature", self.temperature, least=0.0)
        if 0.0 < self.temperature < LEAST_TEMPERATURE:
            raise RequestError("temperature", f"must be 0 or at least {LEAST_TEMPERATURE:g}")
        check_int("top_k", self.top_k, least=0)
        _check_number("top_p", self.top_p, least=0.0)
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError("top_p", f"must be above 0 and at most 1, not {self.top_p}")
        _check_number("min_p", self.min_p, least=0.0, most=1.0)
        least, most = REPETITION_PENALTIES
        _check_number("repetition_penalty", self.repetition_penalty, least, most)
        _check_number("presence_penalty", self.presence_penalty, *PENALTIES)
        _check_number("frequency_penalty", self.frequency_penalty, *PENALTIES)
        if self.seed is not None:
            check_int("seed", self.seed, least=0)
            if self.seed >= 2**64:
                raise RequestError("seed", "must be below 2**64")

    def _check_ending(self) -> None:
        check_int("max_new_tokens", self.max_new_tokens, least=1)
        check_int("min_tokens", self.min_tokens, least=0)
        if self.min_tokens > self.max_new_tokens:
            reason = f"must be at most max_new_tokens, which is {self.max_new_tokens}"
            raise RequestError("min_tokens", reason)
        if not all(isinstance(text, str) and text for text in self.stop):
            raise RequestError("stop", "must hold texts that are not empty")
        for name in _TOKEN_IDS:
            for token in getattr(self, name):
                check_int(name, token, least=0)
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, "must be true or false")

    def _check_cache(self) -> None:
        salt, most = self.cache_salt, 2 * MAX_SALT_CHARACTERS
        if salt is not None and not (isinstance(salt, str) and 0 < len(salt) <= most):
            raise RequestError("cache_salt", f"must be a text of 1 to {most} characters")

    def _check_bans(self) -> None:
        for word in self.bad_words:
            if not isinstance(word, str) or not word:
                raise RequestError("bad_words", "must hold texts that are not empty")
            check_unicode("bad_words", word)
        for ids in self.bad_words_ids:
            if not ids:
                raise RequestError("bad_words_ids", "must hold sequences that are not empty")
            for token in ids:
                check_int("bad_words_ids", token, least=0)


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

    chain: tuple[str, ...] | None = None
    depth: int | None = None
    width: int | None = None
    prediction: str | Sequence[int] | None = None
    reuse_outputs: bool = True

    def __post_init__(self) -> None:
        if self.chain is not None:
            chain = _tuple("speculation.chain", self.chain)
            object.__setattr__(self, "chain", chain)
            if not chain or not all(isinstance(name, str) for name in chain):
                raise RequestError("speculation.chain", "must name the models of a chain")
        if self.depth is not None:
            check_int("speculation.depth", self.depth, least=1, most=MAX_DEPTH)
        if not isinstance(self.reuse_outputs, bool):
            raise RequestError("speculation.reuse_outputs", "must be true or false")
        if self.width is not None:
            check_int("speculation.width", self.width, least=1, most=MAX_WIDTH)
            if self.depth is not None and self.depth * self.width > MAX_TREE_TOKENS:
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


def _tuple(field: str, value: object) -> tuple[object, ...]:
    if isinstance(value, str):
        return (value,)
    try:
        return tuple(value)  # type: ignore[arg-type]
    except TypeError:
        raise RequestError(field, f"must be a list, not {type(value).__name__}") from None


def _sequences(field: str, value: object) -> tuple[tuple[object, ...], ...]:
    return tuple(_tuple(field, ids) for ids in _tuple(field, value))


def _biases(field: str, value: object) -> tuple[tuple[int, float], ...]:
    pairs = _tuple(field, value.items() if isinstance(value, Mapping) else value)
    biases: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise RequestError(field, "must map token ids to numbers")
        token, bias = _token_id(field, pair[0]), pair[1]
        if token in biases:
            raise RequestError(field, f"has token {token} twice")
        _check_number(field, bias, least=-LARGEST_BIAS, most=LARGEST_BIAS)
        biases[token] = float(bias)
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


def _check_number(field: str, value: object, least: float, most: float | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(field, f"must be a number, not {value!r}")
    if not is_finite(value):
        raise RequestError(field, f"must be finite, not {value}")
    if value < least:
        raise RequestError(field, f"must be at least {least:g}, not {value}")
    if most is not None and value > most:
        raise RequestError(field, f"must be at most {most:g}, not {value}")
