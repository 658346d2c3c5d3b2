"""Predicted outputs: the drafter without weights reads them, and outputs stay what they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from specrouter import ChainRouter, Speculation
from test_support.families import NAMES
from tests.specrouter.engine.engines import changed
from tests.specrouter.engine.test_suffix import NEW, output_of


@pytest.fixture(scope="module")
def router(small_config: dict[str, Any]) -> Iterator[ChainRouter]:
    with ChainRouter.from_config(changed(small_config, "ngram")) as opened:
        yield opened


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_right_prediction_is_accepted_and_none_changes_the_output(
    router: ChainRouter, temperature: float
) -> None:
    chain = ("ngram", NAMES[-1])
    alone = output_of(router, "off", temperature)
    accepted = {}
    for name, prediction in (
        ("right", alone.token_ids),
        ("right but for its beginning", [5, 6, *alone.token_ids[4:]]),
        ("wrong", alone.token_ids[::-1]),
        ("none", None),
    ):
        speculation = Speculation(chain, depth=8, prediction=prediction)
        output = output_of(router, speculation, temperature)
        assert output.token_ids == alone.token_ids
        accepted[name] = output.metrics.accepted_tokens
        assert accepted[name] <= output.metrics.drafted_tokens
    assert accepted["right"] > NEW * 0.7
    assert accepted["right but for its beginning"] > NEW * 0.5
    assert accepted["none"] < accepted["right"]
