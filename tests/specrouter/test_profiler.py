"""What the profiler remembers, and how fast it forgets."""

import pytest

from specrouter.profiler import PerformanceProfiler, TimeCurve

PAIR = ("small", "big")


COLD_MS = 1e4


@pytest.fixture
def profiler() -> PerformanceProfiler:
    """Of which "big" is warm: its first two forwards are behind it."""
    profiler = PerformanceProfiler({"small": 10, "big": 100})
    for _ in range(2):
        profiler.record_time("big", 1, COLD_MS)
    return profiler


def at(profiler: PerformanceProfiler, tokens: float) -> float:
    return profiler.snapshot().times["big"].at(tokens)


def test_nothing_is_known_at_first(profiler: PerformanceProfiler) -> None:
    known = profiler.snapshot()
    assert (dict(known.times), dict(known.similarity), dict(known.acceptance)) == ({}, {}, {})
    assert known.parameters == {"small": 10, "big": 100}


def test_a_models_first_two_forwards_do_not_count(profiler: PerformanceProfiler) -> None:
    for ms in (COLD_MS, COLD_MS, 2.0):
        assert "small" not in profiler.snapshot().times
        profiler.record_time("small", 1, ms)
    assert profiler.snapshot().times["small"].points == ((1, 2.0),)


def test_of_the_first_three_times_the_least_counts(profiler: PerformanceProfiler) -> None:
    for ms, known in ((60.0, 60.0), (10.0, 10.0), (30.0, 10.0)):
        profiler.record_time("big", 1, ms)
        assert at(profiler, 1) == known


def test_a_model_is_stale_when_it_was_used_but_not_for_long(profiler: PerformanceProfiler) -> None:
    profiler.record_time("small", 1, 1.0)
    for _ in range(512):
        profiler.begin_cycle()
        profiler.record_time("big", 1, 1.0)
    assert profiler.snapshot().stale == frozenset()
    profiler.begin_cycle()
    assert profiler.snapshot().stale == {"small"}
    profiler.record_time("small", 1, 1.0)
    assert profiler.snapshot().stale == frozenset()


def test_times_are_moving_averages_in_which_a_faster_one_counts_more(
    profiler: PerformanceProfiler,
) -> None:
    for _ in range(3):
        profiler.record_time("big", 1, 10.0)
    assert at(profiler, 1) == 10.0
    profiler.record_time("big", 1, 20.0)
    assert at(profiler, 1) == pytest.approx(10 + 0.15 * 10)
    profiler.record_time("big", 1, 1.5)
    assert at(profiler, 1) == pytest.approx(11.5 + 0.4 * (1.5 - 11.5))


def test_an_outlier_counts_as_three_times_the_known_time(profiler: PerformanceProfiler) -> None:
    for _ in range(3):
        profiler.record_time("big", 1, 10.0)
    profiler.record_time("big", 1, 1e6)
    assert at(profiler, 1) == pytest.approx(10 + 0.15 * 20)


def test_a_changed_machine_is_learned(profiler: PerformanceProfiler) -> None:
    for ms in [10.0] * 5 + [50.0] * 60:
        profiler.record_time("big", 1, ms)
    assert at(profiler, 1) == pytest.approx(50.0, rel=0.01)


def test_sizes_share_buckets_up_to_the_next_power_of_two(profiler: PerformanceProfiler) -> None:
    profiler.record_time("big", 5, 10.0)
    assert profiler.snapshot().times["big"].points == ((8, 10.0),)
    profiler.record_time("big", 8, 20.0)
    assert len(profiler.snapshot().times["big"].points) == 1
    profiler.record_time("big", 9, 20.0)
    assert [tokens for tokens, _ in profiler.snapshot().times["big"].points] == [8, 16]


def test_a_curve_never_falls_with_more_tokens(profiler: PerformanceProfiler) -> None:
    for tokens, ms in [(1, 30.0), (4, 12.0), (16, 15.0), (32, 14.0)]:
        profiler.record_time("big", tokens, ms)
    assert profiler.snapshot().times["big"].points == ((1, 12.0), (4, 12.0), (16, 14.0), (32, 14.0))


def test_a_curve_is_linear_between_its_points_and_in_proportion_beyond() -> None:
    curve = TimeCurve(((2, 10.0), (4, 20.0), (32, 48.0)))
    assert [curve.at(n) for n in (1, 2, 3, 4, 18, 32, 64)] == [10, 10, 15, 20, 34, 48, 96]


def test_a_curve_known_for_few_tokens_only_is_flat_beyond() -> None:
    assert TimeCurve(((1, 10.0), (4, 11.0))).at(100) == 11.0


def test_similarity_is_one_minus_the_mean_total_variation(profiler: PerformanceProfiler) -> None:
    profiler.record_similarity(PAIR, 0.4)
    assert profiler.snapshot().similarity[PAIR] == pytest.approx(0.6)
    profiler.record_similarity(PAIR, 0.2)
    assert profiler.snapshot().similarity[PAIR] == pytest.approx(0.6 + 0.05 * 0.2)


def test_acceptance_is_the_share_of_judged_tokens(profiler: PerformanceProfiler) -> None:
    profiler.record_acceptance(PAIR, 0, 0)
    assert (*PAIR, 1) not in profiler.snapshot().acceptance
    profiler.record_acceptance(PAIR, 3, 1)
    seen = profiler.snapshot().acceptance[*PAIR, 1]
    assert (seen.rate, seen.evidence) == (0.75, 4.0)


def test_each_width_has_an_acceptance_of_its_own(profiler: PerformanceProfiler) -> None:
    profiler.record_acceptance(PAIR, 1, 3)
    profiler.record_acceptance(PAIR, 3, 1, width=4)
    seen = profiler.snapshot().acceptance
    assert {trial: known.rate for trial, known in seen.items()} == {
        (*PAIR, 1): 0.25,
        (*PAIR, 4): 0.75,
    }


def test_old_acceptances_fade(profiler: PerformanceProfiler) -> None:
    for _ in range(1000):
        profiler.record_acceptance(PAIR, 4, 0)
    for _ in range(400):
        profiler.record_acceptance(PAIR, 0, 4)
    seen = profiler.snapshot().acceptance[*PAIR, 1]
    assert seen.rate < 0.05
    assert seen.evidence == pytest.approx(400.0, rel=0.01)


def test_a_snapshot_does_not_change(profiler: PerformanceProfiler) -> None:
    profiler.record_time("big", 1, 10.0)
    known = profiler.snapshot()
    profiler.record_time("big", 1, 1.0)
    profiler.record_similarity(PAIR, 0.5)
    assert known.times["big"].at(1) == 10.0
    assert PAIR not in known.similarity


def test_a_similarity_that_is_no_number_is_not_learned() -> None:
    profiler = PerformanceProfiler({"small": 1, "target": 2})
    profiler.record_similarity(("small", "target"), 0.25)
    profiler.record_similarity(("small", "target"), float("nan"))
    assert profiler.snapshot().similarity["small", "target"] == 0.75
