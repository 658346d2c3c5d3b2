"""SloFields: an objective as in bodies and configuration files, before it is an `SLO`.

Contract: types and ranges are checked here, so that schemas show them; the rest by `SLO`. The text
of a token is looked up in a tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from specrouter.request.fields import OwnFields, Positive, Text, TokenId, Tokens
from specrouter.request.objective import QUANTITIES, SLO, OnUnattainable, Stage
from specrouter.request.params import RequestError

if TYPE_CHECKING:  # takes seconds to import, and configurations need none of it
    from transformers import PreTrainedTokenizerBase

MAX_STAGES = 64
MAX_TOKEN_CHARACTERS = 256
_SHOWN = 40  # characters of a text, in a refusal

# Maps a field and the text of a token in it to the id. Raises `RequestError` for that field.
TokenIdOf = Callable[[str, str], int]


class StageFields(OwnFields):
    """A part of the output with a TPOT of its own.

    The last ends with the output; all others state where they end.
    """

    tpot_ms: Positive
    """Mean time of its output tokens, in milliseconds; the first token of the output excluded."""
    until_tokens: Tokens | None = None
    """Number of tokens of this part."""
    until_token: TokenId | Annotated[Text, Field(max_length=MAX_TOKEN_CHARACTERS)] | None = None
    """It ends with this token: an id, or the text of a single token, such as `</think>`."""


class SloFields(OwnFields):
    """An objective by value; null values are not asked for."""

    tpot_ms: Positive | None = None
    """Mean time of an output token after the first, in milliseconds."""
    ttft_ms: Positive | None = None
    """Time from submission to the first token, in milliseconds."""
    e2e_ms: Positive | None = None
    """Time from submission to the last token, in milliseconds."""
    tpot_ratio: Positive | None = None
    """`tpot_ms` as a multiple of what a token takes when the target serves one request alone;
    excludes `tpot_ms`."""
    stages: Annotated[list[StageFields], Field(min_length=1, max_length=MAX_STAGES)] | None = None
    """Parts of the output in order, such as thinking and answer; excludes `tpot_ms` and
    `tpot_ratio`."""
    on_unattainable: OnUnattainable | None = None
    """Behaviour if the objective cannot be attained: `reject` answers 503 with an objective that
    can; `best_effort`, the default, serves the request without one."""

    @property
    def is_empty(self) -> bool:
        """True if it sets at most `on_unattainable`, for an objective from another source."""
        return all(getattr(self, name) is None for name in (*QUANTITIES, "stages"))

    def slo(self, token_id_of: TokenIdOf) -> SLO:
        """Return the SLO. Raises `RequestError`, also if an `until_token` is no single token."""
        stages = []
        for place, one in enumerate(self.stages or ()):
            until = one.until_token
            if isinstance(until, str):
                until = token_id_of(f"slo.stages[{place}].until_token", until)
            stages.append(Stage(one.tpot_ms, one.until_tokens, until))
        return SLO(
            **{name: getattr(self, name) for name in QUANTITIES},
            stages=tuple(stages),
            on_unattainable=self.on_unattainable or "best_effort",
        )


def single_token(tokenizer: PreTrainedTokenizerBase) -> TokenIdOf:
    """Return a function that reads a text which must be one token of the vocabulary."""

    def token_id_of(field: str, text: str) -> int:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        shown = repr(text[:_SHOWN])
        if len(ids) != 1:
            raise RequestError(field, f"{shown} is {len(ids)} tokens, and must be a single one")
        token = int(ids[0])
        # A tokenizer has one id for all unknown texts. Some drop the space of a word.
        known = tokenizer.decode([token], clean_up_tokenization_spaces=False)
        assert isinstance(known, str)  # a list only for several sequences
        if known.strip() != text.strip():
            raise RequestError(field, f"the tokenizer does not know {shown}")
        return token

    return token_id_of
