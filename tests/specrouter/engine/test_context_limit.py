"""What is certainly too long is refused before it is read."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from specrouter.engine.context_limit import ContextLengthError, ContextLimit

LONGEST = "antidisestablishment"


class Tokenizer:
    """Reads nothing."""

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, LONGEST: 1}


def limit(budget: int | None = None) -> ContextLimit:
    engine: Any = SimpleNamespace(max_request_tokens=100, can_ever_fit=lambda n: n <= 100)
    return ContextLimit(cast(Any, Tokenizer()), budget, lambda: engine)


def test_a_text_is_refused_by_its_characters() -> None:
    most = 100 * len(LONGEST)
    assert limit().max_characters == most
    limit().check_text("prompt", "a" * most)
    known = "This model's maximum context length is 100 tokens. However, the text has"
    with pytest.raises(ContextLengthError, match=known) as refused:
        limit().check_text("messages", "a" * (most + 1))
    assert refused.value.field == "messages"


def test_the_memory_may_allow_less_than_the_model() -> None:
    assert limit(40).max_characters == 40 * len(LONGEST)
    with pytest.raises(ContextLengthError, match=r"is 40 tokens .engine.kv_budget_tokens"):
        limit(40).check_prompt(41)
