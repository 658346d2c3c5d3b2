"""What of an output is which, as both formats of reasoning have it.

Contract: a format is pure, and has

    tags: in the text; some are special tokens, which texts do not show by themselves.
    calls: the form of calls that its channels read; None: they are part of the content.
    is_taught(template): whether a chat template speaks of it.
    opening(before, goes_on): what the answer begins with in the prompt that ends so; `before` of an
        answer that `goes_on` is what there is of it.
    channels(opening, functions): of an output behind it, which may call these. Their
        `pieces(text, ends)` hang on the text alone, not on how it is cut, and are the text but for
        tags and headers of messages; `field` is that of text that would come now, "name" where
        that would be no text.
    around(opening, ids, calls): the grammar of outputs, in Lark's notation, whose content, or
        calls, are `@body`; `ids` are those of tags that are tokens of their own.
"""

from __future__ import annotations

from typing import Literal

Field = Literal["reasoning", "content", "name", "arguments"]
Piece = tuple[Field, str]
"""A call's name begins it; its arguments follow, and end with the field."""
