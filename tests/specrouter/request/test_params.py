"""Every bad parameter is refused by its field's name, and the defaults are greedy."""

import dataclasses
import math
from typing import Any

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

NAMES = ("small", "middle", "big")


def test_the_defaults_are_greedy_and_bounded() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.0, 0, 1.0, None)
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == ((), (), False)
    assert params.max_new_tokens == 128
    assert (params.min_p, params.repetition_penalty) == (0.0, 1.0)
    assert (params.presence_penalty, params.frequency_penalty) == (0.0, 0.0)
    assert (params.logit_bias, params.bad_words, params.bad_words_ids) == ((), (), ())
    assert (params.min_tokens, params.n, params.logprobs) == (0, 1, None)
    assert params.logits_processors == ()


def test_parameters_cannot_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 1.5),
        ("max_new_tokens", "8"),
        ("max_new_tokens", True),
        ("max_new_tokens", None),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", None),
        ("top_k", -1),
        ("top_k", 2.0),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", -1),
        ("top_p", math.nan),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.0),
        ("seed", True),
        ("stop", ("",)),
        ("stop", ""),
        ("stop", (3,)),
        ("stop", 3),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", ("a",)),
        ("stop_token_ids", (True,)),
        ("shown_special_token_ids", (-1,)),
        ("shown_special_token_ids", 5),
        ("stop_token_ids", 5),
        ("ignore_eos", 1),
        ("ignore_eos", None),
        ("include_stop_str_in_output", 1),
        ("skip_special_tokens", None),
        ("min_p", -0.1),
        ("min_p", 1.01),
        ("min_p", math.nan),
        ("min_p", "0.1"),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", 1e300),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", None),
        ("presence_penalty", -2.1),
        ("presence_penalty", 2.1),
        ("presence_penalty", math.nan),
        ("presence_penalty", True),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", math.inf),
        ("frequency_penalty", "1"),
        ("logit_bias", None),
        ("logit_bias", 5),
        ("logit_bias", "5"),
        ("logit_bias", (5, 6)),
        ("logit_bias", ((5, 1.0, 2.0),)),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1.0: 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {"-1": 1.0}),
        ("logit_bias", {" 1": 1.0}),
        ("logit_bias", {"\u0661": 1.0}),
        ("logit_bias", {"9" * 5000: 1.0}),
        ("logit_bias", {5: 100.5}),
        ("logit_bias", {5: -100.5}),
        ("logit_bias", {5: math.nan}),
        ("logit_bias", {5: -math.inf}),
        ("logit_bias", {5: "1"}),
        ("logit_bias", {5: True}),
        ("logit_bias", {5: 1.0, "5": 2.0}),
        ("logit_bias", {"5": 1.0, "05": 2.0}),
        ("min_tokens", -1),
        ("min_tokens", 129),
        ("min_tokens", 1.0),
        ("min_tokens", None),
        ("bad_words", ("",)),
        ("bad_words", (3,)),
        ("bad_words", 3),
        ("bad_words", ("\ud800",)),
        ("bad_words_ids", 3),
        ("bad_words_ids", "ab"),
        ("bad_words_ids", (3,)),
        ("bad_words_ids", ((),)),
        ("bad_words_ids", ((3, -1),)),
        ("bad_words_ids", ((3, True),)),
        ("bad_words_ids", ((3, 1.0),)),
        ("bad_words_ids", ("ab",)),
        ("n", 0),
        ("n", MAX_SAMPLES + 1),
        ("n", 2.0),
        ("n", True),
        ("n", None),
        ("logprobs", -1),
        ("logprobs", MAX_LOGPROBS + 1),
        ("logprobs", True),
        ("logprobs", 1.0),
        ("logits_processors", 3),
        ("logits_processors", (3,)),
        ("logits_processors", "abc"),
        ("logits_processors", None),
    ],
)
def test_a_bad_value_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert str(caught.value) == f"{field}: {caught.value.reason}"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 1),
        ("temperature", 0),
        ("temperature", 2.5),
        ("top_p", 1),
        ("top_p", 1e-9),
        ("seed", 0),
        ("seed", 2**64 - 1),
        ("min_p", 0),
        ("min_p", 1.0),
        ("repetition_penalty", 0.5),
        ("presence_penalty", -2.0),
        ("frequency_penalty", 2),
        ("min_tokens", 128),
        ("n", 1),
        ("n", MAX_SAMPLES),
        ("logprobs", 0),
        ("logprobs", MAX_LOGPROBS),
    ],
)
def test_the_bounds_themselves_are_allowed(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_lists_become_tuples_and_one_stop_text_stands_for_itself() -> None:
    stop: Any = ["a", "b"]
    assert SamplingParams(stop=stop).stop == ("a", "b")
    one: Any = "end"
    assert SamplingParams(stop=one).stop == ("end",)
    ids: Any = [1, 2]
    assert SamplingParams(stop_token_ids=ids).stop_token_ids == (1, 2)
    banned: Any = [[1, 2], (3,)]
    assert SamplingParams(bad_words_ids=banned).bad_words_ids == ((1, 2), (3,))
    word: Any = "bad"
    assert SamplingParams(bad_words=word).bad_words == ("bad",)


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


def test_several_samples_of_a_greedy_text_are_allowed() -> None:
    assert SamplingParams(n=3, temperature=0.0).n == 3


def test_parameters_can_be_hashed_whatever_their_processors_are() -> None:
    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            return scores

    processors: Any = [Unhashable()]
    params = SamplingParams(logits_processors=processors, logit_bias={1: 2.0})
    assert params.logits_processors == tuple(processors)
    assert hash(params) == hash(SamplingParams(logit_bias={1: 2.0}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chain", ()),
        ("chain", (1, 2)),
        ("chain", 3),
        ("depth", 0),
        ("depth", MAX_DEPTH + 1),
        ("depth", 1.0),
        ("depth", True),
        ("width", 0),
        ("width", MAX_WIDTH + 1),
        ("width", 1.0),
        ("width", True),
    ],
)
def test_a_bad_override_names_its_field(field: str, value: Any) -> None:
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
    ],
)
def test_a_chain_that_is_none_of_the_pool_is_refused(chain: tuple[str, ...], reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        Speculation(chain=chain).check_members(NAMES, "big")
    assert caught.value.field == "speculation.chain"


def test_a_member_without_a_model_can_only_draft() -> None:
    names = ("ngram", *NAMES)
    Speculation(chain=("ngram", "small", "big")).check_members(names, "big", {"ngram"})
    with pytest.raises(RequestError, match="can only stand first") as caught:
        Speculation(chain=("small", "ngram", "big")).check_members(names, "big", {"ngram"})
    assert caught.value.field == "speculation.chain"


@pytest.mark.parametrize("chain", [None, ("big",), ("small", "big"), NAMES])
def test_a_chain_of_the_pool_is_accepted(chain: tuple[str, ...] | None) -> None:
    asked = Speculation(chain=chain)
    asked.check_members(NAMES, "big")
    assert asked.chain == chain
