"""Stages as a request or a configuration gives them: an end may be the text of a token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from specrouter.request.objective import Stage
from specrouter.request.params import RequestError

if TYPE_CHECKING:  # configurations are checked before what takes seconds to import
    from transformers import PreTrainedTokenizerBase

# Of the field that gave the text, and the text. Raises `RequestError` for that field.
TokenIdOf = Callable[[str, str], int]

_SHOWN = 40  # characters of a text, in a refusal


def stages_of(
    given: Iterable[tuple[float, int | None, int | str | None]], token_id_of: TokenIdOf
) -> tuple[Stage, ...]:
    """Of the fields of each `Stage`, whose `until_token` may be a text such as `</think>`.

    Raises `RequestError`: names the `until_token` that is no single token.
    """
    stages = []
    for place, (tpot_ms, until_tokens, until) in enumerate(given):
        if isinstance(until, str):
            until = token_id_of(f"slo.stages[{place}].until_token", until)
        stages.append(Stage(tpot_ms, until_tokens, until))
    return tuple(stages)


def check_vocabulary(stages: Sequence[Stage], vocabulary: int) -> None:
    """Raises `RequestError` for an end that is none of so many token ids."""
    for place, stage in enumerate(stages):
        if stage.until_token is not None and stage.until_token >= vocabulary:
            field = f"slo.stages[{place}].until_token"
            raise RequestError(field, f"must be below {vocabulary}, not {stage.until_token}")


def single_token(tokenizer: PreTrainedTokenizerBase) -> TokenIdOf:
    """What reads a text that must be one token of the vocabulary."""

    def token_id_of(field: str, text: str) -> int:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        shown = repr(text[:_SHOWN])
        if len(ids) != 1:
            raise RequestError(field, f"{shown} is {len(ids)} tokens, and must be a single one")
        token = int(ids[0])
        # A tokenizer has one id for all that it does not know. Some drop the space of a word.
        known = tokenizer.decode([token], clean_up_tokenization_spaces=False)
        assert isinstance(known, str)  # a list only for several sequences
        if known.strip() != text.strip():
            raise RequestError(field, f"the tokenizer does not know {shown}")
        return token

    return token_id_of
