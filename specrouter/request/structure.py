"""Structure: the form of a text, as the caller states it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:  # PyTorch takes seconds to import
    from processors.grammar import TokenGrammar

StructureKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]


@runtime_checkable
class TextForm(Protocol):
    """The rule of a text, token by token: a compiled structure, or a form of one's own."""

    def start(self) -> "TokenGrammar":
        """Return the state for one row."""

    def check(self, generated: Sequence[int]) -> None:
        """Raise `RequestError` unless it allows a text of these ids."""


@dataclass(frozen=True, init=False)
class Structure:
    """A form of the whole output, if that ends by itself and not by its length.

    Attributes:
        kind: `json_object`: any JSON object; `json_schema`; `regex`: the whole text matches;
            `choice`: one of some texts; `grammar`: in Lark's notation, as llguidance reads it.
            Between two parts of JSON stands nothing, a space, or a newline and up to 16 spaces.
        source: the schema, the expression, the list of texts, the grammar; empty for `json_object`.
            A schema and a list are kept as JSON text, and may be given so.
        around: a grammar of the output, in which `@body` is this form; empty: the form is the
            whole.
        open_ended: where it is complete and may go on, it does so only if the model chooses to: any
            id may follow, and after one that does not continue the form only the end may follow.
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
        """Set the fields; a schema or a list becomes JSON text.

        Raises `TypeError` or `ValueError` for one that JSON cannot hold.
        """
        if isinstance(source, Mapping | list | tuple):  # anything else is refused with its request
            source = json.dumps(source, allow_nan=False)
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "source", source)
        object.__setattr__(self, "around", around)
        object.__setattr__(self, "open_ended", open_ended)
