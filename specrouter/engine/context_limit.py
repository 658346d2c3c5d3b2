"""The maximum length of a request, and the refusal of longer ones.

Contract: a prompt that is certainly too long is refused before it is read: a text by its number of
characters before it is tokenized, a list of ids before its elements are checked. Messages have the
wording of OpenAI's, by which LiteLLM and others recognise that a conversation must be cut.
"""

import functools
from collections.abc import Callable
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from specrouter.request.params import RequestError


class ContextLimits(Protocol):
    """Limits and speed that requests are checked against, of one engine or of all replicas."""

    @property
    def max_request_tokens(self) -> int: ...

    def can_ever_fit(self, tokens: int) -> bool: ...

    def baseline_tpot_ms(self) -> float: ...

    def predicted_prefill_ms(self) -> float: ...


class ContextLengthError(RequestError):
    """Error for a request with more tokens than the limit."""


class ContextLimit:
    """Length checks against the limits of the running engine.

    Args:
        kv_tokens: most tokens of a request by the KV memory that `field` of the configuration
            sets; None: no such limit.
        engine: returns the engine that runs now.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        kv_tokens: int | None,
        engine: Callable[[], ContextLimits],
        field: str = "engine.kv_budget_tokens",
    ) -> None:
        self._tokenizer = tokenizer
        self._kv_tokens = kv_tokens
        self._field = field
        self._engine = engine

    @property
    def max_tokens(self) -> int:
        """Most tokens of a request, prompt and output together."""
        limit, budget = self._engine().max_request_tokens, self._kv_tokens
        return limit if budget is None else min(limit, budget)

    @property
    def max_characters(self) -> int:
        """Most characters of a prompt's text: `max_tokens` times the longest token.

        A longer text is refused even if its tokenizer drops characters (white space at the ends,
        for example) and would make few enough tokens of it.
        """
        return self.max_tokens * self._longest_token

    def check_text(self, field: str, text: str) -> None:
        """Raise `ContextLengthError` for a text that is too long to be tokenized cheaply."""
        if len(text) > self.max_characters:
            reason = f"the text has {len(text)} characters: at most {self.max_characters} can fit"
            raise ContextLengthError(field, self._words() + reason)

    def check_prompt(self, tokens: int) -> None:
        """Check a prompt's number of tokens; raise `ContextLengthError` if it is too long."""
        if tokens > self.max_tokens:
            self._refuse(tokens)

    def check_request(self, prompt_tokens: int, new_tokens: int) -> None:
        """Raise `ContextLengthError` unless prompt and new tokens together can ever be served."""
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
        """Upper bound of a token's characters, because vocabularies spell bytes as characters."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)
