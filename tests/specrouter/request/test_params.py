"""Every bad parameter is refused by its field's name, and the defaults are greedy."""

import dataclasses
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specrouter.request.params import (
    MAX_DEPTH,
    MAX_LOGPROBS,
    MAX_SAMPLES,
    MAX_TREE_TOKENS,
    MAX_WIDTH,
    RequestError,
    SamplingParams,
    Speculation,
)

NAMES = ("ngram", "small", "middle", "big")


BAD_VALUES: dict[str, list[Any]] = {
    "max_new_tokens": [0, 1.5, "8", True, None],
    "temperature": [-0.1, math.nan, math.inf, "hot", None],
    "top_k": [-1, 2.0],
    "top_p": [0.0, 1.01, -1, math.nan],
    "seed": [-1, 2**64, 1.0, True],
    "stop": [("",), "", (3,), 3],
    "stop_token_ids": [(-1,), ("a",), (True,), 5],
    "shown_special_token_ids": [(-1,), 5],
    "ignore_eos": [1, None],
    "include_stop_str_in_output": [1],
    "skip_special_tokens": [None],
    "min_p": [-0.1, 1.01, math.nan, "0.1"],
    "repetition_penalty": [0.0, -1.0, 1e-300, 1e300, math.inf, None],
    "presence_penalty": [-2.1, 2.1, math.nan, True],
    "frequency_penalty": [-2.1, 2.1, math.inf, "1"],
    "logit_bias": [
        None,
        5,
        "5",
        (5, 6),
        ((5, 1.0, 2.0),),
        {-1: 1.0},
        {1.0: 1.0},
        {True: 1.0},
        {" 1": 1.0},
        {"\u0661": 1.0},
        {"9" * 5000: 1.0},
        {5: 100.5},
        {5: math.nan},
        {5: "1"},
        {5: True},
        {"5": 1.0, "05": 2.0},
    ],
    "min_tokens": [-1, 129, 1.0, None],
    "bad_words": [("",), (3,), 3, ("\ud800",)],
    "bad_words_ids": [3, "ab", (3,), ((),), ((3, -1),), ((3, True),), ((3, 1.0),), ("ab",)],
    "n": [0, MAX_SAMPLES + 1, 2.0, True, None],
    "logprobs": [-1, MAX_LOGPROBS + 1, True, 1.0],
    "logits_processors": [3, (3,), "abc", None],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field in BAD_VALUES for value in BAD_VALUES[field]]
)
def test_a_bad_value_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert str(caught.value) == f"{field}: {caught.value.reason}"


@pytest.mark.parametrize(
    "given",
    [{7: -100, 2: 1.5}, {"7": -100, "2": 1.5}, [(7, -100), ("2", 1.5)], [[7, -100.0], [2, 1.5]]],
)
def test_biases_become_pairs_by_rising_id(given: Any) -> None:
    params = SamplingParams(logit_bias=given)
    assert params.logit_bias == ((2, 1.5), (7, -100.0))
    assert dataclasses.replace(params, n=2).logit_bias == params.logit_bias


def test_min_tokens_may_not_exceed_what_is_asked_for() -> None:
    with pytest.raises(RequestError, match="max_new_tokens, which is 4") as caught:
        SamplingParams(max_new_tokens=4, min_tokens=5)
    assert caught.value.field == "min_tokens"


BAD_OVERRIDES: dict[str, list[Any]] = {
    "chain": [(), (1, 2), 3],
    "depth": [0, MAX_DEPTH + 1, 1.0, True],
    "width": [0, MAX_WIDTH + 1, 1.0, True],
}


@pytest.mark.parametrize("field", BAD_OVERRIDES)
def test_a_bad_override_names_its_field(field: str) -> None:
    for value in BAD_OVERRIDES[field]:
        with pytest.raises(RequestError) as caught:
            Speculation(**{field: value})
        assert caught.value.field == f"speculation.{field}"


def test_a_tree_has_a_largest_size() -> None:
    depth = MAX_TREE_TOKENS // MAX_WIDTH
    assert Speculation(depth=depth, width=MAX_WIDTH).width == MAX_WIDTH
    assert Speculation(depth=MAX_DEPTH).width is None
    assert Speculation(width=MAX_WIDTH).depth is None
    with pytest.raises(RequestError, match=str(MAX_TREE_TOKENS)) as caught:
        Speculation(depth=depth + 1, width=MAX_WIDTH)
    assert caught.value.field == "speculation.width"


@pytest.mark.parametrize(
    ("chain", "reason"),
    [
        (("tiny", "big"), "'tiny' is not in the pool"),
        (("small", "middle"), "must end in the target 'big'"),
        (("small", "small", "big"), "twice"),
        (("small", "ngram", "big"), "can only stand first"),
    ],
)
def test_a_chain_that_is_none_of_the_pool_is_refused(chain: tuple[str, ...], reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        Speculation(chain=chain).check_members(NAMES, "big", {"ngram"})
    assert caught.value.field == "speculation.chain"


def test_max_tokens_is_another_name_of_max_new_tokens() -> None:
    assert SamplingParams(max_tokens=7) == SamplingParams(max_new_tokens=7)
    assert replace(SamplingParams(max_tokens=7), seed=1).max_new_tokens == 7
    wrong: list[dict[str, Any]] = [{"max_tokens": 0}, {"max_tokens": 7, "max_new_tokens": 8}]
    for given in wrong:
        with pytest.raises(RequestError) as refused:
            SamplingParams(**given)
        assert refused.value.field == "max_tokens"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", np.True_), ("logit_bias", {5: np.True_}), ("seed", 10**5000),
        ("stop", [10**5000]),
    ],
    ids=["number", "bias", "too long", "too long in a list"],
)  # fmt: skip
def test_what_numbers_of_python_can_be_is_refused_by_its_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
