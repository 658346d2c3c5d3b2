"""Figures of benchmarks, on made-up samples."""

from __future__ import annotations

import pytest

from specrouter.bench.figures import eaf, ratios, request_rates, row, spread, tpots
from specrouter.bench.sample import Sample, distinct_share, spent, summed
from specrouter.profile.profiler import EngineStatistics

TIME = EngineStatistics(
    cycles=10,
    cycle_ms=1000.0,
    model_ms={"small": 200.0, "big": 600.0},
    logits_ms=100.0,
    committed_tokens=25,
    target_passes=10,
    forwards={"small": 40, "big": 10, "unused": 0},
    pack_tokens={"small": 80, "big": 55, "unused": 0},
)


def test_ratio_is_taken_within_each_round() -> None:
    drifting = [[Sample(tokens=100, seconds=seconds)] for seconds in (1.0, 10.0, 4.0)]
    twice = [[Sample(tokens=100, seconds=seconds / 2)] for seconds in (1.0, 10.0, 4.0)]
    assert ratios(twice, drifting) == [2.0, 2.0, 2.0]


def test_spread_is_the_median_and_the_quartiles() -> None:
    assert spread([5.0, 1.0, 2.0, 3.0, 4.0]) == {"median": 3.0, "low": 2.0, "high": 4.0}
    assert spread([7.0]) == {"median": 7.0, "low": 7.0, "high": 7.0}


@pytest.mark.parametrize(
    ("token_ids", "share"),
    [([1, 2, 3, 4, 5], 1.0), ([1] * 8, 0.2), ([1, 2] * 4, 0.4), ([1, 2, 3], 1.0), ([], 1.0)],
)
def test_distinct_share_counts_4grams(token_ids: list[int], share: float) -> None:
    assert distinct_share(token_ids) == pytest.approx(share)


def test_time_between_two_moments_is_the_difference_of_the_totals() -> None:
    before = EngineStatistics(cycles=4, model_ms={"big": 100.0}, forwards={"big": 4})
    found = spent(before, TIME)
    assert found.cycles == 6
    assert found.model_ms == {"small": 200.0, "big": 500.0}
    assert found.forwards == {"small": 40, "big": 6, "unused": 0}
    assert summed([before, found]) == TIME


SAMPLES = {
    "off": [[Sample(tokens=10, seconds=1.0)] * 2] * 3,
    "fast": [
        [
            Sample(tokens=10, seconds=seconds, acceptance_length=1 / seconds, engine=TIME)
            for seconds in (0.5, 0.25)
        ]
    ]
    * 3,
}


def test_row_has_the_ratio_of_each_category() -> None:
    found = row(SAMPLES, "fast", ["off"], ["code", "prose"])
    assert found["over_by_category"]["code"]["off"]["median"] == pytest.approx(2.0)
    assert found["over_by_category"]["prose"]["off"]["median"] == pytest.approx(4.0)
    assert found["over"]["off"]["median"] == pytest.approx(2 / 0.75)
    assert found["acceptance_length"] == pytest.approx(3.0)


def test_headline_by_category_is_the_mean_over_categories() -> None:
    found = row(SAMPLES, "fast", ["off"], ["code", "prose"], by_category=True)
    assert found["over"]["off"]["median"] == pytest.approx(3.0)


def test_requests_per_second_are_of_all_requests_of_a_round() -> None:
    counts = ((1.0, 4), (3.0, 8))
    rounds = [[Sample(tokens=10, seconds=seconds, requests=n) for seconds, n in counts]]
    assert request_rates(rounds) == [3.0]
    assert row({"off": rounds}, "off", ["off"], [None, None])["requests_per_s"]["median"] == 3.0


def test_eaf_is_the_targets_own_tpot_over_a_contenders_within_a_round() -> None:
    def rounds(*tpot_ms: float) -> list[list[Sample]]:
        return [[Sample(tokens=10, seconds=1.0, tpot_ms=ms)] * 2 for ms in tpot_ms]

    # The machine is ten times slower in the second round.
    both = {"off": rounds(30.0, 300.0, 33.0), "fast": rounds(20.0, 150.0, 30.0)}
    assert eaf(both["fast"], both["off"]) == pytest.approx([1.5, 2.0, 1.1])
    found = row(both, "fast", ["off"], [None, None])
    assert found["eaf_tpot"]["median"] == pytest.approx(1.5)
    assert found["tpot_ms"]["median"] == pytest.approx(30.0)


def test_a_rounds_tpot_counts_each_request_once_and_is_unknown_where_a_batch_does_not_say() -> None:
    large, small = (
        Sample(tokens=1, seconds=1.0, requests=3, tpot_ms=10.0),
        Sample(tokens=1, seconds=1.0, tpot_ms=30.0),
    )
    assert tpots([[large, small], [large, Sample(tokens=1, seconds=1.0)]]) == [15.0, None]
    found = row(SAMPLES, "fast", ["off"], ["code", "prose"])
    assert (found["tpot_ms"], found["eaf_tpot"]) == (None, None)


def test_row_of_our_own_says_where_the_time_went() -> None:
    found = row(SAMPLES, "fast", ["off"], ["code", "prose"])
    assert found["model_share"] == {"small": pytest.approx(0.2), "big": pytest.approx(0.6)}
    assert found["control_share"] == pytest.approx(0.1)
    assert found["mean_pack_tokens"] == {"small": 2.0, "big": 5.5}
    assert "control_share" not in row(SAMPLES, "off", ["off"], ["code", "prose"])
