"""Contenders that are a router here, and rounds in which any take turns."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from specrouter import SamplingParams
from specrouter.bench.contenders import MeasurementError, OwnContender, measure
from specrouter.bench.figures import Sample
from specrouter.bench.prompts import BenchPrompt, Work
from specrouter.profile.profiler import EngineStatistics
from specrouter.progress import Progress
from tests.request_outputs import request_output

WORK = Work((BenchPrompt("x", "ab", (5, 6)), BenchPrompt("x", "c", (7,))), (3, 4), 8, 1.0)


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
        return EngineStatistics(cycle_ms=10.0 * self._cycles, control_ms=2.0 * self._cycles)

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
        assert (sample.cycle_ms, sample.control_ms) == (30.0, 6.0)
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


# rounds, on contenders that only count

LOG: list[tuple[str, int]] = []


class Counting:
    """`fails`: from which of its runs on, counted from 0."""

    def __init__(self, name: str, fails: int | None = None) -> None:
        self.name, self._fails, self._runs = name, fails, 0

    def run(self, work: Work) -> Sample:
        self._runs += 1
        if self._fails is not None and self._runs > self._fails:
            raise MeasurementError(f"{self.name}: broken")
        LOG.append((self.name, work.seeds[0]))
        return Sample(tokens=1, seconds=1.0)


def deal(number: int) -> list[Work]:
    return [Work((), (seed,), 1, 0.0) for seed in (10 * number, 10 * number + 1)]


def quiet() -> Progress:
    return Progress(stream=io.StringIO())


def test_contenders_take_turns_on_each_batch() -> None:
    LOG.clear()
    samples = measure([Counting("a"), Counting("b")], deal, 2, "batch 1", quiet())
    warm_up, counted = LOG[:4], LOG[4:]
    assert counted == [(name, seed) for seed in (0, 1, 10, 11) for name in ("a", "b")]
    assert len(warm_up) == 4
    lengths = {name: [len(found) for found in rounds] for name, rounds in samples.items()}
    assert lengths == {"a": [2, 2], "b": [2, 2]}


@pytest.mark.parametrize("fails", [0, 3])
def test_a_failure_ends_the_measurement(fails: int) -> None:
    with pytest.raises(MeasurementError, match="b: broken"):
        measure([Counting("b", fails=fails)], deal, 3, "", quiet())


def test_progress_away_from_a_terminal_is_a_line_per_round() -> None:
    stream = io.StringIO()
    measure([Counting("a")], deal, 2, "batch 4", Progress(stream=stream))
    assert stream.getvalue().splitlines() == [
        "batch 4, warm-up: a 1.0 tokens/s",
        "batch 4, round 1/2: a 1.0 tokens/s",
        "batch 4, round 2/2: a 1.0 tokens/s",
    ]
