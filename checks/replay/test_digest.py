"""Digests of policies in simulated time: what is compared, and that it is the same every time."""

from __future__ import annotations

import json

from checks.replay import cells
from checks.replay.digest import ACCEPTANCES, FILE, differences, points, summary
from checks.replay.simulation import POLICIES, load_machines, simulate
from checks.replay.stretches import (
    REQUESTS,
    load_stretches,
)


def test_there_are_24_stretches() -> None:
    stretches = load_stretches()
    assert len(stretches) == 24
    assert all(len(stretch) == REQUESTS for stretch in stretches)


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


def test_the_cells_that_are_compared_are_stored() -> None:
    assert set(cells.stored()) == set(cells.names())
    assert all(one is not None for one in cells.stored().values())
