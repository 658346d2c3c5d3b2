"""What a long command is at: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import io
import logging
from itertools import count

from specrouter.bench.contenders import measure
from specrouter.bench.figures import Sample
from specrouter.bench.prompts import Work
from specrouter.progress import Progress, ShownLoad, is_live
from tests.specrouter.faults import wait_until


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_line_says_what_is_done_what_is_left_and_how_long_either_takes() -> None:
    clock = Clock()
    progress = Progress(stream=io.StringIO(), clock=clock)
    progress.show("loading big")
    clock.now_s += 70
    assert progress.line() == "loading big: 01:10 so far"
    progress.expect(8)
    progress.show("batch 4: adaptive")
    assert progress.line() == "batch 4: adaptive: 0 of 8 done in 00:00, about ? left"
    clock.now_s += 30
    progress.step()
    progress.step()
    progress.show("batch 4: off")
    assert progress.line() == "batch 4: off: 2 of 8 done in 00:30, about 01:30 left"
    for _ in range(6):
        progress.step()
    clock.now_s += 30
    ShownLoad(progress).begin("timing", "big")
    clock.now_s += 5
    assert progress.line() == "timing big: 00:05 so far"


def test_away_from_a_terminal_lines_come_while_a_step_lasts_and_none_after_the_end() -> None:
    stream = io.StringIO()
    with Progress(stream=stream, every_s=0.01) as progress:
        progress.show("inflating big")
        assert stream.getvalue() == "", "what takes less than the interval"
        wait_until(lambda: stream.getvalue().count("inflating big: ") >= 2)
    assert stream.getvalue().endswith(" so far\n")
    assert not progress._thread.is_alive()


def test_a_notebook_s_stream_shows_a_line_that_changes() -> None:
    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    assert is_live(stream)
    assert not is_live(io.StringIO())


def test_a_log_line_stands_above_the_line_that_changes() -> None:
    stream, told = Terminal(), logging.getLogger("told")
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    try:
        with Progress(stream=stream) as progress:
            load = ShownLoad(progress)
            load.begin("loading", "big")
            told.warning("a warning")
            load.count(1, 4)
        load.count(2, 4)
    finally:
        logging.getLogger().removeHandler(handler)
    blank = " " * len("loading big")
    assert stream.getvalue().startswith(f"\rloading big\r{blank}\ra warning\n\rloading big, 0.0 of")
    assert stream.getvalue().endswith("\r"), "nothing is shown after the end"
    assert not handler.filters


def test_a_contender_that_takes_long_is_named_with_what_is_left() -> None:
    stream = io.StringIO()

    class Slow:
        name = "slow"
        runs = count(1)

        def run(self, work: Work) -> Sample:
            if next(self.runs) == 2:
                wait_until(lambda: "round 1/2: slow: 1 of 3 done" in stream.getvalue())
            return Sample(tokens=1, seconds=1.0)

    with Progress(stream=stream, every_s=0.01) as progress:
        measure([Slow()], lambda number: [Work((), (0,), 1, 0.0)], 2, "batch 4", progress)


def test_on_a_terminal_one_line_changes_and_is_cleared_in_the_end() -> None:
    stream = Terminal()
    with Progress(stream=stream, every_s=0.001) as progress:
        progress.expect(4)
        progress.show("batch 4")
        progress.step()
        progress.show("batch 4")
        progress.note("batch 4 is over")
        progress.show("writing")
    shown = stream.getvalue().split("\r")
    assert "#" not in shown[1]
    assert "0/4" in shown[1]
    assert "##" in shown[2]
    assert "1/4" in shown[2]
    assert "batch 4 is over\n" in shown
    assert shown[-2:] == [" " * len(shown[-3]), ""]
