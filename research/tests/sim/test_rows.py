"""Rows of a simulated engine: who has which, and how much memory they hold."""

import numpy as np

from research.sim.rows import SimulatedRows


def test_the_lowest_free_row_is_opened_empty() -> None:
    rows = SimulatedRows(3, ("a", "b"))
    assert [rows.open(5, 10, 8), rows.open(6, 20)] == [0, 1]
    rows.read["a"][:] = 4
    assert (rows.free, rows.held.sum()) == (1, 14)
    rows.close(0)
    assert (rows.free, rows.held.sum()) == (2, 6)
    assert rows.open(8, 9) == 0
    first = np.array([0])
    assert rows.lag("a", first).tolist() == [7]
    assert rows.remaining(first).tolist() == [1]


def test_slots_are_those_of_the_engine_s_layout() -> None:
    rows = SimulatedRows(1, ("a",))
    assert [rows.slots_for(tokens) for tokens in (1, 120, 121)] == [128, 128, 256]
