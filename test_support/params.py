"""Parameters of the requests that a check serves: every two of its options meet, and do not.

Contract: six consecutive indices have every pair of options in all four combinations, and `COUNT`
of them each option at each temperature. Ids are below the smallest vocabulary of the tests, and
some are among the frequent ones of the bundled tokenizer.
"""

import itertools
from typing import Any

from torch import Tensor

from specrouter import SamplingParams, Structure
from test_support.structures import STRUCTURES

TEMPERATURES = (0.7, 1.0, 1.3)
_ROWS = 6
COUNT = _ROWS * len(TEMPERATURES)
_FREQUENT = (12, 14, 199, 221, 270, 293, 298, 300)
_STRUCTURED = 4  # one out of so many requests
_MEMORY = 4  # tokens that `discourage_repeats` looks back


def discourage_repeats(input_ids: Tensor, scores: Tensor) -> Tensor:
    """A logits processor: what was just said, and its neighbours by id, are less likely.

    Pure, and unlike the built-in penalties it depends on where a token stands.
    """
    recent = input_ids[:, -_MEMORY:]
    penalties = scores.new_tensor(range(1, recent.shape[1] + 1)).expand_as(recent)
    lowered = scores.scatter_add(1, recent, -penalties)
    return lowered.scatter_add(1, (recent + 1) % scores.shape[1], -0.5 * penalties)


def greedy_params(index: int, new_tokens: int) -> SamplingParams:
    """The parameters of the request with this index: plain ones, and all edits in turn."""
    form, (turn, is_edited) = structure(index), divmod(number_among_plain(index), 2)
    return SamplingParams(
        max_new_tokens=new_tokens,
        ignore_eos=turn % 2 == 1,
        structure=form,
        **(edits(turn, new_tokens) if is_edited and form is None else {}),
    )


def seeded_params(index: int, new_tokens: int) -> SamplingParams:
    """The parameters of the request with this index: all settings in turn, each its own seed."""
    form, turn = structure(index), number_among_plain(index)
    return SamplingParams(
        max_new_tokens=new_tokens,
        seed=1000 + index,
        ignore_eos=turn // COUNT % 2 == 1,
        structure=form,
        **warpers(turn),
        **(edits(turn, new_tokens) if form is None else {}),
    )


def warpers(index: int) -> dict[str, Any]:
    """The options that cut, each on or off, and the temperature."""
    chosen = _chosen(index) & {"top_k", "top_p", "min_p"}
    values = {"top_k": 40, "top_p": 0.9, "min_p": 0.02}
    temperature = TEMPERATURES[(index + index // _ROWS) % len(TEMPERATURES)]
    return {"temperature": temperature} | {name: values[name] for name in chosen}


def edits(index: int, new_tokens: int) -> dict[str, Any]:
    """The options that change the logits themselves, with values of this request's own.

    With `min_tokens` come ids that would soon end the text.
    """
    shift = index % 7
    values: dict[str, dict[str, Any]] = {
        "repetition_penalty": {"repetition_penalty": 1.1 + 0.05 * shift},
        "presence_penalty": {"presence_penalty": (-0.5, 0.7)[index % 2]},
        "frequency_penalty": {"frequency_penalty": (0.4, -0.2)[index % 2]},
        "logit_bias": {"logit_bias": {token + shift: 2.0 - shift for token in _FREQUENT}},
        "min_tokens": {
            "min_tokens": max(1, new_tokens // 2),
            "stop_token_ids": tuple(range(10 + shift, 320, 9)),
        },
        "bad_words_ids": {"bad_words_ids": _bad_words(shift)},
        "logits_processors": {"logits_processors": (discourage_repeats,)},
    }
    chosen = [name for name in values if name in _chosen(index)]
    return {key: value for name in chosen for key, value in values[name].items()}


def structure(index: int) -> Structure | None:
    """Of the request with this index: every fourth has one, all kinds in turn.

    Those have no edits, which might leave it nothing to go on with.
    """
    turn, place = divmod(index, _STRUCTURED)
    return STRUCTURES[turn % len(STRUCTURES)] if place == _STRUCTURED - 1 else None


def number_among_plain(index: int) -> int:
    """Of a request without a structure."""
    return index - index // _STRUCTURED


def _bad_words(shift: int) -> tuple[tuple[int, ...], ...]:
    """Some single tokens, and what may not follow the frequent ones."""
    single = [(token,) for token in range(11 + shift, 320, 13)]
    return (*single, *itertools.product(_FREQUENT, range(200 + shift, 320, 6)))


_OPTIONS = (
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
    "bad_words_ids",
    "logits_processors",
)
# Two sets of 3 of 5 rows always meet, each has a row that the other lacks, and row 0 has none.
_ROWS_OF = dict(zip(_OPTIONS, itertools.combinations(range(1, _ROWS), 3), strict=True))


def _chosen(index: int) -> set[str]:
    """The options that are on for the request with this index."""
    return {option for option, rows in _ROWS_OF.items() if index % _ROWS in rows}
