"""Steps of a long measurement, each saved to a file at once, so that it goes on where it ended.

Contract: a step that was saved is not run again. No step begins that would not end in time; who
runs the same command again goes on.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class OutOfTimeError(Exception):
    """The next step would take too long."""


class Saved:
    """Args:
    path: of the file, JSON of every step by its name; None keeps nothing.
    seconds: that may be spent from now on; None: any.
    """

    def __init__(self, path: Path | None, seconds: float | None = None) -> None:
        self._path = path
        self._until_s = None if seconds is None else time.monotonic() + seconds
        self.steps: dict[str, Any] = {}
        if path is not None and path.is_file():
            self.steps = json.loads(path.read_text(encoding="utf-8"))

    def step(self, name: str, takes_s: float, run: Callable[[], T]) -> T:
        """What it came to, as JSON has it. Raises `OutOfTimeError`."""
        if name not in self.steps:
            if self._until_s is not None and time.monotonic() + takes_s > self._until_s:
                raise OutOfTimeError(name)
            self.steps[name] = run()
            if self._path is not None:
                new = self._path.with_suffix(".new")
                new.write_text(json.dumps(self.steps, indent=1), encoding="utf-8")
                new.replace(self._path)
        found: T = self.steps[name]
        return found
