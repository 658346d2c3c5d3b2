"""Structure: what a text must look like, as the caller says it."""

from dataclasses import dataclass
from typing import Literal

StructureKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]


@dataclass(frozen=True)
class Structure:
    """A form that the whole output has, as long as it ends by itself and not by its length.

    Attributes:
        kind: `json_object`: any JSON object; `json_schema`; `regex`: the whole text matches;
            `choice`: one of some texts; `grammar`: in Lark's notation, as llguidance reads it.
            Between two parts of JSON stands nothing, a space, or a newline and up to 16 spaces.
        source: the schema as JSON text, the expression, the texts as a JSON list, the grammar;
            nothing for `json_object`.
    """

    kind: StructureKind
    source: str = ""
