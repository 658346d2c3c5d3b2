"""The suffix drafter: outputs stay what they are, and earlier ones are quoted by their tenant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from specrouter import ChainRouter, RequestOutput, SamplingParams, Speculation
from specrouter.request.spec import SpeculationOverride
from test_support.even_machine import even_machine
from test_support.families import NAMES
from tests.specrouter.engine.engines import changed

PROMPT = [17, 230, 41, 5, 88, 131]
NEW = 60
PAIR = ("suffix", NAMES[-1])
QUOTING = Speculation(PAIR, depth=20)


@pytest.fixture
def router(small_config: dict[str, Any]) -> Iterator[ChainRouter]:
    with ChainRouter.from_config(changed(small_config, "suffix")) as opened:
        yield opened


def output_of(
    router: ChainRouter,
    speculation: SpeculationOverride,
    temperature: float = 1.0,
    tenant: str | None = None,
    seed: int = 3,
) -> RequestOutput:
    params = SamplingParams(
        max_new_tokens=NEW, temperature=temperature, seed=seed, ignore_eos=True, cache_salt=tenant
    )
    [output] = router.generate([PROMPT], params, speculation)
    return output


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_output_that_came_before_is_quoted_and_comes_again(
    router: ChainRouter, temperature: float
) -> None:
    first = output_of(router, "off", temperature)
    assert output_of(router, QUOTING, temperature).token_ids == first.token_ids
    again = output_of(router, QUOTING, temperature)
    assert again.token_ids == first.token_ids
    assert again.metrics.accepted_tokens > NEW * 0.8
    assert again.metrics.cycles < NEW / 5


def test_two_tenants_never_quote_each_other(router: ChainRouter) -> None:
    ours = output_of(router, QUOTING, tenant="ours")
    accepted = {
        name: output_of(router, QUOTING, tenant=name).metrics.accepted_tokens
        for name in ("theirs", None, "ours")
    }
    assert accepted["theirs"] == accepted[None] == ours.metrics.accepted_tokens
    assert accepted["ours"] > NEW * 0.8


def test_who_does_not_want_it_neither_quotes_nor_is_quoted(router: ChainRouter) -> None:
    alone = replace(QUOTING, reuse_outputs=False)
    first = output_of(router, alone).metrics.accepted_tokens
    assert output_of(router, QUOTING).metrics.accepted_tokens == first, "it was not kept"
    assert output_of(router, alone).metrics.accepted_tokens == first
    assert output_of(router, QUOTING).metrics.accepted_tokens > NEW * 0.8


def test_nothing_is_kept_where_the_configuration_says_so(small_config: dict[str, Any]) -> None:
    settings = changed(small_config, "suffix", output_store_tokens=0)
    with ChainRouter.from_config(settings) as router:
        first = output_of(router, QUOTING).metrics.accepted_tokens
        assert output_of(router, QUOTING).metrics.accepted_tokens == first


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_scheduled_draft_goes_on_as_far_as_it_is_right(
    small_config: dict[str, Any], temperature: float
) -> None:
    """Once quotations are seen to be right, one pass of the target verifies dozens of tokens."""
    with even_machine(), ChainRouter.from_config(changed(small_config, "suffix")) as router:
        first = output_of(router, "off", temperature)
        outputs = [output_of(router, None, temperature) for _ in range(12)]
    assert all(output.token_ids == first.token_ids for output in outputs)
    scheduled = [one for one in outputs if PAIR in one.metrics.chains]
    assert scheduled, "the scheduler finds it by itself"
    assert max(one.metrics.acceptance_length for one in scheduled) > 10
