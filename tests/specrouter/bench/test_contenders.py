"""Contenders that are a router here."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from specrouter import SamplingParams
from specrouter.bench.contenders import OwnContender
from specrouter.bench.prompts import BenchPrompt, Work
from specrouter.bench.sample import MeasurementError
from specrouter.profile.profiler import EngineStatistics
from tests.request_outputs import request_output

WORK = Work(
    (BenchPrompt("x", "ab", (5, 6)), BenchPrompt("x", "c", (7,))), (3, 4), 8, 1.0, "x"
)  # fmt: skip


class CountingRouter:
    """Every prompt is answered by its length times the same token, in 3 cycles."""

    def __init__(self, error: str | None = None) -> None:
        self.config: Any = SimpleNamespace()
        self.pool: Any = None
        self.calls: list[Any] = []
        self._error, self._cycles = error, 0

    @property
    def instruments(self) -> CountingRouter:
        return self

    def set_learning(self, is_learning: bool) -> None:
        self.learning = is_learning

    def set_policy(self, policy: str, **settings: Any) -> None:
        self.calls.append((policy, settings))

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(cycles=self._cycles, cycle_ms=10.0 * self._cycles)

    def generate(self, prompts: Any, params: Any = None, speculation: Any = None) -> list[Any]:
        self.calls.append((prompts, params, speculation))
        self._cycles += 3
        chains = {("small", "big"): 2, ("big",): 1}
        return [
            request_output(
                [9] * len(prompt), {"acceptance_length": 1.0 + len(prompt), "chains": chains},
                self._error,
            )
            for prompt in prompts
        ]  # fmt: skip


# our own


def own(name: str, router: Any, *how: Any) -> OwnContender:
    return OwnContender(name, router, *how)


def test_every_run_is_a_tenant_of_its_own_and_its_sample_has_only_its_own_time() -> None:
    router = CountingRouter()
    for name in ("off", "adaptive"):
        sample = own(name, router).run(WORK)
        assert sample.engine == EngineStatistics(cycles=3, cycle_ms=30.0)
    salts = [[one.cache_salt for one in params] for _, params, _ in router.calls[1::2]]
    assert len({salt for run in salts for salt in run}) == 2
    assert all(len(set(run)) == 1 for run in salts)


def test_own_contender_sets_its_policy_and_hands_the_work_on() -> None:
    router = CountingRouter()
    settings = {"chain": ("small", "big"), "depth": 3}
    sample = own("a chain", router, "static", settings, "off").run(WORK)
    policy, (prompts, params, speculation) = router.calls
    assert policy == ("static", settings)
    assert speculation == "off"
    assert prompts == [(5, 6), (7,)]
    assert [replace(one, cache_salt=None) for one in params] == [
        SamplingParams(
            max_new_tokens=8, temperature=1.0, seed=seed, ignore_eos=True, prefix_cache=False
        )
        for seed in (3, 4)
    ]
    assert sample.tokens == 3
    assert sample.acceptance_length == pytest.approx(2.5)
    assert sample.chains == {"small>big": 4, "big": 2}


@pytest.mark.parametrize(
    ("policy", "speculation", "learns"),
    [
        ("adaptive", None, True),
        ("adaptive", "off", False),
        ("smallest", None, False),
        ("tests.specrouter.own_policies:FIRST", None, False),
    ],
)
def test_only_a_policy_that_decides_by_measurements_is_taught_by_its_runs(
    policy: str, speculation: Literal["off"] | None, learns: bool
) -> None:
    router = CountingRouter()
    own("one", router, policy, {}, speculation).run(WORK)
    assert router.learning == learns


def test_failed_request_ends_the_measurement_with_its_cause() -> None:
    with pytest.raises(MeasurementError, match="off: out of memory"):
        own("off", CountingRouter(error="out of memory")).run(WORK)
