"""Validation of requests: each becomes checked specs, or is refused.

Contract: every refusal that depends on the request itself is made here, with a `RequestError` that
names the field, before anything is queued. Runs in the caller's thread, where a long prompt or
a structure may take long, and changes no state; thread-safe.

Not here: checks that need no model, which `params` and `slo` make when they are constructed, and
whether there is room, which `EngineThread` knows.
"""

import functools
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import length_hint
from typing import Any

from modelpool import ModelPool
from modelpool.errors import ConfigError
from specrouter.config import TREE_SLOTS, EngineConfig, RouterConfig, slos_by_class
from specrouter.engine.context_limit import ContextLimit, ContextLimits
from specrouter.engine.request import PromptLike, Request
from specrouter.request.grammar import GrammarCompiler
from specrouter.request.objective import (
    SLO,
    Objective,
    SloLike,
    check_positive,
    check_vocabulary,
    resolve,
    with_implied_ttft,
)
from specrouter.request.params import (
    SAMPLING,
    RequestError,
    SamplingParams,
    Speculation,
    check_int,
    check_unicode,
)
from specrouter.request.spec import MAX_PRIORITY, RequestSpec, SpeculationOverride
from specrouter.request.structure import Structure
from specrouter.routing.scheduler import NO_ROOM
from statemgr import row_tokens

MAX_BAD_WORD_IDS = 8192  # of all bad words of a request: each is checked after every token

_KEPT_WORDS = 4  # lists of bad words whose ids are cached: the prompts of a call share theirs
_PROMPT_FIELDS = ("prompt", "input_ids")


def _context_limit(
    config: EngineConfig, pool: ModelPool, engine: Callable[[], ContextLimits]
) -> ContextLimit:
    if config.kv_memory is None:
        return ContextLimit(pool.tokenizer, config.kv_budget_tokens, engine)
    tokens = row_tokens(pool.kv_tokens, TREE_SLOTS)
    return ContextLimit(pool.tokenizer, tokens, engine, "engine.kv_memory")


