"""Every published policy serves live, and changes no text."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest

from modelpool.errors import ConfigError
from research.named_policies import POLICIES, ROUTING, is_live, settings_of
from specrouter import SLO, ChainRouter, SamplingParams
from specrouter.cli.target import read_asked
from specrouter.config.policies import REPLICA_POLICIES

LIVE = [name for name, one in POLICIES.items() if is_live(one)]
PROMPTS = [[5, 6, 7, 8], [9, 3, 9, 3, 9], [11] * 20]
PARAMS = [
    SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True),
    SamplingParams(max_new_tokens=24, temperature=1.0, seed=3, ignore_eos=True),
    SamplingParams(max_new_tokens=24, temperature=0.7, seed=4, ignore_eos=True),
]


@pytest.fixture(scope="module")
def router(small_config: dict[str, Any]) -> Iterator[ChainRouter]:
    with ChainRouter.from_config(small_config) as opened:
        yield opened


def texts(router: ChainRouter, name: str) -> list[tuple[int, ...]]:
    chosen = POLICIES[name]
    router.set_policy(
        chosen.chains,
        trees={"selection": chosen.selection},
        admission=chosen.admission,
        **chosen.settings,
    )
    slo = SLO(tpot_ms=200.0)
    return [tuple(one.token_ids) for one in router.generate(PROMPTS, PARAMS, slo=slo)]


@pytest.mark.parametrize("name", [name for name in LIVE if name != "target-only"])
def test_a_published_policy_serves_the_text_of_the_target_alone(
    router: ChainRouter, name: str
) -> None:
    assert texts(router, name) == texts(router, "target-only")


def test_what_serve_is_given_is_what_the_policy_means() -> None:
    assert list(settings_of(["specustream", "flowguard-printed"])) == [
        "scheduler.policy=research.policies:SPECUSTREAM",
        "trees.selection=whole",
        "engine.admission=fcfs",
        "cluster.routing.policy=research.policies:FLOWGUARD_PRINTED",
    ]
    for name in LIVE:
        asked = Namespace(target=None, config=None, draft=[], settings=list(settings_of([name])))
        assert read_asked(asked).config.scheduler.policy == POLICIES[name].chains
    assert REPLICA_POLICIES.find(ROUTING["flowguard-printed"])


@pytest.mark.parametrize("name", ["vllm", "nobody"])
def test_what_no_engine_can_run_is_refused_with_what_it_can(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--policy: '{name}' is none of target-only, .*paper"):
        list(settings_of([name]))
