"""Progress of a long command, shown on stderr.

Contract: a terminal and a notebook show one line that changes, with a bar where steps are counted,
and log lines above it. Other streams get a line every ten seconds within the `with` block, from a
thread, also during a long step. All methods are safe to call from any thread.
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
_NOTEBOOK = "ipykernel"  # its streams are not terminals, but can show a line that changes
_BAR = "{desc} {bar} {n_fmt}/{total_fmt}, about {remaining} left"
_COUNTED = "{desc}: {n_fmt} of {total_fmt} done in {elapsed}, about {remaining} left"
_UNCOUNTED = "{desc}: {elapsed} so far"


class Progress:
    """A display of what is being done.

    Args:
        doing: the first text to show.
        stream: stderr by default.
        every_s: time between two lines where `stream` is not a terminal.
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
        self._shown = ""  # the line on a terminal
        self._total = self._done = 0
        self._since_s = clock()
        self._lock = threading.RLock()
        self._log_handlers = logging.getLogger().handlers if self._is_terminal else []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show, name="specrouter-progress", daemon=True)

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
        """Count `steps` steps from now on."""
        with self._lock:
            self._total, self._done, self._since_s = steps, 0, self._clock()

    def step(self) -> None:
        """Count one more step as done."""
        with self._lock:
            self._done += 1
            self._draw()

    def show(self, text: str, goes_on: bool = False) -> None:
        """Show what is being done now; with `goes_on` its time continues from before."""
        with self._lock:
            if not (self._is_counted or goes_on):
                self._since_s = self._clock()
            self._doing = text
            self._draw()

    def note(self, text: str) -> None:
        """Print a line that stays."""
        with self._lock:
            self._clear()
            print(text, file=self._stream, flush=True)

    def line(self) -> str:
        """Return the line: what is being done, the count of steps, the time so far, an estimate."""
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
                ascii=True,  # every terminal can show it
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
        """Clear the line before a log line; a filter that passes all records.

        The next update draws the line again.
        """
        with self._lock:
            self._clear()
        return True

    def _show(self) -> None:
        while not self._over.wait(self._every_s):
            with self._lock:
                if self._doing is not None:
                    self.note(self.line())


class ShownLoad(LoadProgress):
    """A `LoadProgress` that shows how far a pool's models are loaded."""

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
    """Return True if the stream can show a line that changes."""
    return stream.isatty() or type(stream).__module__.startswith(_NOTEBOOK)
