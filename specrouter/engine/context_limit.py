"""ContextLimit: how long a request may be, and the refusal of what is longer.

Contract: what is certainly too long is refused before it is read: a text by its characters before
it is tokenized, a list of ids before they are looked at. Messages have OpenAI's words, by which
LiteLLM and others know that a conversation has to be cut.
"""

import functools
from collections.abc import Callable
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from specrouter.request.params import RequestError


class Limits(Protocol):
    """What requests are judged by: an engine's, or those of all replicas."""

    @property
    def max_request_tokens(self) -> int: ...

    def can_ever_fit(self, tokens: int) -> bool: ...

    def baseline_tpot_ms(self) -> float: ...

    def predicted_prefill_ms(self) -> float: ...


class ContextLengthError(RequestError):
    """A request for more tokens than one may have."""


class ContextLimit:
    """Args:
    kv_tokens: that a request may have by its KV memory, as `field` of the configuration has it.
    engine: gives the one that runs now.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        kv_tokens: int | None,
        engine: Callable[[], Limits],
        field: str = "engine.kv_budget_tokens",
    ) -> None:
        self._tokenizer = tokenizer
        self._kv_tokens = kv_tokens
        self._field = field
        self._engine = engine

    @property
    def max_tokens(self) -> int:
        """Of a request, prompt and output."""
        limit, budget = self._engine().max_request_tokens, self._kv_tokens
        return limit if budget is None else min(limit, budget)

    @property
    def max_characters(self) -> int:
        """Of a prompt's text: `max_tokens` times the longest token.

        A tokenizer that drops characters (white space at the ends, say) could make fewer tokens of
        a longer text; such a text is refused all the same.
        """
        return self.max_tokens * self._longest_token

    def check_text(self, field: str, text: str) -> None:
        """Before it is tokenized, which takes time and memory. Raises `ContextLengthError`."""
        if len(text) > self.max_characters:
            reason = f"the text has {len(text)} characters: at most {self.max_characters} can fit"
            raise ContextLengthError(field, self._words() + reason)

    def check_prompt(self, tokens: int) -> None:
        """Before its ids are looked at. Raises `ContextLengthError`."""
        if tokens > self.max_tokens:
            self._refuse(tokens)

    def check_request(self, prompt_tokens: int, new_tokens: int) -> None:
        """Whether both together can ever be served. Raises `ContextLengthError`."""
        asked = prompt_tokens + new_tokens
        if self._engine().can_ever_fit(asked):
            return
        if prompt_tokens >= self.max_tokens:
            self._refuse(prompt_tokens)
        room = self.max_tokens - prompt_tokens
        reason = (
            f"you requested {asked} tokens ({prompt_tokens} in the prompt, {new_tokens} "
            f"in the completion): at most {room} new ones fit"
        )
        raise ContextLengthError("max_new_tokens", self._words() + reason)

    def _refuse(self, prompt_tokens: int) -> None:
        most = self.max_tokens - 1
        reason = f"the prompt has {prompt_tokens}: at most {most} leave room for a new one"
        raise ContextLengthError("prompt", self._words() + reason)

    def _words(self) -> str:
        limit, source = self.max_tokens, ""
        if limit < self._engine().max_request_tokens:
            source = f" ({self._field}: more never fit in the KV memory)"
        return f"This model's maximum context length is {limit} tokens{source}. However, "

    @functools.cached_property
    def _longest_token(self) -> int:
        """In characters, at least: vocabularies spell bytes as characters."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)
