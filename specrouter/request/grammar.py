"""Structures as grammars over token ids, by llguidance.

Contract: a structure is compiled in the caller's thread, before its request is queued. One that
cannot be compiled, allows no text, or is too large is refused with `RequestError`, as far as that
can be found: a grammar may compile and exceed its limits, or reach a dead end, a few tokens later.
So a few texts are tried, of a few random allowed tokens each, the same in every run. A compiled
grammar is shared and never changed; each row uses its own copy. llguidance's limits bound the time
of every step, so a hostile grammar ends its own request with `GrammarError`.

JSON has its members in the schema's order, and between two of its parts nothing, one space, or one
newline with up to 16 spaces: a small model that is sampled might otherwise generate white space for
ever.
Source: https://github.com/guidance-ai/llguidance
"""

import functools
import json
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeVar, get_args

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from transformers import PreTrainedTokenizerBase

from processors.grammar import Bits, GrammarError, Path, allows
from specrouter.request.params import RequestError, check_unicode
from specrouter.request.structure import Structure, StructureKind, TextForm

Result = TypeVar("Result")

_KEPT = 64  # compiled grammars
_LONGEST_SOURCE = 2**16  # characters
_LONGEST_REASON = 300  # characters of llguidance's message
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DATA = ("const", "enum", "default", "examples")
# JSON Schema 2020-12, Validation, 7.3
_FORMATS = frozenset((
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname",
    "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template",
    "json-pointer", "relative-json-pointer", "regex",
))  # fmt: skip
# llguidance follows references by recursion: 3,000 of them overflow the usual 8 MiB.
_STACK_BYTES = 2**28
_STACK_SIZE = threading.Lock()  # the stack size is global to the process
# Trial of a grammar before its request is queued: texts, tokens of each, time of all.
_TRIED_TEXTS, _TRIED_TOKENS = 3, 8
_TRIED_S = 0.25
# The worst grammars found take under 1 s to compile and 0.1 s for a step with these limits.
_LIMITS = LLParserLimits(
    max_items_in_row=20_000,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=50_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
WHITE_SPACE = r"( |\n {0,16})?"


@dataclass(frozen=True, eq=False)
class CompiledGrammar:
    """A grammar at its start.

    `matcher` is only ever copied; its masks cover `known` ids, the last of which the model may
    lack. `open_ended`: see `Structure`.
    """

    matcher: LLMatcher
    known: int
    vocab_size: int
    end_token_ids: frozenset[int]
    open_ended: bool

    def start(self) -> "RowGrammar":
        """Return a grammar for one row."""
        return RowGrammar(self)

    def check(self, generated: Sequence[int]) -> None:
        """Raise `RequestError` unless the grammar allows a text of these ids."""
        inner = list(generated)
        if inner and inner[-1] in self.end_token_ids:
            inner.pop()  # the grammar does not decide about tokens after an end id
        matcher = self.matcher.deep_copy()
        taken = matcher.try_consume_tokens(inner)
        if self.open_ended and taken == len(inner) - 1 and matcher.is_accepting():
            return
        if taken < len(inner) or matcher.is_error():
            raise RequestError("generated", f"the structure does not allow token {taken + 1}")


class GrammarCompiler:
    """A compiler of structures for one tokenizer. Thread-safe."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        end_token_ids: Collection[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = frozenset(end for end in end_token_ids if end < vocab_size)
        self._known = functools.lru_cache(_KEPT)(self._compile)

    def form(self, structure: Structure | TextForm) -> TextForm:
        """Return the form of a text. Raises `RequestError`, whose field is `structure`."""
        return self.compile(structure) if isinstance(structure, Structure) else structure

    def compile(self, structure: Structure) -> CompiledGrammar:
        """Compile a structure. Raises `RequestError`, whose field is `structure`."""
        _check(structure)
        return self._known(structure)

    def _compile(self, structure: Structure) -> CompiledGrammar:
        definition, tokens = _whole_definition(structure), self._tokens
        matcher = _started(tokens, definition, self._end_token_ids)
        if matcher.is_error():
            raise RequestError("structure", _reason(matcher))
        ends, open_ended = self._end_token_ids, structure.open_ended
        return CompiledGrammar(matcher, tokens.vocab_size, self._vocab_size, ends, open_ended)

    @functools.cached_property
    def _tokens(self) -> LLTokenizer:
        """The tokenizer for llguidance; it takes a second for a large vocabulary."""
        if not self._end_token_ids:
            raise RequestError("structure", "the target has no end-of-text id to end it with")
        tokenizer: Any = self._tokenizer
        ids = set(tokenizer.get_vocab().values())
        last = max(ids)
        count = last + 1 if last >= len(ids) else None  # else the number of ids
        try:
            ends = sorted(self._end_token_ids)
            return from_tokenizer(tokenizer, n_vocab=count, eos_token=ends)
        except ValueError as error:
            raise RequestError("structure", f"not with this tokenizer: {error}") from error


class RowGrammar:
    """`processors.grammar.TokenGrammar` of one row; for one thread."""

    binds_drafts = True

    def __init__(self, compiled: CompiledGrammar) -> None:
        self._compiled = compiled
        self._matcher = compiled.matcher.deep_copy()
        self._text: list[int] = []  # committed
        self._path: list[int] = []  # tokens that the matcher has read after it
        self._masks: dict[Path, Bits | GrammarError | None] = {}  # after the committed text
        self._has_ended = False
        self._has_left = False  # an open-ended form was left by an id that does not continue it
        self._failure: GrammarError | None = None  # of the committed text itself

    def advance(self, tokens: list[int]) -> None:
        """See `TokenGrammar`."""
        ends = [place for place, token in enumerate(tokens) if self._is_end(token)]
        fresh = tokens[: ends[0]] if ends else tokens
        if self._has_ended or self._failure is not None:
            return
        try:
            own = self._own(fresh)
            self._has_left |= own < len(fresh)
            fresh = fresh[:own]
            self._read(fresh)
        except GrammarError as error:
            self._failure = error
        self._text += fresh
        self._path = []
        self._masks.clear()
        self._has_ended = bool(ends)

    def mask(self, path: Path) -> Bits | None:
        """See `TokenGrammar`."""
        if self._failure is not None:
            raise self._failure
        if path not in self._masks:
            try:
                self._masks[path] = self._find(path)
            except GrammarError as error:
                self._masks[path] = error
            except BaseException as error:  # the state of the matcher is unknown
                self._begin_again(GrammarError(str(error)))
                if type(error).__name__ != "PanicException":
                    raise
                raise RuntimeError(f"llguidance panicked: {error}") from error  # no `Exception`
        found = self._masks[path]
        if isinstance(found, GrammarError):
            raise found
        return found

    def _find(self, path: Path) -> Bits | None:
        if self._has_ended:
            return None
        if path:
            before = self.mask(path[:-1])
            if before is None or not allows(before, path[-1]) or self._is_end(path[-1]):
                return None
        size = self._compiled.vocab_size
        if self._own(path) < len(path) or self._has_left:
            ends = np.isin(np.arange(size), list(self._compiled.end_token_ids))
            return np.packbits(ends, bitorder="little")
        self._read(path)
        if self._compiled.open_ended and self._matcher.is_accepting():
            return np.full(-(-size // 8), 255, dtype=np.uint8)
        words = allocate_token_bitmask(1, self._compiled.known)
        fill_next_token_bitmask(self._matcher, words)
        self._check()
        bits: Bits = words[0].view(np.uint8)[: -(-size // 8)]
        return bits

    def _own(self, path: Sequence[int]) -> int:
        """Return how many of these tokens the form itself accepts after the committed text."""
        if self._has_left:
            return 0
        for place, token in enumerate(path if self._compiled.open_ended else ()):
            self._read(path[:place])
            if self._matcher.is_accepting() and not self._matcher.validate_tokens([token]):
                return place
        return len(path)

    def _read(self, path: Sequence[int]) -> None:
        """Move the matcher to the committed text and this path."""
        together = zip(self._path, path, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], together))
        if shared < len(self._path):
            self._matcher.rollback(len(self._path) - shared)
            self._check()
        self._matcher.consume_tokens(list(path[shared:]))
        self._check()
        self._path = list(path)

    def _check(self) -> None:
        """Replace a matcher that has failed, and raise `GrammarError`."""
        if not self._matcher.is_error():
            return
        error = GrammarError(_reason(self._matcher))
        self._begin_again(error)
        raise error

    def _begin_again(self, error: GrammarError) -> None:
        """Start a new matcher after the text; `error` is the failure if it cannot read that."""
        self._matcher, self._path = self._compiled.matcher.deep_copy(), []
        if self._text and not self._matcher.consume_tokens(self._text):
            self._failure = error

    def _is_end(self, token: int) -> bool:
        return token in self._compiled.end_token_ids


def _started(tokens: LLTokenizer, definition: str, ends: Collection[int]) -> LLMatcher:
    """Return a matcher at the grammar's start, or one that has failed.

    Args:
        tokens: the tokenizer for llguidance.
        definition: the grammar.
        ends: ids that end a text.
    """
    return _on_deep_stack(lambda: _begun(tokens, definition, ends))


def _begun(tokens: LLTokenizer, definition: str, ends: Collection[int]) -> LLMatcher:
    matcher = LLMatcher(tokens, definition, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        return matcher
    generator, until_s = random.Random(0), time.monotonic() + _TRIED_S
    for _ in range(_TRIED_TEXTS):
        tried = _tried(matcher.deep_copy(), tokens.vocab_size, ends, generator, until_s)
        if tried.is_error():
            return tried
    return matcher


def _tried(
    matcher: LLMatcher,
    vocab_size: int,
    ends: Collection[int],
    generator: random.Random,
    until_s: float,
) -> LLMatcher:
    """Return the matcher after some random allowed tokens: most failures show within a few."""
    words = allocate_token_bitmask(1, vocab_size)
    for _ in range(_TRIED_TOKENS):
        fill_next_token_bitmask(matcher, words)
        if matcher.is_error() or time.monotonic() > until_s:
            break
        bits = np.unpackbits(words[0].view(np.uint8), bitorder="little")[:vocab_size]
        bits[[end for end in ends if end < vocab_size]] = 0
        allowed = np.flatnonzero(bits)
        if not len(allowed) or not matcher.consume_token(int(generator.choice(allowed))):
            break
    return matcher


def _on_deep_stack(call: Callable[[], Result]) -> Result:
    result: Future[Result] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    with _STACK_SIZE:
        usual = threading.stack_size(_STACK_BYTES)  # for all threads started before it is reset
        try:
            threading.Thread(target=run, name="specrouter-grammar", daemon=True).start()
        finally:
            threading.stack_size(usual)
    return result.result()


def _check(structure: Structure) -> None:
    """Raise `RequestError` for faults that need no parsing."""
    kind, source = structure.kind, structure.source
    if kind not in get_args(StructureKind):
        known = ", ".join(get_args(StructureKind))
        raise RequestError("structure", f"must be one of {known}, not {kind!r}")
    if not isinstance(source, str):
        raise RequestError("structure", f"must be given as text, not {type(source).__name__}")
    if len(source) > _LONGEST_SOURCE:
        raise RequestError("structure", f"is longer than {_LONGEST_SOURCE} characters")
    check_unicode("structure", source)


def _whole_definition(structure: Structure) -> str:
    """Return the grammar for llguidance. Raises `RequestError`."""
    inner = _definition(structure)
    if not structure.around:
        return inner
    is_lark = structure.kind in ("choice", "grammar")
    body = {"lark_grammar": inner} if is_lark else json.loads(inner)["grammars"][0]
    return json.dumps({"grammars": [{"lark_grammar": structure.around}, {**body, "name": "body"}]})


def _definition(structure: Structure) -> str:
    """Return the grammar of the form alone. Raises `RequestError`."""
    kind, source = structure.kind, structure.source
    if kind == "json_object":
        return _json_grammar({"type": "object"})
    if kind == "json_schema":
        return _json_grammar(_parsed(source))
    if kind == "regex":
        return LLMatcher.grammar_from_regex(source)
    if kind == "choice":
        return _choice_grammar(_parsed(source))
    return LLMatcher.grammar_from_lark(source)


def _json_grammar(schema: object) -> str:
    if not isinstance(schema, dict | bool):
        raise RequestError("structure", "a JSON schema must be an object or a boolean")
    if schema is False:
        raise RequestError("structure", "allows no text")
    text = "{}" if schema is True else json.dumps(schema)
    try:
        if '"format"' in text:  # only then, since recursion could fail on deep schemas
            text = json.dumps(without_own_formats(schema))
        return LLMatcher.grammar_from_json_schema(
            text, defaults={"whitespace_pattern": WHITE_SPACE}
        )
    except (ValueError, RecursionError) as error:
        raise RequestError("structure", str(error)[:_LONGEST_REASON]) from error


def without_own_formats(schema: Any) -> Any:
    """Return a JSON schema without formats that JSON Schema does not define.

    Such formats, like pydantic's `path` and OpenAPI's `binary`, do not restrict a text, and
    llguidance refuses them. Raises `RecursionError`.
    """
    if isinstance(schema, list):
        return [without_own_formats(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {}
    for keyword, value in schema.items():
        if keyword in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            found[keyword] = {name: without_own_formats(each) for name, each in value.items()}
        elif keyword in _DATA:
            found[keyword] = value
        elif keyword != "format" or not isinstance(value, str) or value in _FORMATS:
            found[keyword] = without_own_formats(value)
    return found


def _choice_grammar(texts: object) -> str:
    """Return a grammar of one terminal, since the lexer handles many alternatives best."""
    is_list = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    if not is_list or not texts:
        raise RequestError("structure", "choices must be a list of texts that is not empty")
    assert isinstance(texts, list)
    for text in texts:
        check_unicode("structure", text)
    alternatives = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {alternatives}")


def _parsed(source: str) -> object:
    try:
        return json.loads(source, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError("structure", f"is not JSON: {error}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _reason(matcher: LLMatcher) -> str:
    """Return llguidance's message in one line."""
    message = matcher.get_error().split("<non-verbose/>")[0]
    if message.startswith("NoExtension"):
        return "allows no text"
    return " ".join(message.split())[:_LONGEST_REASON]
