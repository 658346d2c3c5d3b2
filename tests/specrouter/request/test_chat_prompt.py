"""A conversation becomes the same prompt from Python as over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from modelpool.checkpoint.bundled import bundled_root
from specrouter import ChainRouter, RequestError, SamplingParams
from specrouter.http.openai_fields import ChatRequest
from specrouter.request.chat_template import ChatTemplate

MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Add 2 and 3."}]
IN_PARTS = [
    {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]},
    {"role": "user", "content": "Add 2 and 3."},
]
OWN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(bundled_root() / "tiny-8m")
    return found


@pytest.mark.parametrize("messages", [MESSAGES, IN_PARTS])
@pytest.mark.parametrize("template", [None, OWN])
def test_the_prompt_is_that_of_the_service(
    template: str | None, messages: list[Any], tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenizer.chat_template = template
    made = ChatTemplate(tokenizer, None)
    asked = ChatRequest.model_validate({"messages": MESSAGES})
    assert made.prompt(messages) == made.token_ids(asked, False, lambda text: None)


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ([{"role": "user"}], "messages[0].content"),
        (["text"], "messages[0]"),
        ([*MESSAGES, {"role": "me", "content": "a"}], "messages[2].role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
    ],
)
def test_what_the_template_cannot_take_is_refused_by_its_place(
    messages: list[Any], field: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(RequestError) as refused:
        ChatTemplate(tokenizer, None).prompt(messages)
    assert refused.value.field == field


def test_a_program_has_the_template_of_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content }}", encoding="utf-8")
    model = {"name": "a", "source": "bundled:tiny-1m"}
    settings = {
        "pool": {"target": "a", "models": [model]},
        "server": {"chat_template": str(file)},
    }
    with ChainRouter.from_config(settings) as router:
        asked = [{"role": "user", "content": "def f"}]
        greedy = SamplingParams(max_new_tokens=4)
        [alone] = router.generate("def f", greedy)
        assert router.chat(asked, greedy).token_ids == alone.token_ids
