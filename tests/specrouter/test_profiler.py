"""What the profiler remembers of cycles, and how it shows it."""

import math
import threading
from typing import Any

import numpy as np
import pytest

from specrouter.acceptance import SHAPES, JudgedTrees
from specrouter.prediction import Outcome, TreeKey
from specrouter.profiler import EngineStatistics, PerformanceProfiler, RequestRates
from specrouter.time_curve import TimeEstimator, TimeSample

PAIR = ("small", "big")
KEY: TreeKey = (("small",), 1, "big", True)


@pytest.fixture
def profiler() -> PerformanceProfiler:
    return PerformanceProfiler({"small": 10, "big": 100})


def trees(accepted: bool, count: int = 1) -> JudgedTrees:
    """Drafts of a single node."""
    one = np.zeros((count, 1), dtype=np.int64)
    walk = np.full((count, 1), accepted)
    log_probs = np.full((count, 1), math.log(0.5))
    heights = np.ones(count, dtype=np.int64)
    return JudgedTrees(one - 1, one + 1, log_probs, walk | True, walk, heights, 1)


def test_nothing_is_known_at_first(profiler: PerformanceProfiler) -> None:
    known = profiler.snapshot()
    for part in (known.times, known.similarity, known.trees, known.promised_alpha, known.outcomes):
        assert dict(part) == {}
    assert (known.machine, known.probe_share, known.cycle_ms) == (1.0, 0.0, 0.0)
    assert known.parameters == {"small": 10, "big": 100}


def test_a_curve_that_was_learned_elsewhere_is_known_at_once(profiler: PerformanceProfiler) -> None:
    samples = [TimeSample(n, 0.0, 10.0 + n) for n in (1, 2, 4, 8)]
    times = TimeEstimator.profiled(samples)
    profiler.learn_curve("big", times)
    assert profiler.snapshot().times["big"].at(4) == pytest.approx(14.0)


def test_forwards_teach_their_models_curve(profiler: PerformanceProfiler) -> None:
    for _ in range(20):
        profiler.record_forward("big", 4, 0.0, 8.0)
    known = profiler.snapshot()
    assert set(known.times) == {"big"}
    assert known.times["big"].at(4) == pytest.approx(8.0)


def test_forwards_that_are_told_together_count_each(profiler: PerformanceProfiler) -> None:
    profiler.record_forward("big", 4, 0.0, 8.0, times=3)
    totals = profiler.statistics()
    assert (totals.forwards, totals.pack_tokens) == ({"big": 3}, {"big": 12})
    assert totals.model_ms == {"big": 24.0}


def test_a_profiler_that_does_not_learn_keeps_totals_only(profiler: PerformanceProfiler) -> None:
    profiler.is_learning = False
    for _ in range(20):
        profiler.record_forward("big", 4, 0.0, 8.0)
        profiler.record_stage("draft", 4, 1.0)
        profiler.record_similarity(PAIR, 0.2)
        profiler.record_trees(KEY, trees(True))
        profiler.record_outcome(PAIR, 1, 1.0, 2.0, 1.0, 1.0)
    known = profiler.snapshot()
    for part in (known.times, known.stages, known.similarity, known.trees, known.outcomes):
        assert not part
    assert profiler.statistics().model_ms == {"big": 160.0}


def test_a_stage_that_ran_several_times_counts_each(profiler: PerformanceProfiler) -> None:
    for _ in range(20):
        profiler.record_stage("draft", 3, 8.0, times=4)
    assert profiler.snapshot().stages["draft"].at(3) == pytest.approx(2.0)


def test_a_model_is_idle_since_its_last_forward(profiler: PerformanceProfiler) -> None:
    profiler.record_forward("small", 1, 0.0, 1.0)
    for _ in range(5):
        profiler.begin_cycle()
        profiler.record_forward("big", 1, 0.0, 1.0)
    assert dict(profiler.snapshot().idle_cycles) == {"small": 5, "big": 0}


