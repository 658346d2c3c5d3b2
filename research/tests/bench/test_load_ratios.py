"""Ratios over the best baseline of a round."""

from __future__ import annotations

import pytest

from research.bench.load_bench import point_result
from research.bench.load_ratios import over_rounds, with_ratios
from research.bench.load_requests import Point
from research.bench.traces import Arrival
from tests.specrouter.bench.test_replay import outcome


def row(violations: int, goodput: float, ttft_ms: float) -> dict[str, object]:
    times = {"ttft_ms": {"p99": ttft_ms}, "mean_tpot_ms": ttft_ms / 2}
    return {"violations": violations, "goodput_tokens_per_s": goodput, **times}


def test_ratios_are_over_the_best_baseline_of_each_kind() -> None:
    rows = {"target-only": row(30, 50.0, 100.0), "spec-4": row(20, 40.0, 80.0)}
    rows |= {"slo": row(5, 75.0, 110.0), "perfect": row(0, 80.0, 90.0)}
    found = with_ratios(rows, {"target-only", "spec-4"})
    over = {name: one.pop("over") for name, one in found.items()}
    assert found == rows
    assert list(over["slo"]) == ["violations", "goodput", "ttft_p99", "eaf_tpot"]
    assert [*over["slo"].values()] == pytest.approx([4.0, 1.5, 1.1, 100 / 110])
    assert [*over["spec-4"].values()] == pytest.approx([1.0, 0.8, 0.8, 1.25])
    assert over["perfect"]["violations"] is None
    alone = with_ratios({"slo": row(5, 75.0, 110.0)}, {"spec-4"})["slo"]["over"]
    assert alone == dict.fromkeys(over["slo"])


def test_a_point_has_medians_of_ratios_within_a_round() -> None:
    """The machine is ten times slower in the second round, and the best baseline is another one."""
    ttft_ms = {
        "target-only": (100.0, 1000.0, 200.0),
        "spec-4": (50.0, 2000.0, 100.0),
        "slo": (50.0, 2000.0, 20.0),
    }
    misses = {"target-only": (4, 4, 6), "spec-4": (2, 6, 3), "slo": (1, 2, 3)}
    outcomes = {
        name: [
            [outcome(0.0, 11.0 if n < missed else 9.0, ttft_ms=ms) for n in range(6)]
            for missed, ms in zip(misses[name], times, strict=True)
        ]
        for name, times in ttft_ms.items()
    }
    point = Point(1.0, (Arrival(0.0, "chat", 8, 8, 1.0),))
    row = point_result(point, outcomes)["policies"]["slo"]
    assert row["ttft_ms"]["p99"] == pytest.approx(50.0)
    assert row["over"]["ttft_p99"] == pytest.approx(0.5)  # of 0.5, 2 and 0.1; of the medians 0.25
    assert row["over"]["violations"] == pytest.approx(9 / 6)  # of 2, 4 and 3 over 1, 2 and 3


def test_violations_are_compared_over_all_rounds_those_without_any_among_them() -> None:
    rounds = [{"spec-4": row(3, 1.0, 1.0), "slo": row(missed, 1.0, 1.0)} for missed in (0, 0, 0, 6)]
    assert over_rounds(rounds, {"spec-4"})["slo"]["over"]["violations"] == 2.0
    assert over_rounds(rounds, set())["slo"]["over"]["violations"] is None
