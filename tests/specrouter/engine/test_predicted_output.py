"""Predicted outputs: the drafter without weights reads them, and outputs stay what they are."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from checks.exact.models import NAMES
from specrouter import ChainRouter, RequestOutput, SamplingParams, Speculation

PROMPT = [17, 230, 41]
NEW = 40


@pytest.fixture(scope="module")
def router(small_config: dict[str, Any]) -> Iterator[ChainRouter]:
    settings = copy.deepcopy(small_config)
    settings["pool"]["models"].append({"name": "ngram", "source": "ngram"})
    with ChainRouter.from_config(settings) as opened:
        yield opened


def output_of(router: ChainRouter, temperature: float, speculation: Any) -> RequestOutput:
    params = SamplingParams(NEW, temperature, seed=3, ignore_eos=True)
    [output] = router.generate([PROMPT], params, speculation)
    return output


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_right_prediction_is_accepted_and_none_changes_the_output(
    router: ChainRouter, temperature: float
) -> None:
    chain = ("ngram", NAMES[-1])
    alone = output_of(router, temperature, "off")
    accepted = {}
    for name, prediction in (
        ("right", alone.token_ids),
        ("right but for its beginning", [5, 6, *alone.token_ids[4:]]),
        ("wrong", alone.token_ids[::-1]),
        ("none", None),
    ):
        speculation = Speculation(chain, depth=8, prediction=prediction)
        output = output_of(router, temperature, speculation)
        assert output.token_ids == alone.token_ids
        accepted[name] = output.metrics.accepted_tokens
        assert accepted[name] <= output.metrics.drafted_tokens
    assert accepted["right"] > NEW * 0.7
    assert accepted["right but for its beginning"] > NEW * 0.5
    assert accepted["none"] < accepted["right"]
