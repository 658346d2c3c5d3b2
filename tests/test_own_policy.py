"""The policies that docs/policies.md shows do what it says, live and in simulated time."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

from research.named_policies import NamedPolicy
from research.sim.machine import Machine
from research.sim.service import SimulatedService
from specrouter import ChainRouter, RequestError, RouterConfig, SamplingParams
from specrouter.bench.replay import replay
from specrouter.cluster.policy import RoutingSettings, rank
from specrouter.cluster.state import RoutedRequest
from specrouter.config import TreesConfig
from specrouter.config.policies import (
    ADMISSION_POLICIES,
    CHAIN_POLICIES,
    NODE_SELECTIONS,
    REPLICA_POLICIES,
)
from specrouter.cycle import Candidates
from specrouter.http.request_fields import GenerateRequest
from specrouter.profile.time_curve import TimeCurve
from specrouter.routing.chain_policy import ModelNames
from test_support.factories import make_tokenizer
from tests.load_requests import load_request
from tests.pages import ROOT, fences
from tests.specrouter.cluster.states import state, view
from tests.specrouter.fake_router import router_without_models
from tests.specrouter.predictions import PAIR, flat, rising, snapshot
from tests.specrouter.routing.test_planner import ALONE, TWIN
from tests.specrouter.routing.test_scheduler import ONE, all_pairs, choose, scheduler
from tests.specrouter.slo.test_admission import request
from tests.specrouter.slo.test_admission import view as engine_view
from tests.specrouter.slo.test_tree_planner import COST, asking

PAGE = ROOT / "docs" / "policies.md"
BEST_PAIR = "my_policies:BEST_PAIR"
PROMPTS = [[1 + index, 5, 9, 12] for index in range(4)]


def blocks(language: str) -> list[str]:
    return [text for kind, text, _ in fences(PAGE) if kind == language]


@pytest.fixture(autouse=True)
def my_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The page's module, where Python finds it; forgotten after each test."""
    (tmp_path / "my_policies.py").write_text("\n\n".join(blocks("python")), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    registries = (CHAIN_POLICIES, NODE_SELECTIONS, ADMISSION_POLICIES, REPLICA_POLICIES)
    for registry in registries:
        monkeypatch.setattr(registry, "_imported", dict(registry._imported))
        monkeypatch.setattr(registry, "_own", dict(registry._own))
    yield
    sys.modules.pop("my_policies", None)


def small_router(small_config: dict[str, Any], **sections: Any) -> ChainRouter:
    return ChainRouter.from_config(copy.deepcopy(small_config) | sections)


def texts(router: ChainRouter) -> list[list[int]]:
    params = [
        SamplingParams(max_new_tokens=40, temperature=at % 2, seed=at, ignore_eos=True)
        for at in range(len(PROMPTS))
    ]
    outputs = router.generate(PROMPTS, params)
    assert all(one.error is None for one in outputs)
    return [list(one.token_ids) for one in outputs]


def test_texts_are_the_targets_and_the_policys_chain_drafts(small_config: dict[str, Any]) -> None:
    section = yaml.safe_load(blocks("yaml")[0])
    assert section == {"scheduler": {"policy": BEST_PAIR}}
    own: dict[str, Any] = {
        "trees": {"selection": "my_policies:LIKELY"},
        "admission": "my_policies:SHORTEST_FIRST",
    }
    with small_router(small_config, **section) as router:
        found = texts(router)
        decisions = [record.decision for record in router.instruments.decisions()]
        assert decisions[-1].reason == "most accepted per ms"
        chosen = {decision.chain for decision in decisions}
        [output] = router.generate(PROMPTS[:1], SamplingParams(max_new_tokens=20, ignore_eos=True))
        assert chosen <= {("small", "target"), ("middle", "target")}
        assert output.metrics.chains.keys() & chosen
        router.set_policy("target-only")
        assert texts(router) == found
        router.set_policy(BEST_PAIR, depth=2, **own)
        assert texts(router) == found
        assert router.instruments.decisions()[-1].decision.reason == "most accepted per ms"


def test_the_pair_with_most_accepted_tokens_for_a_millisecond_is_taken() -> None:
    times = {"small": flat(1.0), "twin": flat(2.0), "middle": flat(90.0), "big": rising(50.0)}
    alike = snapshot(times, alpha=all_pairs(0.5))
    assert choose(alike, BEST_PAIR).chain == PAIR, "it is the fastest"
    better = snapshot(times, alpha=all_pairs(0.5) | {PAIR: 0.3, TWIN: 0.9})
    assert choose(better, BEST_PAIR).chain == TWIN, "0.45 and 0.3"
    assert choose(better, BEST_PAIR, available=frozenset({"small"})).chain == PAIR
    assert choose(better, BEST_PAIR, available=frozenset()).chain == ALONE
    assert choose(better, BEST_PAIR, depth=3, width=2).shape.depth == 3
    assert set(scheduler(BEST_PAIR).drafters) == {"small", "twin", "middle"}
    unknown = scheduler(BEST_PAIR).choose(snapshot({}), ONE, ModelNames(frozenset({"small"})))
    assert unknown.chain == PAIR


def simulated(policy: str | NamedPolicy) -> tuple[float, float]:
    """Milliseconds a token, and tokens a cycle, of one request."""
    times = {
        "small": TimeCurve(((1, 0.5), (512, 0.5))),
        "middle": TimeCurve(((1, 30.0), (512, 30.0))),
        "big": TimeCurve(((1, 20.0), (513, 532.0))),
    }
    machine = Machine(
        target="big",
        times=times,
        parameters={"small": 1, "middle": 50, "big": 100},
        prefill_chunk=32,
        max_requests=4,
    )
    service = SimulatedService(machine=machine, acceptance=0.8, trees=TreesConfig())
    service.use(policy)
    [outcome] = replay(
        [load_request(token_ids=(0,) * 8, new_tokens=100)],
        service,
        service,
    )
    assert outcome.answer.error is None
    assert outcome.answer.tpot_ms is not None
    assert outcome.answer.acceptance_length is not None
    return outcome.answer.tpot_ms, outcome.answer.acceptance_length


def test_in_simulated_time_it_takes_the_drafter_that_pays() -> None:
    own = NamedPolicy(chains=BEST_PAIR, selection="whole")
    alone_ms, _ = simulated("target-only")
    own_ms, accepted = simulated(own)
    assert accepted > 2.0
    assert own_ms < 0.7 * alone_ms
    smallest = NamedPolicy(chains="smallest", selection="whole")
    assert simulated(smallest) == (own_ms, accepted), "which is the smallest one here"
    likely = NamedPolicy(chains=BEST_PAIR, selection="my_policies:LIKELY")
    assert simulated(likely)[0] < 0.7 * alone_ms


def test_likely_nodes_are_trees() -> None:
    worth = np.array([[0.9, 0.5, 0.19], [0.3, 0.2, 0.1]])
    drafts = Candidates(worth, np.array([[1, 2, 3], [1, 1, 2]]))
    selector = NODE_SELECTIONS.find("my_policies:LIKELY").selector(asking([None, None]), COST, 9)
    assert selector(np.arange(2), drafts, 0).tolist() == [[True, True, False]] * 2


def test_the_shortest_prompt_is_given_a_row_first() -> None:
    config = RouterConfig.load({"pool": {"target": "a", "models": [{"name": "a", "source": "b"}]}})
    admit = ADMISSION_POLICIES.find("my_policies:SHORTEST_FIRST").for_engine(config.engine, "a")
    waiting = [request(1, 0.0, left=30), request(2, 1.0, left=5), request(3, 2.0, left=20)]
    assert admit(engine_view(waiting, [], free_rows=2)).admitted == (2, 3)


def test_the_replica_with_most_free_rows_is_first() -> None:
    views = [view("a", state(3)), view("b", state(1)), view("c", state(0), sent=2)]
    settings = RoutingSettings(16)
    found = rank(
        "my_policies:MOST_ROOM",
        RoutedRequest(number=0, prompt_tokens=10, remaining=5),
        views,
        settings,
    )
    assert found.order == ("b", "c", "a")
    assert found.terms["b"] == {"free": 3}


def test_requests_cannot_name_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"input_ids": [1, 2]}
    GenerateRequest.model_validate(body)
    for more in (
        {"policy": "adaptive"},
        {"scheduler": {"policy": BEST_PAIR}},
        {"speculation": BEST_PAIR},
        {"speculation": "adaptive"},
        {"speculation": {"policy": BEST_PAIR}},
    ):
        with pytest.raises(ValidationError):
            GenerateRequest.model_validate(body | more)
    router, _ = router_without_models(make_tokenizer(tmp_path), monkeypatch)
    with router:
        asked: Any = BEST_PAIR
        with pytest.raises(RequestError):
            router.generate(PROMPTS[:1], SamplingParams(max_new_tokens=4), asked)
    assert "my_policies" not in sys.modules, "nothing was imported for them"
