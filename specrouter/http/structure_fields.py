"""Fields that ask for a structure of the text, as OpenAI and vLLM name them.

Contract: at most one form per request. The content of a form, such as a schema, is checked by the
router's grammars; what is not JSON at all is refused here, by the name of its field.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from specrouter.http.tools.tool_use import closed
from specrouter.request.fields import Fields, InnerFields, Text
from specrouter.request.params import RequestError
from specrouter.request.structure import Structure, StructureKind

JsonSchema = dict[str, Any] | Text  # an object, or JSON text
Choices = Annotated[list[Annotated[Text, Field(min_length=1)]], Field(min_length=1)]


class NamedSchema(InnerFields):
    """OpenAI's wrapper of a schema, which is always enforced, strict or not."""

    name: Text | None = None
    """Ignored."""
    description: Text | None = None
    """Ignored."""
    strict: bool | None = None
    """Ignored: the schema is always enforced."""
    json_schema: JsonSchema | None = Field(default=None, alias="schema")
    """JSON schema, as an object or as JSON text."""


class ResponseFormat(InnerFields):
    type: Literal["text", "json_object", "json_schema"]
    """`json_object`: any JSON object; `json_schema`: JSON that fits the schema; `text`: any
    text."""
    json_schema: NamedSchema | None = None
    """Schema of the type `json_schema`."""
    schema_: JsonSchema | None = Field(default=None, alias="schema")
    """Schema of the type `json_object`, as in llama.cpp."""


class StructuredOutputs(InnerFields):
    """Form of the text, as vLLM names it, and options for the layout of JSON."""

    json_: JsonSchema | None = Field(default=None, alias="json")
    """JSON schema, as an object or as JSON text."""
    regex: Text | None = None
    """Regular expression that the whole output matches."""
    choice: Choices | None = None
    """The output is one of these texts."""
    grammar: Text | None = None
    """Grammar in Lark's notation."""
    json_object: bool | None = None
    """`true` for any JSON object."""
    whitespace_pattern: Text | None = None
    """Regular expression of the whitespace between parts of JSON."""
    disable_any_whitespace: bool | None = None
    """Allows no whitespace between parts of JSON."""
    disable_additional_properties: bool | None = None
    """Allows only the named properties in objects that name some, unless the schema allows others,
    or names them in several places, as by `allOf` or `patternProperties`."""

    def forms(self) -> list[tuple[str, Structure]]:
        """Return the given forms with their fields, or raise `RequestError`."""
        given = self.model_dump(by_alias=True)
        found = list(_given("structured_outputs.", ((kind, given[kind]) for kind in _FORMS)))
        if not found:  # a misspelt form must not be answered with free text
            raise RequestError("structured_outputs", f"holds none of the forms {', '.join(_FORMS)}")
        return [(field, self._written(structure)) for field, structure in found]

    def _written(self, structure: Structure) -> Structure:
        """Return the structure with the options for JSON in its schema, as llguidance reads it."""
        pattern = "" if self.disable_any_whitespace else self.whitespace_pattern
        asked = [name for name in _OF_JSON if getattr(self, name) not in (None, False)]
        if not asked:
            return structure
        field = f"structured_outputs.{asked[0]}"
        if structure.kind not in ("json_object", "json_schema"):
            raise RequestError(field, "goes with json and json_object only")
        if self.disable_any_whitespace and self.whitespace_pattern:
            raise RequestError(field, "contradicts disable_any_whitespace")
        schema = json.loads(structure.source or '{"type": "object"}')
        if pattern is not None:
            if "x-guidance" in schema:
                raise RequestError(field, "contradicts x-guidance of the schema")
            schema["x-guidance"] = {"whitespace_pattern": pattern}
        if self.disable_additional_properties:
            try:
                schema = closed(schema)
            except RecursionError:
                raise RequestError(field, "is not for a schema that deep") from None
        return _of_schema(field, schema)


_GUIDED = ("json", "regex", "choice", "grammar")
_FORMS = (*_GUIDED, "json_object")
_OF_JSON = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")


class StructureFields(Fields):
    response_format: ResponseFormat | None = None
    """OpenAI's field for JSON."""
    structured_outputs: StructuredOutputs | None = None
    """vLLM's field for JSON, a regular expression, a choice or a grammar."""
    guided_json: JsonSchema | None = None
    """vLLM's older name of `structured_outputs.json`."""
    guided_regex: Text | None = None
    """vLLM's older name of `structured_outputs.regex`."""
    guided_choice: Choices | None = None
    """vLLM's older name of `structured_outputs.choice`."""
    guided_grammar: Text | None = None
    """vLLM's older name of `structured_outputs.grammar`."""

    @cached_property
    def asked_structure(self) -> tuple[Structure | None, str]:
        """Requested structure, or None, and the name of its field.

        Raises:
            RequestError: names a second field with a form, one that holds no JSON, or
                `structured_outputs` without a form.
        """
        asked = list(self._of_response_format())
        if self.structured_outputs is not None:
            asked += self.structured_outputs.forms()
        asked += _given("guided_", ((kind, getattr(self, f"guided_{kind}")) for kind in _GUIDED))
        if not asked:
            return None, "response_format"
        if len(asked) > 1:
            raise RequestError(asked[1][0], f"give either it or {asked[0][0]}, not both")
        field, structure = asked[0]
        return structure, field

    def _of_response_format(self) -> Iterator[tuple[str, Structure]]:
        form = self.response_format
        if form is None:
            return
        if form.json_schema is not None and form.type != "json_schema":
            raise RequestError("response_format.json_schema", "goes with the type json_schema only")
        field = "response_format.schema"
        if form.schema_ is not None and form.type != "json_object":
            raise RequestError(field, "goes with the type json_object only")
        if form.type == "json_object":
            if form.schema_:
                yield field, _of_schema(field, form.schema_)
            else:
                yield "response_format", Structure("json_object")
        elif form.type == "json_schema":
            field = "response_format.json_schema.schema"
            if form.json_schema is None or form.json_schema.json_schema is None:
                raise RequestError(field, "is missing")
            yield field, _of_schema(field, form.json_schema.json_schema)


def _given(prefix: str, forms: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Structure]]:
    """Yield the forms that were given, with their fields."""
    for kind, form in forms:
        field = prefix + kind
        if kind == "json_object":
            if form:
                yield field, Structure("json_object")
        elif form is not None:
            other = cast(StructureKind, kind)
            yield field, _of_schema(field, form) if kind == "json" else Structure(other, form)


def _of_schema(field: str, schema: JsonSchema) -> Structure:
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(parsed, allow_nan=False, ensure_ascii=False)
    except (ValueError, RecursionError):
        raise RequestError(field, "is no JSON, or too deep") from None
    if not isinstance(parsed, dict):
        raise RequestError(field, "must be an object")
    return Structure("json_schema", text)
