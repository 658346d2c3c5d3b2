"""Every bad parameter is refused by its field's name, and the defaults are greedy."""

import dataclasses
import math
from typing import Any

import pytest

from specrouter.params import MAX_DEPTH, RequestError, SamplingParams, Speculation

NAMES = ("small", "middle", "big")


def test_the_defaults_are_greedy_and_bounded() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.0, 0, 1.0, None)
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == ((), (), False)
    assert params.max_new_tokens == 128


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
        ("stop_token_ids", 5),
        ("ignore_eos", 1),
        ("ignore_eos", None),
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
    ],
)
def test_a_bad_override_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        Speculation(**{field: value})
    assert caught.value.field == f"speculation.{field}"


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


@pytest.mark.parametrize("chain", [None, ("big",), ("small", "big"), NAMES])
def test_a_chain_of_the_pool_is_accepted(chain: tuple[str, ...] | None) -> None:
    Speculation(chain=chain).check_members(NAMES, "big")