class InputValidation:
    """Checks of requests against the pool, and the limits and speed of the running engine.

    `engine` returns the engine that runs now. Raises `ConfigError` if the end of a class's stage is
    no token, and for a checkpoint's sampling parameters that no request may have.
    """

    def __init__(
        self, config: RouterConfig, pool: ModelPool, engine: Callable[[], ContextLimits]
    ) -> None:
        self.slo_classes: Mapping[str, SLO] = slos_by_class(config.slo_classes, pool.tokenizer)
        self.context = _context_limit(config.engine, pool, engine)
        self.sampling_defaults: Mapping[str, Any] = _generation_defaults(config, pool)
        self._pool = pool
        self._engine = engine
        self._grammars = GrammarCompiler(pool.tokenizer, pool.vocab_size, pool.eos_token_ids)
        self._ids_of_words = functools.lru_cache(_KEPT_WORDS)(self._read_words)

    def accept_all(self, asked: Sequence[Request]) -> list[tuple[int, RequestSpec]]:
        """Return all samples, each with its prompt's number, which a refusal also contains."""
        accepted: list[tuple[int, RequestSpec]] = []
        for number, one in enumerate(asked):
            try:
                accepted += [(number, sample) for sample in self.accept_samples(one)]
            except RequestError as error:
                if len(asked) == 1:
                    raise
                if error.field in _PROMPT_FIELDS:
                    raise error.at(f"{error.field}[{number}]", error.reason) from error
                raise error.at(error.field, f"{error.reason} (prompt {number})") from error
        return accepted

    def check_structure(self, structure: Structure) -> None:
        """Compile a structure; raise `RequestError` if that is impossible."""
        self._grammars.form(structure)

    def accept_samples(self, asked: Request) -> list[RequestSpec]:
        """Return a spec for each sample that the request asks for, by index."""
        accepted = self.accept(asked)
        if asked.sample is not None:
            return [accepted]
        if accepted.generated and accepted.params.n > 1:
            raise RequestError("generated", "is of one sample: say which")
        return [replace(accepted, sample=index) for index in range(accepted.params.n)]

    def accept(self, asked: Request) -> RequestSpec:
        """Return the spec of the sample named, or the first; raise `RequestError` on refusal."""
        params = SamplingParams(**self.sampling_defaults) if asked.params is None else asked.params
        if not isinstance(params, SamplingParams):
            raise RequestError("params", "must be SamplingParams")
        _check_turn(asked)
        speculation, predicted, reuses = self._speculation(asked.speculation)
        tokens = self._token_ids(asked.prompt, asked.is_tokenized)
        made = self._checked_ids("generated", asked.generated)
        if len(made) >= params.max_new_tokens:
            raise RequestError("max_new_tokens", f"{len(made)} tokens are generated already")
        self.context.check_request(len(tokens), params.max_new_tokens)
        _check_earlier(asked, params)
        self._check_vocabulary(params)
        bad_words: tuple[tuple[int, ...], ...] = tuple((one,) for one in self._pool.unused_ids)
        if params.bad_words or params.bad_words_ids:
            bad_words += self._bad_words(params, longest=len(tokens) + params.max_new_tokens)
        grammar = None
        if params.structure is not None:
            grammar = self._grammars.form(params.structure)
            grammar.check(made)
        return RequestSpec(
            token_ids=tokens,
            generated=made,
            params=params,
            speculation=speculation,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            sample=asked.sample or 0,
            bad_words_ids=bad_words,
            objective=None if asked.slo is None else self._objective(asked.slo, len(tokens)),
            priority=asked.priority,
            timeout_s=asked.timeout_s,
            grammar=grammar,
            predicted=predicted,
            reuses_outputs=reuses,
            elapsed_s=asked.elapsed_s,
            arrivals=asked.arrivals,
            prefill_only=asked.prefill_only,
            kv=asked.kv,
        )

    def _objective(self, slo: SloLike | Objective, prompt_tokens: int) -> Objective | None:
        engine = self._engine()
        objective = resolve(slo, self.slo_classes, engine.baseline_tpot_ms)
        if objective is None:
            return None
        check_vocabulary(objective.stages, self._pool.vocab_size)
        return with_implied_ttft(objective, prompt_tokens * engine.predicted_prefill_ms())

    def _speculation(
        self, asked: SpeculationOverride
    ) -> tuple[SpeculationOverride, tuple[int, ...], bool]:
        """Return the override that is left, the predicted tokens, and whether outputs are reused.

        Predicted tokens are empty if the pool has no draft-only member to read them.
        """
        if not isinstance(asked, Speculation):
            if asked not in (None, "off"):
                reason = f'must be None, "off" or a Speculation, not {asked!r}'
                raise RequestError("speculation", reason)
            return asked, (), asked is None
        pool = self._pool
        asked.check_members(pool.names, pool.target, pool.draft_only)
        if not pool.fit_together(asked.chain or ()):
            raise RequestError("speculation.chain", NO_ROOM)
        rest = replace(asked, prediction=None, reuse_outputs=True)
        is_whole = asked.prediction is None and asked.reuse_outputs
        kept = asked if is_whole else None if rest == Speculation() else rest
        predicted = self._predicted(asked.prediction) if pool.draft_only else ()
        return kept, predicted, asked.reuse_outputs

    def _predicted(self, given: str | Sequence[int] | None) -> tuple[int, ...]:
        most = self.context.max_tokens
        if not isinstance(given, str):
            return self._checked_ids("prediction", given[:most]) if given is not None else ()
        text = given[: self.context.max_characters]
        return self._encoded("prediction", text, add_special_tokens=False)[:most]

    def _token_ids(self, prompt: PromptLike, is_tokenized: bool) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            self.context.check_prompt(length_hint(prompt))
            check = self._known_ids if is_tokenized else self._checked_ids
            tokens = check("input_ids", prompt)
            if not tokens:
                raise RequestError("input_ids", "is empty")
            return tokens
        self.context.check_text("prompt", prompt)
        tokens = self._encoded("prompt", prompt)
        if not tokens:
            raise RequestError("prompt", "is empty")
        return tokens

    def _encoded(self, field: str, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        check_unicode(field, text)
        made = self._pool.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return self._known_ids(field, made)

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
        return self._known_ids(field, tokens)

    def _known_ids(self, field: str, ids: Sequence[int]) -> tuple[int, ...]:
        """Check that ids are in range; a tokenizer may have tokens, as for images, beyond it."""
        tokens, vocabulary = tuple(ids), self._pool.vocab_size
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
            raise RequestError(field, f"token ids must be from 0 to {vocabulary - 1}")
        return tokens

    def _check_vocabulary(self, params: SamplingParams) -> None:
        vocabulary = self._pool.vocab_size
        if any(token >= vocabulary for token in params.stop_token_ids):
            raise RequestError("stop_token_ids", f"must be below {vocabulary}")
        if any(token >= vocabulary for token, _ in params.logit_bias):
            raise RequestError("logit_bias", f"token ids must be below {vocabulary}")

    def _bad_words(self, params: SamplingParams, longest: int) -> tuple[tuple[int, ...], ...]:
        """Return the banned sequences of at most `longest` ids, those of the texts first."""
        words = self._ids_of_words(params.bad_words)
        _check_count("bad_words_ids", (*words, *params.bad_words_ids))
        for field, banned in (("bad_words", words), ("bad_words_ids", params.bad_words_ids)):
            for ids in banned:
                if max(ids) >= self._pool.vocab_size:
                    raise RequestError(field, f"token ids must be below {self._pool.vocab_size}")
                if len(ids) == 1 and ids[0] in self._pool.eos_token_ids:
                    reason = f"token {ids[0]} ends the text; min_tokens is what holds it back"
                    raise RequestError(field, reason)
        return tuple(ids for ids in (*words, *params.bad_words_ids) if len(ids) <= longest)

    def _read_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        found = tuple(ids for word in words for ids in self._spellings(word))
        _check_count("bad_words", found)
        return found

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        """Return the ids of a word at the beginning of a text, and after a space, as in vLLM.

        The spaced form is added only if the space is part of the first token; if it is a token of
        its own, the plain form bans the word already.
        """
        plain, spaced = (
            tuple(self._pool.tokenizer(text, add_special_tokens=False)["input_ids"])
            for text in (word.lstrip(), " " + word.lstrip())
        )
        if not plain:
            raise RequestError("bad_words", f"{word!r} has no tokens")
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            return [plain, spaced]
        return [plain]


def _generation_defaults(config: RouterConfig, pool: ModelPool) -> dict[str, Any]:
    """Return the sampling parameters that the checkpoint recommends; none with `neutral`.

    As in `generate` of transformers, decoding is greedy without `do_sample`, and with it the
    temperature is 1 unless the file has one. Raises `ConfigError` for values that no request may
    have. The pool has read the file before.
    """
    if config.engine.generation_defaults == "neutral":
        return {}
    file = pool.path(pool.target) / "generation_config.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    given = {name: found[name] for name in SAMPLING if found.get(name) is not None}
    if found.get("do_sample") is True:
        given.setdefault("temperature", 1.0)
    else:
        given["temperature"] = 0.0
    try:
        SamplingParams(**given)
    except RequestError as error:
        raise ConfigError("engine.generation_defaults", f"{str(file)!r}: {error}") from error
    return given


def _check_turn(asked: Request) -> None:
    check_int("priority", asked.priority, -MAX_PRIORITY, MAX_PRIORITY)
    if asked.timeout_s is not None:
        check_positive("timeout_s", asked.timeout_s)


def _check_earlier(asked: Request, params: SamplingParams) -> None:
    if asked.sample is not None:
        check_int("sample", asked.sample, least=0, most=params.n - 1)
    if asked.elapsed_s:
        check_positive("elapsed_s", asked.elapsed_s)
    if asked.arrivals and sum(count for _, count in asked.arrivals) != len(asked.generated):
        raise RequestError("arrivals", "must be of all tokens that are generated already")


def _check_count(field: str, banned: Sequence[Sequence[int]]) -> None:
    count = sum(map(len, banned))
    if count > MAX_BAD_WORD_IDS:
        reason = f"all bad words have {count} token ids; at most {MAX_BAD_WORD_IDS} may be"
        raise RequestError(field, reason)