# Totals


def test_statistics_are_the_totals_of_what_was_recorded(profiler: PerformanceProfiler) -> None:
    assert profiler.statistics() == EngineStatistics(0, 0.0, {}, 0.0, {}, {}, 0, 0, 0)
    for _ in range(2):
        profiler.record_forward("small", 2, 100.0, 1.0)
        profiler.record_forward("big", 5, 100.0, 4.0)
        profiler.record_stage("draft", 2, 0.25)
        profiler.record_stage("verify", 5, 0.5)
        profiler.record_stage("cycle", 1, 100.0)  # is part of the control plane
        profiler.record_cycle(7.0, committed=3, requests=1)
    profiler.record_switch()
    assert profiler.statistics() == EngineStatistics(
        cycles=2,
        cycle_ms=14.0,
        model_ms={"small": 2.0, "big": 8.0},
        logits_ms=1.5,
        forwards={"small": 2, "big": 2},
        pack_tokens={"small": 4, "big": 10},
        committed_tokens=6,
        target_passes=2,
        switches=1,
    )


def test_statistics_that_were_handed_out_stay_as_they_are(profiler: PerformanceProfiler) -> None:
    profiler.record_forward("big", 1, 0.0, 1.0)
    before = profiler.statistics()
    profiler.record_forward("big", 1, 0.0, 1.0)
    assert before.forwards == {"big": 1}


def test_probes_cost_what_the_best_chain_would_not_have(profiler: PerformanceProfiler) -> None:
    profiler.record_cycle(90.0, 1, 1)
    profiler.record_cycle(10.0, 1, 1)
    profiler.record_probe(3.0)
    profiler.record_probe(-5.0)  # faster than the best: no cost, and no gain
    assert profiler.snapshot().probe_share == pytest.approx(0.03)


# Similarity and acceptance


def test_similarity_is_a_moving_average(profiler: PerformanceProfiler) -> None:
    profiler.record_similarity(PAIR, 0.2)
    assert profiler.snapshot().similarity[PAIR] == pytest.approx(0.8)
    profiler.record_similarity(PAIR, 0.6)
    assert profiler.snapshot().similarity[PAIR] == pytest.approx(0.8 - 0.05 * 0.4)


@pytest.mark.parametrize("variation", [math.nan, math.inf, -math.inf])
def test_a_variation_that_is_no_number_is_ignored(
    variation: float, profiler: PerformanceProfiler
) -> None:
    profiler.record_similarity(PAIR, variation)
    assert not profiler.snapshot().similarity
    profiler.record_similarity(PAIR, 0.2)
    profiler.record_similarity(PAIR, variation)
    assert profiler.snapshot().similarity[PAIR] == pytest.approx(0.8)


def test_similarity_promises_what_shared_noise_guarantees_until_drafts_are_judged(
    profiler: PerformanceProfiler,
) -> None:
    profiler.record_similarity(PAIR, 0.2)
    promised = profiler.snapshot().promised_alpha
    assert promised[*PAIR, True] == promised[*PAIR, False] == pytest.approx(0.8 / 1.2)
    for _ in range(600):
        profiler.record_trees(KEY, trees(True, 8))
    promised = profiler.snapshot().promised_alpha
    assert promised[*PAIR, True] > 0.9
    assert promised[*PAIR, False] == pytest.approx(0.8 / 1.2)  # that mode saw nothing


def test_trees_teach_the_key_that_they_were_recorded_under(profiler: PerformanceProfiler) -> None:
    for _ in range(4):
        profiler.record_trees(KEY, trees(True, 2))
    known = profiler.snapshot()
    assert set(known.trees) == {KEY}
    assert known.trees[KEY].alpha == 1.0
    assert known.trees[KEY].trees[SHAPES.index((1, 1))] == pytest.approx(8, rel=0.05)


