"""Figures of benchmarks, on made-up samples."""

from __future__ import annotations

import pytest

from specrouter.bench.figures import (
    Sample,
    distinct_share,
    ratios,
    request_rates,
    row,
    spread,
    tpots,
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


SAMPLES = {
    "off": [[Sample(tokens=10, seconds=1.0)] * 2] * 3,
    "fast": [
        [
            Sample(
                tokens=10,
                seconds=seconds,
                acceptance_length=1 / seconds,
                cycle_ms=1000.0,
                control_ms=200.0 * seconds,
                chains={"a>b": 3, "b": 1},
            )
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


def test_requests_per_second_are_of_all_requests_of_a_round() -> None:
    counts = ((1.0, 4), (3.0, 8))
    rounds = [[Sample(tokens=10, seconds=seconds, requests=n) for seconds, n in counts]]
    assert request_rates(rounds) == [3.0]
    assert row({"off": rounds}, "off", ["off"], [None, None])["requests_per_s"]["median"] == 3.0


def test_a_rounds_tpot_counts_each_request_once_and_is_unknown_where_a_batch_does_not_say() -> None:
    large, small = (
        Sample(tokens=1, seconds=1.0, requests=3, tpot_ms=10.0),
        Sample(tokens=1, seconds=1.0, tpot_ms=30.0),
    )
    assert tpots([[large, small], [large, Sample(tokens=1, seconds=1.0)]]) == [15.0]
    assert row({"off": [[large, small]]}, "off", [], [None] * 2)["tpot_ms"]["median"] == 15.0
    assert row(SAMPLES, "fast", ["off"], ["code", "prose"])["tpot_ms"] is None


def test_row_of_our_own_says_where_the_time_went() -> None:
    found = row(SAMPLES, "fast", ["off"], ["code", "prose"])
    assert found["control_share"] == pytest.approx(0.075)
    assert found["chains"] == {"a>b": 0.75, "b": 0.25}
    assert "control_share" not in row(SAMPLES, "off", ["off"], ["code", "prose"])
