"""What is slower than predicted, and by whose fault; what other chains may promise."""

import math

import pytest

from specrouter.profile import outcomes
from specrouter.profile.outcomes import OutcomeBook
from specrouter.profile.snapshot import ChainOutcome, OutcomeKey

PAIR: OutcomeKey = (("small", "big"), 1, True)
TWIN: OutcomeKey = (("twin", "big"), 1, True)
SLOW = math.log(1.2)


def book(cycles: int, log_error: float, key: OutcomeKey = PAIR) -> OutcomeBook:
    """After quiet cycles of both chains, some in which one is slower than predicted."""
    found = OutcomeBook()
    for _ in range(300):
        found.record(TWIN, 0, 0.0, 1.5, 1.5)
        found.record(PAIR, 0, 0.0, 1.5, 1.5)
    for _ in range(cycles):
        found.record(key, 0, log_error, 1.5, 1.5)
    return found


def test_what_stays_with_a_chain_becomes_its_own() -> None:
    known = book(2000, SLOW).known(0)
    assert known[PAIR].time == pytest.approx(1.2, rel=0.01)
    assert known[TWIN].time == pytest.approx(1.0, abs=0.02)


def test_who_ran_in_turn_is_told_apart() -> None:
    found = book(0, 0.0)
    for _ in range(1500):
        found.record(PAIR, 0, SLOW, 1.5, 1.5)
        found.record(TWIN, 0, 0.0, 1.5, 1.5)
    known = found.known(0)
    assert known[PAIR].time == pytest.approx(1.2, rel=0.03)
    assert known[TWIN].time == pytest.approx(1.0, abs=0.03)


def test_a_chain_that_never_ran_is_as_slow_now_and_promises_as_much_too_much() -> None:
    found = OutcomeBook()
    for _ in range(600):
        found.record(PAIR, 0, 0.0, 1.5, 1.2)
    for _ in range(20):
        found.record(PAIR, 0, SLOW, 1.5, 1.2)
    usual, own = found.usual(0)[PAIR[1:]], found.known(0)[PAIR]
    assert own.time > usual.time > 1.1
    assert own.tokens == pytest.approx(0.8, abs=0.02)
    assert usual.tokens == pytest.approx(0.8, abs=0.03)
    found.record(TWIN, 0, None, 1.5, 1.5)
    assert found.known(0)[TWIN].tokens == pytest.approx(usual.tokens, abs=0.02)


def test_other_loads_and_modes_have_moments_of_their_own() -> None:
    found = book(20, SLOW)
    found.record((PAIR[0], 8, True), 0, 0.0, 1.0, 1.0)
    found.record((PAIR[0], 1, False), 0, 0.0, 1.0, 1.0)
    known = found.known(0)
    assert known[PAIR[0], 8, True] == known[PAIR[0], 1, False] == ChainOutcome()
    assert set(found.usual(0)) == {(1, True), (8, True), (1, False)}


def test_a_moment_is_forgotten() -> None:
    found = book(20, SLOW)
    assert found.usual(0)[1, True].time > 1.1
    assert found.usual(5000)[1, True].time == pytest.approx(1.0, abs=0.01)


def test_a_record_that_fails_leaves_a_book_that_can_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> float:
        raise RuntimeError("no age")

    found = OutcomeBook()
    with monkeypatch.context() as patch:
        patch.setattr(outcomes, "age", broken)
        with pytest.raises(RuntimeError, match="no age"):
            found.record(PAIR, 0, 0.0, 1.5, 1.5)
    assert found.known(0) == {}
    found.record(PAIR, 0, 0.0, 1.5, 1.5)
    assert found.known(0)[PAIR] == ChainOutcome(1.0, 1.0)
