"""A conversation becomes the same prompt from Python as over HTTP."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from modelpool.checkpoint.bundled import bundled_root
from specrouter import RequestError
from specrouter.http.chat_template import ChatTemplate
from specrouter.http.openai_fields import ChatRequest
from specrouter.request.chat_prompt import chat_prompt

MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Add 2 and 3."}]
OWN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(bundled_root() / "tiny-8m")
    return found


@pytest.mark.parametrize("template", [None, OWN])
def test_the_prompt_is_that_of_the_service(
    template: str | None, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenizer.chat_template = template
    asked = ChatRequest.model_validate({"messages": MESSAGES})
    served = ChatTemplate(tokenizer, None).token_ids(asked, False, lambda text: None)
    assert chat_prompt(tokenizer, MESSAGES) == served


@pytest.mark.parametrize("messages", [[], [{"role": "user"}], ["text"]])
def test_what_the_template_cannot_take_is_refused(
    messages: list[Any], tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenizer.chat_template = "{{ messages[0].content + '' }}"
    with pytest.raises(RequestError) as refused:
        chat_prompt(tokenizer, messages)
    assert refused.value.field == "messages"
