"""Progress: what a long command is at, on stderr.

Contract: on a terminal and in a notebook a line that changes, with a bar where steps are counted;
lines of the log stand above it. Elsewhere, within the `with` block, a line every ten seconds,
however long a step takes: a thread writes it. Any thread may tell what is being done.
"""

from __future__ import annotations

import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from tqdm import tqdm

from modelpool.progress import LoadProgress, LoadStage

_EVERY_S = 10.0
_NOTEBOOK = "ipykernel"  # whose streams are no terminals, and show a line that changes all the same
_BAR = "{desc} {bar} {n_fmt}/{total_fmt}, about {remaining} left"
_COUNTED = "{desc}: {n_fmt} of {total_fmt} done in {elapsed}, about {remaining} left"
_UNCOUNTED = "{desc}: {elapsed} so far"


class Progress:
    """
    Args:
        doing: what is shown first.
        every_s: between two lines where `stream`, by default stderr, is no terminal.
        clock: in seconds.
    """

    def __init__(
        self,
        doing: str | None = None,
        *,
        stream: TextIO | None = None,
        every_s: float = _EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._every_s, self._clock = stream or sys.stderr, every_s, clock
        self._is_terminal = is_live(self._stream)
        self._doing = doing
        self._shown = ""  # on a terminal
        self._total = self._done = 0
        self._since_s = clock()
        self._lock = threading.RLock()
        self._log_handlers = logging.getLogger().handlers if self._is_terminal else []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="specrouter-progress", daemon=True)

    def __enter__(self) -> Progress:
        if self._doing is not None:
            self.show(self._doing)
        if not self._is_terminal:
            self._thread.start()
        for handler in self._log_handlers:
            handler.addFilter(self._make_way)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        for handler in self._log_handlers:
            handler.removeFilter(self._make_way)
        with self._lock:
            self._clear()

    def expect(self, steps: int) -> None:
        """So many steps are counted from now on, until all are done."""
        with self._lock:
            self._total, self._done, self._since_s = steps, 0, self._clock()

    def step(self) -> None:
        """One more is done."""
        with self._lock:
            self._done += 1
            self._draw()

    def show(self, text: str, goes_on: bool = False) -> None:
        """What is being done now. `goes_on`: it is what was being done before."""
        with self._lock:
            if not (self._is_counted or goes_on):
                self._since_s = self._clock()
            self._doing = text
            self._draw()

    def note(self, text: str) -> None:
        """A line that stays."""
        with self._lock:
            self._clear()
            print(text, file=self._stream, flush=True)

    def line(self) -> str:
        """What is being done, what is left of it, and how long that has taken and may take."""
        with self._lock:
            form = _UNCOUNTED
            if self._is_counted:
                form = _BAR if self._is_terminal else _COUNTED
            elif self._is_terminal:
                form = "{desc}"
            return tqdm.format_meter(
                n=self._done,
                total=self._total,
                elapsed=self._clock() - self._since_s,
                ncols=shutil.get_terminal_size().columns - 1 if self._is_terminal else None,
                prefix=self._doing or "",
                bar_format=form,
                ascii=True,  # whatever the terminal can show
            )

    @property
    def _is_counted(self) -> bool:
        return self._done < self._total

    def _draw(self) -> None:
        if self._is_terminal and not self._over.is_set():
            line = self.line()
            print(f"\r{line:{len(self._shown)}}", end="", file=self._stream, flush=True)
            self._shown = line

    def _clear(self) -> None:
        if self._shown:
            print(f"\r{'':{len(self._shown)}}\r", end="", file=self._stream, flush=True)
            self._shown = ""

    def _make_way(self, _: logging.LogRecord) -> bool:
        """A filter that lets all pass: the line is drawn again by what is told next."""
        with self._lock:
            self._clear()
        return True

    def _tell(self) -> None:
        while not self._over.wait(self._every_s):
            with self._lock:
                if self._doing is not None:
                    self.note(self.line())


class ShownLoad(LoadProgress):
    """What loading a pool's models is at, shown."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def begin(self, stage: LoadStage, model: str) -> None:
        super().begin(stage, model)
        self._progress.show(str(self.step))

    def count(self, done_bytes: int, total_bytes: int) -> None:
        super().count(done_bytes, total_bytes)
        self._progress.show(str(self.step), goes_on=True)


def is_live(stream: TextIO) -> bool:
    """Does it show a line that changes?"""
    return stream.isatty() or type(stream).__module__.startswith(_NOTEBOOK)
