"""What fails inside a guard loses its own fact, is counted, and is told once a minute."""

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from specrouter.execution.fault_guard import FaultGuard, RowGuard


def test_a_failure_is_counted_under_its_part_and_goes_no_further() -> None:
    guard = FaultGuard()
    done = []
    with guard.part("accounts"):
        raise KeyError("lost")
    with guard.part("accounts"):
        done.append(1)
    assert guard.counts["accounts"] == 1
    assert guard.counts["timing"] == 0, "every part shows up before it fails"
    assert done == [1]


def test_the_log_has_one_line_a_minute_for_each_part(caplog: pytest.LogCaptureFixture) -> None:
    times_s = iter((0.0, 1.0, 59.0, 61.0, 61.0))
    guard = FaultGuard(lambda: next(times_s))
    with caplog.at_level(logging.ERROR):
        for _ in range(4):
            guard.note("timing", ValueError("bad"))
        guard.note("accounts", ValueError("bad"))
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split()[0] for line in lines] == ["timing", "timing", "accounts"]
    assert "4 times" in lines[1]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
def test_what_ends_a_thread_is_not_kept(error: BaseException) -> None:
    guard = FaultGuard()
    with pytest.raises(type(error)), guard.part("accounts"):
        raise error
    with pytest.raises(type(error)), RowGuard({}, 0, "its text"):
        raise error
    assert guard.counts["accounts"] == 0


def test_guards_of_one_part_stand_inside_each_other() -> None:
    guard = FaultGuard()
    with guard.part("timing"):
        with guard.part("timing"):
            raise ValueError
        raise KeyError
    assert guard.counts["timing"] == 2


def test_a_row_keeps_the_first_reason() -> None:
    errors: dict[int, str] = {}
    for row, error in ((3, ValueError("no such id")), (3, KeyError(1)), (5, KeyError(2))):
        with RowGuard(errors, row, "choosing its tokens"):
            raise error
    with RowGuard(errors, 7, "choosing its tokens"):
        pass
    assert errors == {
        3: "choosing its tokens failed: ValueError: no such id",
        5: "choosing its tokens failed: KeyError: 2",
    }


def test_no_failure_of_several_threads_is_lost() -> None:
    guard = FaultGuard()

    def fail() -> None:
        for _ in range(500):
            with guard.part("timing"):
                raise ValueError

    with ThreadPoolExecutor(4) as threads:
        for one in [threads.submit(fail) for _ in range(4)]:
            one.result()
    assert guard.counts["timing"] == 2000
