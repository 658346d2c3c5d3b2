"""Progress: what a long command is at, on stderr.

Contract: on a terminal a line that changes, with a bar where steps are counted. Elsewhere, within
the `with` block, a line every ten seconds, however long a step takes: a thread writes it. Any
thread may tell what is being done.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from tqdm import tqdm

from modelpool.progress import LoadProgress, LoadStage

_EVERY_S = 10.0
_MANY = 10**6  # steps, which are bytes then
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
        self._is_terminal = self._stream.isatty()
        self._doing = doing
        self._shown = ""  # on a terminal
        self._total = self._done = self._initial = 0
        self._since_s = clock()
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="specrouter-progress", daemon=True)

    def __enter__(self) -> Progress:
        if self._doing is not None:
            self.show(self._doing)
        if not self._is_terminal:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            self._clear()

    def expect(self, steps: int, done: int = 0) -> None:
        """So many steps are counted from now on, until all are done."""
        with self._lock:
            self._total, self._since_s = steps, self._clock()
            self._done = self._initial = done

    def step(self, steps: int = 1) -> None:
        """One more is done, or several."""
        with self._lock:
            self._done += steps
            self._draw()

    def show(self, text: str) -> None:
        """What is being done now."""
        with self._lock:
            if not self._is_counted:
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
                initial=self._initial,
                unit_scale=self._total >= _MANY,
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
        if self._is_terminal:
            line = self.line()
            print(f"\r{line:{len(self._shown)}}", end="", file=self._stream, flush=True)
            self._shown = line

    def _clear(self) -> None:
        if self._shown:
            print(f"\r{'':{len(self._shown)}}\r", end="", file=self._stream, flush=True)
            self._shown = ""

    def _tell(self) -> None:
        while not self._over.wait(self._every_s):
            with self._lock:
                if self._doing is not None:
                    self.note(self.line())


class ShownLoad(LoadProgress):
    """What loading a pool's models is at, shown."""

    is_drawn = True

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def begin(self, stage: LoadStage, model: str) -> None:
        super().begin(stage, model)
        self._progress.show(f"{stage} {model}")

    def count(self, done_bytes: int, total_bytes: int) -> None:
        before = self.step.done_bytes
        super().count(done_bytes, total_bytes)
        if before is None:
            self._progress.expect(total_bytes, done_bytes)
        else:
            self._progress.step(done_bytes - before)
