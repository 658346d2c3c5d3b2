"""What vLLM's clients ask of JSON beside its schema is what the grammar allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specrouter import RequestError
from specrouter.http.structure_fields import StructureFields
from specrouter.request.grammar import GrammarCompiler
from test_support.factories import make_tokenizer

NUMBER = {"type": "integer"}
PAIR = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a"]}
ANY = {"properties": {"properties": PAIR}, "additionalProperties": True}
TEXTS = ('{"a":1,"b":2}', '{"a": 1, "b": 2}', '{"a":\t1}', '{"a":1,"c":3}')
SPREAD = {
    "allOf": [{"properties": {"a": NUMBER}, "required": ["a"]}, {"properties": {"b": NUMBER}}]
}
WITHIN = ('{"properties":{"a":1},"c":3}', '{"properties":{"a":1,"c":3}}')


@pytest.mark.parametrize(
    ("asked", "texts", "allowed"),
    [
        ({"json": PAIR}, TEXTS, (True, True, False, True)),
        ({"json": PAIR, "disable_any_whitespace": True}, TEXTS, (True, False, False, True)),
        ({"json": PAIR, "whitespace_pattern": "\t"}, TEXTS, (True, False, True, True)),
        ({"json": PAIR, "disable_additional_properties": True}, TEXTS, (True, True, False, False)),
        ({"json_object": True, "disable_any_whitespace": True}, TEXTS, (True, False, False, True)),
        ({"json_object": True, "disable_additional_properties": True}, TEXTS[3:], (True,)),
        ({"json": ANY, "disable_additional_properties": True}, WITHIN, (True, False)),
        ({"json": SPREAD, "disable_additional_properties": True}, TEXTS[:1], (True,)),
        ({"json": {**PAIR, "x-guidance": {"whitespace_pattern": "\t"}}}, TEXTS[1:3], (False, True)),
    ],
)
def test_how_json_is_written_can_be_asked_for(
    asked: dict[str, Any], texts: tuple[str, ...], allowed: tuple[bool, ...], tmp_path: Path
) -> None:
    body = StructureFields.model_validate({"structured_outputs": asked})
    structure, _ = body.asked_structure
    assert structure is not None
    tokenizer = make_tokenizer(tmp_path)
    compiled = GrammarCompiler(tokenizer, len(tokenizer), [0]).compile(structure)

    def is_allowed(text: str) -> bool:
        try:
            compiled.check(tokenizer(text)["input_ids"])
        except RequestError:
            return False
        return True

    assert tuple(map(is_allowed, texts)) == allowed
