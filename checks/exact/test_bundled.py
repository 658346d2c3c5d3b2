"""The bundled family in float32: a token differs only where the target itself hardly decides."""

import pytest

from checks.exact.arguments import bundled_config, open_oracle, open_router
from checks.exact.arrangement import Arrangement
from checks.exact.array_check import HONEST_MARGIN, difference_margin, make_cases
from checks.exact.comparison import all_divergences, assert_whole, compare
from checks.exact.greedy import greedy_params
from checks.exact.prompts import encode, load_prompts
from checks.exact.seeded import seeded_params

CHAIN = ("tiny-1m", "tiny-3m", "tiny-8m")
NEW = 10
ROWS = (
    Arrangement(mode="off", batch=4),
    Arrangement(mode=("suffix", "tiny-8m"), batch=1, depth=8, width=1),
    Arrangement(mode=("suffix", "tiny-8m"), batch=8, depth=20, width=2),
    Arrangement(mode=CHAIN, batch=8, depth=4, width=3),
    Arrangement(mode=CHAIN, batch=8, depth=2, width=1),
    Arrangement(mode="adaptive", batch=8),
)


@pytest.mark.exact
def test_float32_tokens_are_those_of_transformers_under_every_arrangement() -> None:
    with open_router(bundled_config("suffix", *CHAIN), "float32", 8) as router:
        oracle = open_oracle(router, "float32")
        prompts = encode(load_prompts(None, 8), router.pool.tokenizer, 100)
        cases = [
            *make_cases(oracle, prompts, lambda index: greedy_params(index, NEW)),
            *make_cases(oracle, prompts, lambda index: seeded_params(index, NEW)),
        ]
        comparisons = [compare(router, cases, row) for row in ROWS]
        assert_whole(router)
        differences = all_divergences(comparisons)
        assert len(differences) <= 1, "they are rare"
        assert all(difference_margin(oracle, each) < HONEST_MARGIN for each in differences)
    assert sum(each.speculated for each in comparisons) > 50
