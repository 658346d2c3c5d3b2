"""Receipts: they hold all that a text depends on, and say where two texts differ."""

from typing import Any

import numpy as np
import pytest
from transformers import TopKLogitsWarper

from specrouter import SamplingParams
from specrouter.request.params import RequestError
from specrouter.request.receipt import Receipt, ServedModel, first_difference, receipt_of
from specrouter.request.spec import RequestSpec
from specrouter.request.structure import Structure

SERVED = ServedModel(specrouter="1", source="m", settings={}, files={}, arithmetic=("float32",))


def receipt(
    tokens: tuple[int, ...] = (5, 6), logits: tuple[float, ...] = (1.5, 2.5), **params: Any
) -> Receipt:
    asked = SamplingParams(**params)
    spec = RequestSpec(
        token_ids=(1, 2), generated=(), params=asked, speculation=None, seed=9, sample=1
    )
    return receipt_of(SERVED, spec, tokens, logits, "length")


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7, "top_k": 4, "top_p": 0.5, "min_p": 0.1, "max_new_tokens": 7},
        {"stop": ("a", "b"), "stop_token_ids": (3,), "ignore_eos": True, "min_tokens": 2},
        {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -1.0},
        {"logit_bias": {"7": -3.0, "9": 2}, "bad_words": ("x",), "bad_words_ids": ((1, 2), (3,))},
        {"structure": Structure("json_schema", {"type": "object"})},
        {"skip_special_tokens": False, "shown_special_token_ids": (3,)},
    ],
    ids=["greedy", "sampled", "ends", "penalties", "words", "structure", "shown"],
)
def test_parameters_come_back_through_json(params: dict[str, Any]) -> None:
    made = receipt(**params).model_dump_json()
    again = Receipt.read(made)
    assert again.model_dump_json() == made
    assert again.sampling() == SamplingParams(**params, seed=9, receipt=True)


def test_it_keeps_what_texts_do_not_depend_on_to_itself() -> None:
    assert receipt(n=3, prefix_cache=False, cache_salt="secret", logprobs=2).params == {}


def test_a_callers_own_code_fits_no_receipt() -> None:
    with pytest.raises(RequestError, match="receipt"):
        SamplingParams(receipt=True, logits_processors=(TopKLogitsWarper(3),))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (receipt(), None),
        (receipt((5, 7)), "token 1 is 7, and was 6"),
        (receipt((5,), (1.5,)), "there are 1 tokens, and were 2"),
        (
            receipt(logits=(1.5, float(np.nextafter(np.float32(2.5), np.float32(3))))),
            "the tokens are equal; the bits of logit 1 (of 2) are not",
        ),
    ],
    ids=["equal", "token", "count", "bit"],
)
def test_a_difference_is_told_by_its_place(other: Receipt, said: str | None) -> None:
    assert first_difference(receipt(), other) == said
