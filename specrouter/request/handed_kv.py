"""HandedKV: keys and values that were read elsewhere, for the row that goes on from them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # PyTorch takes seconds to import
    from statemgr import RowKV


class HandedKV:
    """They are taken once: they are large, and must not be kept for as long as their request.

    Attributes:
        is_checked: what does not fit the request has been left out.
    """

    def __init__(self, parts: "Sequence[RowKV]") -> None:
        """`parts`: in the order of their positions."""
        self.parts = list(parts)
        self.is_checked = False

    @property
    def tokens(self) -> int:
        """That they are of, at most; 0 where they have been taken."""
        return max((part.stop for part in self.parts), default=0)

    def take(self) -> "list[RowKV]":
        parts, self.parts = self.parts, []
        return parts
