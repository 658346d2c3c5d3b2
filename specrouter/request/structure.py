"""Structure: what a text must look like, as the caller says it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

StructureKind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "recorded"]


@dataclass(frozen=True, init=False)
class Structure:
    """A form that the whole output has, as long as it ends by itself and not by its length.

    Attributes:
        kind: `json_object`: any JSON object; `json_schema`; `regex`: the whole text matches;
            `choice`: one of some texts; `grammar`: in Lark's notation, as llguidance reads it;
            `recorded`: exactly these token ids, a list, for measurements (`recorded_text`).
            Between two parts of JSON stands nothing, a space, or a newline and up to 16 spaces.
        source: the schema, the expression, the list of texts or of ids, the grammar; nothing for
            `json_object`. A schema and a list are kept as JSON text, and may be given as it.
        around: a grammar of the output, in which `@body` is this form; nothing: it is the whole.
    """

    kind: StructureKind
    source: str
    around: str

    def __init__(
        self,
        kind: StructureKind,
        source: str | Mapping[str, Any] | Sequence[str | int] = "",
        around: str = "",
    ) -> None:
        """Raises `TypeError`, `ValueError` for a schema or a list that JSON cannot hold."""
        if isinstance(source, Mapping | list | tuple):  # anything else is refused with its request
            source = json.dumps(source, allow_nan=False)
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "source", source)
        object.__setattr__(self, "around", around)
