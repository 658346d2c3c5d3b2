"""Formats by their chat templates, in the words that stand in the families' own."""

from __future__ import annotations

import pytest

from specrouter.http.tools.formats import HERMES, LLAMA3_JSON, ToolFormat, format_of

QWEN = 'return a json object within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": '
QWEN_CODER = "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>"
GLM = "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>"
LLAMA_31 = "{{- '<|python_tag|>' + tool_call.name + '.call(' }}"
LLAMA_32 = '{{- "Environment: ipython\\n" }}'


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (QWEN, HERMES),
        (LLAMA_31, LLAMA3_JSON),
        (LLAMA_32, LLAMA3_JSON),
        (QWEN_CODER, None),
        (GLM, None),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", None),
    ],
)
def test_a_template_tells_how_calls_are_written(template: str, found: ToolFormat | None) -> None:
    assert format_of(template) == found
