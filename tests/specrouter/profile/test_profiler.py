"""What the profiler remembers of cycles, and how it shows it."""

import math
import threading

import numpy as np
import pytest

from specrouter.profile.acceptance import JudgedTrees
from specrouter.profile.cycle_times import Workload
from specrouter.profile.prediction import OptionGrid, ShapeLimits, target_only
from specrouter.profile.profiler import EngineStatistics, PerformanceProfiler
from specrouter.profile.snapshot import ChainOutcome, TreeKey
from specrouter.profile.time_regression import TimeRegression, TimeSample

PAIR = ("small", "big")
KEY: TreeKey = (("small",), "big", True)


@pytest.fixture
def profiler() -> PerformanceProfiler:
    return PerformanceProfiler(parameters={"small": 10, "big": 100})


def trees(accepted: bool, count: int = 1) -> JudgedTrees:
    """Drafts of a single node."""
    one = np.zeros((count, 1), dtype=np.int64)
    walk = np.full((count, 1), accepted)
    log_probs = np.full((count, 1), math.log(0.5))
    return JudgedTrees(
        parents=one - 1, depths=one + 1, log_probs=log_probs, judged=walk | True, accepted=walk
    )


@pytest.mark.parametrize("place", range(4))
def test_an_outcome_that_is_no_number_is_not_learned(
    profiler: PerformanceProfiler, place: int
) -> None:
    profiler.record_outcome(PAIR, 1, 10.0, 10.0, 1.5, 1.5)
    before = profiler.snapshot().outcomes
    numbers = [10.0, 12.0, 1.5, 1.0]
    numbers[place] = math.nan
    predicted_ms, elapsed_ms, expected, committed = numbers
    with pytest.raises(ArithmeticError):
        profiler.record_outcome(PAIR, 1, predicted_ms, elapsed_ms, expected, committed)
    assert profiler.snapshot().outcomes == before


def test_what_trees_teach_is_forgotten_where_it_is_no_number(profiler: PerformanceProfiler) -> None:
    """Else what a drafter calls likely would be worth no number from then on."""
    profiler.record_trees(KEY, trees(True, 8))
    with pytest.raises(ArithmeticError):
        profiler.record_choices(KEY, np.full((2, 1), np.nan), np.ones((2, 1), dtype=np.bool_))
    assert KEY not in profiler.snapshot().trees
    profiler.record_trees(KEY, trees(True, 8))
    assert KEY in profiler.snapshot().trees


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
        profiler.record_cycle(9.0, 1, 1)
        profiler.record_similarity(PAIR, 0.2)
        profiler.record_trees(KEY, trees(True))
        profiler.record_outcome(PAIR, 1, 1.0, 2.0, 1.0, 1.0)
    known = profiler.snapshot()
    for part in (known.times, known.stages, known.similarity, known.trees, known.outcomes):
        assert not part
    assert profiler.statistics().model_ms == {"big": 160.0}


def test_a_prediction_with_the_control_planes_time_has_no_factor_for_it(
    profiler: PerformanceProfiler,
) -> None:
    limits = ShapeLimits(depth=1, width=1, nodes=1)
    for _ in range(400):
        profiler.begin_cycle()
        known = profiler.snapshot()
        alone = target_only(known, Workload(requests=1), "big")
        profiler.record_forward("big", 1, 0.0, 10.0)
        profiler.record_cycle(12.0, 1, 1, "cycle")
        profiler.record_outcome(alone.chain, 1, alone.plain_ms, 12.0, 0.0, 0.0)
        pair = OptionGrid(PAIR, known, Workload(requests=1), limits).best()
        profiler.record_forward("small", 2, 0.0, 1.0)
        profiler.record_forward("big", 2, 0.0, 10.0)
        profiler.record_cycle(17.0, 1, 1, "drafting")
        profiler.record_outcome(PAIR, 1, pair.plain_ms, 17.0, 0.0, 0.0)
    assert (alone.plain_ms, pair.plain_ms) == pytest.approx((12.0, 17.0), rel=0.02)
    outcomes = profiler.snapshot().outcomes
    assert [outcome.time for outcome in outcomes.values()] == pytest.approx([1.0] * 2, abs=0.02)


def test_a_model_is_idle_since_it_taught_or_was_loaded_and_without_weights_from_the_start() -> None:
    profiler = PerformanceProfiler(parameters={"ngram": 0, "small": 10, "middle": 50, "big": 100})
    profiler.record_forward("small", 1, 0.0, 1.0)
    profiler.begin_cycle()
    profiler.learn_curve("middle", TimeRegression.profiled([TimeSample(1, 0.0, 1.0)]))
    assert profiler.snapshot().times["middle"].at(1) == pytest.approx(1.0)
    for _ in range(5):
        profiler.begin_cycle()
        profiler.record_forward("big", 1, 0.0, 1.0)
    idle = {"ngram": 6, "small": 6, "middle": 5, "big": 0}
    assert profiler.snapshot().idle_cycles == idle
    profiler.is_learning = False
    profiler.record_forward("small", 1, 0.0, 1.0)
    assert profiler.snapshot().idle_cycles == idle


