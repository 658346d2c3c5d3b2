"""What drafts bring is measured while requests run, and changes none of their texts."""

import pytest

from specrouter import ChainRouter, RouterConfig, SamplingParams, Speculation
from specrouter.profile import speedup
from specrouter.profile.speedup import Speedup

PROMPTS = ["def fib(n):\n", "Natalia sold clips to 48 of her friends. ", "The sky is"]
PARAMS = SamplingParams(max_new_tokens=160, temperature=0.7, seed=5, ignore_eos=True)


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> ChainRouter:
    """A router that drafts in all cycles but every fourth or so, whether drafts pay here or not."""
    monkeypatch.setattr(speedup, "RUN", 2)
    monkeypatch.setattr(speedup, "BLOCK", 8)
    monkeypatch.setattr(speedup, "_DOUBTED_BLOCK", 8)
    monkeypatch.setattr(speedup, "_REST", 4)
    config = RouterConfig.load("tiny")
    scheduler = config.scheduler.model_copy(
        update={"policy": "tests.specrouter.own_policies:MEASURED"}
    )
    return ChainRouter(config.model_copy(update={"scheduler": scheduler}))


def test_texts_are_those_of_the_target_alone_while_it_is_measured(router: ChainRouter) -> None:
    with router:
        named = Speculation(chain=("tiny-1m", "tiny-8m"))
        drafted = router.generate(PROMPTS, PARAMS, named)
        assert not router.instruments.engine_state().speedups  # of who leaves nothing to the router
        routed = router.generate(PROMPTS, PARAMS, Speculation(reuse_outputs=False))
        found = router.instruments.engine_state().speedups
        alone = router.generate(PROMPTS, PARAMS, "off")
    assert [one.token_ids for one in routed] == [one.token_ids for one in alone]
    assert [one.token_ids for one in drafted] == [one.token_ids for one in alone]
    assert found
    assert all(0.0 < one.low <= one.ratio <= one.high for one in found.values())


def test_where_drafts_are_slower_nobody_drafts_for_a_while(router: ChainRouter) -> None:
    with router:
        router.generate("def", PARAMS)
        meter = router.instruments.engine.policies.current.speedup
        load = meter._loads[1]
        slow = Speedup(ratio=0.8, low=0.7, high=0.9, is_resting=True)
        load._rests_for, load._rest = slow, 10_000
        [resting] = router.generate("def", PARAMS)
        # The first cycle, which reads the prompt, is planned before it is known who runs.
        assert resting.metrics.chains["tiny-8m",] >= resting.metrics.cycles - 1
        decision = router.instruments.decision()
        assert decision.rests
        assert "0.80x (0.70 to 0.90) of the speed without drafts at 1 request" in decision.reason
