"""The beginning of a grammar: its matcher, within llguidance's limits, and tried out.

Contract: what llguidance refuses is found here as far as that can be: a grammar may compile and
still take more than it may, or have no way on, a few tokens later. So some texts are tried, each a
few tokens of those that are allowed, by chance but the same each time. Limits bound the time of
every step.
"""

import random
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

Result = TypeVar("Result")

# llguidance follows references by recursion: 3,000 of them overflow the usual 8 MiB.
_STACK_BYTES = 2**28
_STACK_SIZE = threading.Lock()  # the stack size is one of the whole process
# What a grammar is tried with before its request is queued: texts, tokens of each, time of all.
_TRIED_TEXTS, _TRIED_TOKENS = 3, 8
_TRIED_S = 0.25
# Of the worst grammars that were found: under a second to compile, a tenth of one for a step.
_LIMITS = LLParserLimits(
    max_items_in_row=20_000,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=50_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


def started(tokens: LLTokenizer, definition: str, ends: Collection[int]) -> LLMatcher:
    """A matcher at the grammar's beginning, or one that has failed.

    Args:
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
    """The matcher behind some tokens of any text: what it cannot do shows within a few masks."""
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
        usual = threading.stack_size(_STACK_BYTES)  # of all that begin before it is set back
        try:
            threading.Thread(target=run, name="specrouter-grammar", daemon=True).start()
        finally:
            threading.stack_size(usual)
    return result.result()
