"""Rows are taken from running requests at random, hundreds of times: no text changes in float64."""

import copy
from typing import Any

import numpy as np
import pytest

from checks.exact.arguments import open_oracle
from checks.exact.arrangement import Arrangement
from checks.exact.array_check import make_cases
from checks.exact.comparison import all_divergences, compare
from specrouter import ChainRouter
from test_support.params import seeded_params
from test_support.preemption import preempting_router
from test_support.routers import assert_whole

NEW, REQUESTS, LEAST = 24, 48, 300
CHAIN = ("small", "middle", "target")
ROWS = (
    Arrangement(mode="off", batch=4),
    Arrangement(mode=CHAIN, batch=6, depth=4, width=2),
    Arrangement(mode=("ngram", "target"), batch=6, depth=4, width=1),
    Arrangement(mode="adaptive", batch=6, urgent=True),
)


@pytest.mark.exact
def test_no_token_of_preempted_requests_differs_from_the_oracle(
    small_config: dict[str, Any],
) -> None:
    settings = copy.deepcopy(small_config)
    settings["pool"]["models"].append({"name": "ngram", "source": "ngram"})
    settings["engine"] |= {"max_requests": 4, "prefill_chunk": 16, "admission": "slo"}
    with ChainRouter.from_config(settings) as router:
        oracle = open_oracle(router, "float64")
        draws = np.random.default_rng(1)
        prompts = [
            tuple(draws.integers(0, 300, draws.integers(1, 40)).tolist()) for _ in range(REQUESTS)
        ]
        cases = make_cases(oracle, prompts, lambda index: seeded_params(index, NEW))
        with preempting_router(router, 0.15) as disturbed:
            comparisons = [compare(router, cases, row) for row in ROWS]
        assert_whole(router)
        assert all_divergences(comparisons) == []
        assert disturbed.count >= LEAST
        assert sum(each.speculated for each in comparisons) > 100
        assert not any(router.instruments.engine_state().control_faults.values())
