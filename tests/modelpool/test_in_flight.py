"""What a device may still read is not given out."""

import pytest
import torch

from modelpool.in_flight import InFlight, Reached, mark_on


class Later(Reached):
    """A mark that the device comes to when it is told, or waited for."""

    is_reached = waited = False

    def query(self) -> bool:
        return self.is_reached

    def synchronize(self) -> None:
        self.waited |= not self.is_reached
        self.is_reached = True


def numbers(most: int) -> InFlight[int]:
    made = iter(range(100))
    return InFlight(lambda: next(made), most)


def test_what_was_read_is_given_out_again_before_there_is_one_more() -> None:
    things = numbers(most=3)
    first = things.take()
    things.give_back(first, Reached())
    assert things.take() == first


def test_what_is_in_flight_is_not_given_out() -> None:
    things, mark = numbers(most=3), Later()
    first = things.take()
    things.give_back(first, mark)
    second = things.take()
    assert second != first
    assert not mark.is_reached
    things.give_back(second, Reached())
    assert things.take() not in (first, second)  # in turn: the first is still in flight
    assert not mark.is_reached


def test_the_host_waits_for_the_oldest_where_there_may_be_no_more() -> None:
    things, marks = numbers(most=2), [Later(), Later()]
    for thing, mark in zip([things.take(), things.take()], marks, strict=True):
        things.give_back(thing, mark)
    assert things.take() == 0
    assert [mark.is_reached for mark in marks] == [True, False]


def test_all_that_are_taken_and_not_given_back_are_a_mistake() -> None:
    things = numbers(most=1)
    things.take()
    with pytest.raises(RuntimeError, match="all are taken"):
        things.take()


def test_a_cpu_has_done_what_it_was_told() -> None:
    assert mark_on(torch.device("cpu")).query()
