"""The grammar of an answer that is nothing but calls.

Contract: calls have the format of the model's own family, which the model has learned and
`CallReader` parses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from specrouter.http.reasoning.harmony import Harmony
from specrouter.http.reasoning.tags import lark
from specrouter.http.tools.formats import ToolFormat
from specrouter.http.tools.tool_use import Function, ToolUse
from specrouter.request.grammar import WHITE_SPACE, without_own_formats
from specrouter.request.params import RequestError
from specrouter.request.structure import Structure

Check = Callable[[Structure], None]  # raises `RequestError` for what cannot be compiled


def forced_calls(
    use: ToolUse, form: ToolFormat | Harmony, check: Check, ids: Mapping[str, int], around: str = ""
) -> Structure:
    """Return a structure of one call, or up to `use.max_calls` if the model goes on by itself.

    Args:
        use: the functions, and the limit of calls.
        form: the format of calls.
        check: compiles a structure.
        ids: those of tags that are single tokens.
        around: see `Structure`.

    Raises:
        RequestError: names the function whose schema cannot be compiled, or `tools`.
    """
    try:
        is_open = use.max_calls != 1
        structure = Structure("grammar", _grammar(use, form, ids), around, open_ended=is_open)
        check(structure)
    except RequestError as error:
        for function in use.functions:
            _check_alone(function, check)
        raise error.at("tools", error.reason) from error
    return structure


def _check_alone(function: Function, check: Check) -> None:
    try:
        check(Structure("json_schema", _json(function, function.schema)))
    except RequestError as error:
        raise error.at(f"{function.place}.parameters", error.reason) from error


def _grammar(use: ToolUse, form: ToolFormat | Harmony, ids: Mapping[str, int]) -> str:
    """Return the grammar of the calls in Lark's notation, as llguidance reads it."""
    more = (use.max_calls or 1) - 1
    separator = lark(form.separator, {})
    rules = ["start: call"]
    if more:
        rules[0] += f" ({separator} call){{0,{more}}}"
    if more and separator:  # text other than a call may follow it
        rules[0] += f" ({separator})?"
    alternatives = []
    for number, function in enumerate(use.functions):
        head, tail = lark(form.head(function.name), ids), lark(form.tail, ids)
        alternatives.append(f"{head} arguments_{number} {tail}")
        options = {"x-guidance": {"whitespace_pattern": WHITE_SPACE}}
        rules.append(f"arguments_{number}: %json {_json(function, {**function.schema, **options})}")
    rules.insert(1, f"call: {' | '.join(alternatives)}")
    return "\n".join(rules)


def _json(function: Function, schema: object) -> str:
    try:
        return json.dumps(without_own_formats(schema), allow_nan=False, ensure_ascii=False)
    except (ValueError, RecursionError):
        raise RequestError(f"{function.place}.parameters", "is no JSON, or too deep") from None
