"""Text in a request's body."""

from typing import Annotated

from pydantic import AfterValidator


def _encodable(text: str) -> str:
    """JSON can spell half a surrogate pair; no tokenizer can read one."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half a surrogate pair, which is no character") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]
