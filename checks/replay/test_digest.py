"""Digests of policies in simulated time: what is compared, and that it is the same every time."""

from __future__ import annotations

import json

import pytest

from checks.replay import cells, digest
from checks.replay.digest import ACCEPTANCES, FILE, Difference, differences, points, summary
from checks.replay.simulation import POLICIES, MachineFile, Result, load_machines, simulate
from checks.replay.stretches import (
    CHOOSING_SEEDS,
    JUDGING_SEEDS,
    REQUESTS,
    Arrival,
    is_for_choosing,
    load_stretches,
)


def result(violations: int) -> Result:
    return Result(100, violations, 1.0, 1.0)


def test_there_are_24_stretches_half_of_them_for_judging() -> None:
    stretches = load_stretches()
    assert len(stretches) == 24
    assert all(len(stretch) == REQUESTS for stretch in stretches)
    assert sum(map(is_for_choosing, range(24))) == 12
    assert len(CHOOSING_SEEDS) == len(JUDGING_SEEDS) == 8
    assert not set(CHOOSING_SEEDS) & set(JUDGING_SEEDS)


def test_the_digest_has_every_policy_at_the_points_that_are_compared_by_default() -> None:
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    assert set(stored) >= {str(point) for point in points("few")}
    assert set(stored) <= {str(point) for point in points("all")}
    assert len(points("third")) == len(load_machines()) * 24
    assert len(points("all")) == len(load_machines()) * len(ACCEPTANCES) * 24
    assert set(points("few")) < set(points("third")) < set(points("all"))
    assert all(row.keys() == set(POLICIES) for row in stored.values())


def test_a_few_requests_come_out_the_same_twice_and_otherwise_with_another_seed() -> None:
    machine, stretch = load_machines()["llama-70b"], load_stretches()[9][:12]
    once, again, other = (simulate(machine, 0.75, stretch, "slo", seed) for seed in (0, 0, 1))
    assert once == again
    assert once != other


def test_a_figure_that_changes_is_a_difference() -> None:
    row = {"slo": {"violations": 1}}
    assert differences({"a": row}, {"a": row, "b": row}) == []
    (line,) = differences({"a": row}, {"a": {"slo": {"violations": 2}}})
    assert line.startswith("a slo: ")
    assert len(differences({"c": row}, {"a": row})) == 1


def test_violations_are_summed_over_stretches() -> None:
    one = {"slo": {"violations": 1}, "goodput": {"violations": 4}}
    table = summary({"cpu/0.65/0": one, "cpu/0.65/1": one, "cpu/0.75/0": one})
    assert [line.split() for line in table.splitlines()[1:]] == [
        ["cpu/0.65", "2", "8"],
        ["cpu/0.75", "1", "4"],
    ]


def test_a_pair_is_behind_where_its_whole_interval_is() -> None:
    old = [result(10)] * 8
    behind = Difference.of([result(12), result(13)] * 4, old)
    assert behind.mean == pytest.approx(-2.5)
    assert behind.half_width == pytest.approx(2.365 * 0.5345 / 8**0.5, rel=1e-3)
    assert behind.is_loss
    assert not Difference.of([result(9), result(15)] * 4, old).is_loss
    assert Difference.of(old, old) == Difference(0.0, 0.0)


def test_a_policy_that_is_behind_at_a_point_fails_the_comparison_of_a_pair(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = set()

    def simulated(
        machine: MachineFile, acceptance: float, stretch: list[Arrival], policy: str, seed: int
    ) -> Result:
        asked.add((acceptance, seed))
        is_bad = policy == "slo" and acceptance == 0.85
        return result(20 + seed % 2 if is_bad else 10)

    monkeypatch.setattr(digest, "simulate", simulated)
    common = ["--half", "judging", "--machine", "cpu", "--jobs", "1"]
    assert digest.main(["--pair", "slo", "global-greedy", *common]) == 1
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["behind"] == [f"cpu/0.85/{stretch}" for stretch in range(1, 24, 2)]
    assert document["mean"] == pytest.approx(-10.5 / 3)
    assert {seed for _, seed in asked} == set(JUDGING_SEEDS)
    assert digest.main(["--pair", "global-greedy", "slo", *common]) == 0


def test_the_cells_that_are_compared_are_stored() -> None:
    assert set(cells.stored()) == set(cells.names())
    assert all(one is not None for one in cells.stored().values())
