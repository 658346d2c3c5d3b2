"""Structure: what a text must look like, as the caller says it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:  # PyTorch takes seconds to import
    from processors.grammar import TokenGrammar

StructureKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]


@runtime_checkable
class TextForm(Protocol):
    """What a text goes by, token by token: a compiled structure, or a form of one's own."""

    def start(self) -> "TokenGrammar":
        """For one row."""

    def check(self, generated: Sequence[int]) -> None:
        """Raises `RequestError` unless it allows a text of these ids."""


@dataclass(frozen=True, init=False)
class Structure:
    """A form that the whole output has, as long as it ends by itself and not by its length.

    Attributes:
        kind: `json_object`: any JSON object; `json_schema`; `regex`: the whole text matches;
            `choice`: one of some texts; `grammar`: in Lark's notation, as llguidance reads it;
            Between two parts of JSON stands nothing, a space, or a newline and up to 16 spaces.
        source: the schema, the expression, the list of texts, the grammar; nothing for
            `json_object`. A schema and a list are kept as JSON text, and may be given as it.
        around: a grammar of the output, in which `@body` is this form; nothing: it is the whole.
        open_ended: where it is complete and may go on, it does so only if the model says so by
            itself: any id may follow, and one that the form does not go on with is its last but the
            end.
    """

    kind: StructureKind
    source: str
    around: str
    open_ended: bool

    def __init__(
        self,
        kind: StructureKind,
        source: str | Mapping[str, Any] | Sequence[str] = "",
        around: str = "",
        open_ended: bool = False,
    ) -> None:
        """Raises `TypeError`, `ValueError` for a schema or a list that JSON cannot hold."""
        if isinstance(source, Mapping | list | tuple):  # anything else is refused with its request
            source = json.dumps(source, allow_nan=False)
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "source", source)
        object.__setattr__(self, "around", around)
        object.__setattr__(self, "open_ended", open_ended)
