"""What fails inside a guard loses its own fact, is counted, and is told once a minute."""

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from specrouter.execution.fault_guard import FaultGuard


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