def test_a_snapshot_does_not_change(profiler: PerformanceProfiler) -> None:
    profiler.record_trees(KEY, trees(True))
    before = profiler.snapshot()
    for _ in range(50):
        profiler.record_trees(KEY, trees(False))
        profiler.begin_cycle()
        profiler.record_similarity(PAIR, 0.5)
    assert before.trees[KEY].alpha == 1.0
    assert not before.similarity
    frozen: Any = before.trees
    with pytest.raises(TypeError):
        frozen[KEY] = None


def test_snapshots_may_be_taken_while_others_record(profiler: PerformanceProfiler) -> None:
    broken: list[BaseException] = []
    done = threading.Event()

    def look() -> None:
        try:
            while not done.is_set():
                profiler.snapshot()
                profiler.statistics()
        except BaseException as error:
            broken.append(error)

    watcher = threading.Thread(target=look)
    watcher.start()
    for index in range(300):
        model = f"model-{index}"
        profiler.record_forward(model, 1, 0.0, 1.0)
        profiler.record_similarity((model, "big"), 0.3)
        profiler.record_trees(((model,), 1, "big", True), trees(True))
        profiler.record_outcome((model, "big"), 1, 1.0, 1.0, 1.0, 1.0)
    done.set()
    watcher.join()
    assert not broken
    assert len(profiler.snapshot().trees) == 300


# How predictions came out


def outcome(profiler: PerformanceProfiler) -> Outcome:
    return profiler.snapshot().outcomes[PAIR, 1]


def test_cycles_that_come_out_as_predicted_correct_nothing(profiler: PerformanceProfiler) -> None:
    for _ in range(50):
        profiler.record_outcome(PAIR, 1, 10.0, 10.0, 1.5, 1.5)
    assert (outcome(profiler).time, outcome(profiler).tokens) == pytest.approx((1.0, 1.0))


def test_cycles_that_are_slower_or_bring_less_correct_the_prediction(
    profiler: PerformanceProfiler,
) -> None:
    for _ in range(300):
        profiler.record_outcome(PAIR, 1, 10.0, 12.0, 4.0, 3.0)
    assert outcome(profiler).time == pytest.approx(1.2, rel=0.01)
    assert outcome(profiler).tokens == pytest.approx(0.75, abs=0.04)


def test_one_hiccup_hardly_counts_and_no_correction_is_absurd(
    profiler: PerformanceProfiler,
) -> None:
    for _ in range(50):
        profiler.record_outcome(PAIR, 1, 10.0, 10.0, 1.0, 1.0)
    profiler.record_outcome(PAIR, 1, 10.0, 1e5, 1.0, 1.0)
    assert outcome(profiler).time < 1.03
    for _ in range(500):
        profiler.record_outcome(PAIR, 1, 10.0, 1e5, 100.0, 0.0)
    assert outcome(profiler) == Outcome(1.5, 0.67)


def test_a_cycle_that_others_shared_tells_of_tokens_only(profiler: PerformanceProfiler) -> None:
    profiler.record_outcome(PAIR, 1, 0.0, 99.0, 60.0, 0.0)
    assert outcome(profiler).time == 1.0
    assert outcome(profiler).tokens < 1.0


# Requests


def test_a_request_counts_as_everybody_until_there_is_evidence() -> None:
    rates = RequestRates()
    assert rates.factor(("small",)) == 1.0
    rates.record(("small",), 0.0, 1.5)
    assert 0.9 < rates.factor(("small",)) < 1.0
    assert rates.factor(("twin",)) == 1.0


@pytest.mark.parametrize("factor", [0.0, 0.5, 2.0])
def test_a_request_that_differs_is_found_out(factor: float) -> None:
    rates, seen = RequestRates(), [1.0]
    for _ in range(300):
        rates.record(("small",), 1.5 * factor, 1.5)
        seen.append(rates.factor(("small",)))
    assert rates.factor(("small",)) == pytest.approx(factor, abs=0.2)
    assert sorted(seen, reverse=factor < 1.0) == seen
