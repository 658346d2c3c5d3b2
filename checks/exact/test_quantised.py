"""A target in int8 or int4 says what it says alone, however it is served."""

from pathlib import Path
from typing import Any

import pytest

from checks.exact.arguments import bundled_config, open_router
from checks.exact.arrangement import Arrangement
from checks.exact.comparison import all_divergences, compare, own_case
from checks.exact.families import build
from checks.exact.named_families import NAMED
from checks.exact.prompts import encode, load_prompts
from modelpool.config import Weights
from modelpool.fast.panels import quantised_refusal
from specrouter import RouterConfig, SamplingParams
from test_support.families import NAMES, pool_settings, save_family
from test_support.params import greedy_params, seeded_params
from test_support.routers import assert_whole

pytestmark = [
    pytest.mark.exact,
    pytest.mark.skipif(quantised_refusal() is not None, reason=str(quantised_refusal())),
]
NEW = 12
FAMILIES = (
    "command a",
    "gemma 3 text",
    "gpt-oss",
    "granite 3",
    "ministral 3 text",
    "olmo 3",
    "phi-4-mini",
    "qwen3 30b-a3b",
    "smollm 3",
)
BUNDLED = ("tiny-1m", "tiny-8m")
QUANTISED = pytest.mark.parametrize("weights", ["int8", "int4"])


def rows(chain: tuple[str, ...], weights: Weights) -> list[Arrangement]:
    return [
        Arrangement(mode="off", batch=8, weights=weights),
        Arrangement(mode=chain, batch=1, depth=4, width=1, weights=weights),
        Arrangement(mode=chain, batch=8, depth=4, width=3, weights=weights),
        Arrangement(mode="adaptive", batch=8, cached=False, weights=weights),
    ]


def check(config: dict[str, Any], dtype: str, chain: tuple[str, ...], weights: Weights) -> None:
    with open_router(config, dtype, 8, weights) as router:
        kept = router.pool.plan(router.pool.target).weights
        assert kept == ("plain" if weights == "auto" else weights)
        longest = min(100, router.pool.longest_sequence - NEW)
        prompts = encode(load_prompts(None, 8), router.pool.tokenizer, longest)
        params: list[SamplingParams] = [
            *(greedy_params(index, NEW) for index in range(len(prompts))),
            *(seeded_params(index, NEW) for index in range(len(prompts))),
        ]
        cases = [own_case(router, p, q) for p, q in zip([*prompts] * 2, params, strict=True)]
        comparisons = [compare(router, cases, row) for row in rows(chain, weights)]
        assert_whole(router)
    assert all_divergences(comparisons) == []
    assert sum(each.speculated for each in comparisons) > 20


@QUANTISED
def test_a_family_in_float64_is_served_to_the_token(weights: Weights, tmp_path: Path) -> None:
    pool = pool_settings(save_family(tmp_path))
    check(RouterConfig.load({"pool": pool}).model_dump(), "float64", NAMES, weights)


@QUANTISED
def test_a_target_is_served_to_the_token_whatever_its_twin_drafts(
    weights: Weights, tmp_path: Path
) -> None:
    """Three models: the twin drafts alone, and stands between the target and a small one."""
    paths = save_family(tmp_path)
    pool = pool_settings({name: paths[name] for name in ("small", "target")})
    pool["models"].append({"name": "twin", "source": "quantised:target", "weights": weights})
    config = RouterConfig.load({"pool": pool}).model_dump()
    for chain in (("twin", "target"), ("small", "twin", "target")):
        check(config, "float64", chain, weights="auto")


@QUANTISED
@pytest.mark.parametrize("name", FAMILIES)
def test_families_whose_layers_are_not_llamas_are_served_to_the_token(
    name: str, weights: Weights, tmp_path: Path
) -> None:
    [family] = [family for family in NAMED if family.name == name]
    paths = build(family, tmp_path)
    pool = pool_settings({"near": paths.near, "target": paths.target})
    config = RouterConfig.load({"pool": pool}).model_dump()
    check(config, "float64", ("near", "target"), weights)


@QUANTISED
def test_the_bundled_target_is_served_to_the_token(weights: Weights) -> None:
    """In float32, in which attention's rounding can hardly move a level."""
    check(bundled_config(*BUNDLED), "float32", BUNDLED, weights)