def test_statistics_are_the_totals_of_what_was_recorded_before_they_were_taken(
    profiler: PerformanceProfiler,
) -> None:
    assert profiler.statistics() == EngineStatistics(
        cycles=0,
        cycle_ms=0.0,
        model_ms={},
        logits_ms=0.0,
        forwards={},
        pack_tokens={},
        committed_tokens=0,
        target_passes=0,
        switches=0,
    )
    for _ in range(2):
        profiler.record_forward("small", 2, 100.0, 1.0)
        profiler.record_forward("big", 5, 100.0, 4.0)
        profiler.record_stage("draft", 2, 0.25)
        profiler.record_stage("verify", 5, 0.5)
        profiler.record_cycle(7.0, committed=3, requests=1)
    profiler.record_switches(1)
    found = profiler.statistics()
    profiler.record_forward("big", 1, 0.0, 1.0)
    assert found == EngineStatistics(
        cycles=2,
        cycle_ms=14.0,
        model_ms={"small": 2.0, "big": 8.0},
        logits_ms=1.5,
        forwards={"small": 2, "big": 2},
        pack_tokens={"small": 4, "big": 10},
        committed_tokens=6,
        target_passes=2,
        switches=1,
        control_ms=2.5,
    )


def test_a_cycle_that_was_shorter_than_its_forwards_owes_the_control_plane_nothing(
    profiler: PerformanceProfiler,
) -> None:
    profiler.record_forward("big", 1, 0.0, 9.0)
    profiler.record_cycle(5.0, 1, 1)
    profiler.record_cycle(4.0, 1, 1)
    assert profiler.statistics().control_ms == 4.0


def test_similarity_promises_what_shared_noise_guarantees(profiler: PerformanceProfiler) -> None:
    profiler.record_similarity(PAIR, 0.2)
    for _ in range(2):
        promised = profiler.snapshot().promised_alpha
        assert promised[*PAIR, True] == promised[*PAIR, False] == pytest.approx(0.8 / 1.2)
        profiler.record_trees(KEY, trees(True, 8))  # which is known beside it


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
    for index in range(200):
        model = f"model-{index}"
        profiler.record_forward(model, 1, 0.0, 1.0)
        profiler.record_similarity((model, "big"), 0.3)
        profiler.record_trees(((model,), "big", True), trees(True))
        profiler.record_outcome((model, "big"), 1, 1.0, 1.0, 1.0, 1.0)
    done.set()
    watcher.join()
    assert not broken
    assert len(profiler.snapshot().trees) == 200


def outcome(profiler: PerformanceProfiler) -> ChainOutcome:
    return profiler.snapshot().outcomes[PAIR, 1, True]


def test_cycles_that_are_slower_or_bring_less_correct_predictions_of_their_mode(
    profiler: PerformanceProfiler,
) -> None:
    for _ in range(300):
        profiler.record_outcome(PAIR, 1, 10.0, 12.0, 4.0, 3.0)
        profiler.record_outcome(PAIR, 1, 10.0, 10.0, 1.5, 1.5, False)
    assert outcome(profiler).time == pytest.approx(1.2, rel=0.01)
    assert outcome(profiler).tokens == pytest.approx(0.75, abs=0.04)
    greedy = profiler.snapshot().outcomes[PAIR, 1, False]
    assert (greedy.time, greedy.tokens) == pytest.approx((1.0, 1.0)), "as predicted"


def test_outcomes_of_what_is_not_in_use_are_forgotten_and_do_not_come_back(
    profiler: PerformanceProfiler,
) -> None:
    for _ in range(60):
        profiler.record_outcome(PAIR, 1, 10.0, 13.0, 2.0, 1.0)
    assert outcome(profiler).time > 1.2
    assert outcome(profiler).tokens < 0.8
    for _ in range(6000):
        profiler.begin_cycle()
    for _ in range(2):
        assert outcome(profiler).time == pytest.approx(1.0, abs=0.02)
        assert outcome(profiler).tokens == pytest.approx(1.0, abs=0.02)
        profiler.record_outcome(PAIR, 1, 10.0, 10.0, 1.5, 1.5)


def test_of_chains_that_callers_name_the_latest_are_known(profiler: PerformanceProfiler) -> None:
    for index in range(400):
        chain = (f"model-{index}", "big")
        profiler.begin_cycle()
        profiler.record_outcome(chain, 1, 1.0, 1.0, 1.0, 1.0)
        profiler.record_trees((chain[:1], "big", True), trees(True))
    known = profiler.snapshot()
    latest = [f"model-{index}" for index in range(144, 400)]
    assert [chain[0] for chain, *_ in known.outcomes] == latest
    assert [key[0][0] for key in known.trees] == latest


def test_a_drafter_without_weights_is_promising_again_long_after_it_failed() -> None:
    """It cannot be evaluated while it is idle, and must not be passed over for ever."""
    profiler = PerformanceProfiler(parameters={"ngram": 0, "big": 100})
    key: TreeKey = (("ngram",), "big", True)
    profiler.record_forward("big", 1, 0.0, 10.0)
    profiler.record_similarity(("ngram", "big"), 0.9)
    for _ in range(300):
        profiler.begin_cycle()
        profiler.record_trees(key, trees(accepted=False))
    limits, one = ShapeLimits(width=1), Workload(requests=1)

    def ms_per_token() -> float:
        known = profiler.snapshot()
        return OptionGrid(("ngram", "big"), known, one, limits).best().ms_per_token

    alone_ms = target_only(profiler.snapshot(), one, "big").ms_per_token
    assert ms_per_token() > 0.97 * alone_ms
    for _ in range(10_000):
        profiler.begin_cycle()
    assert ms_per_token() < 0.9 * alone_ms
