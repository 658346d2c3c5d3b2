"""FaultGuard: around what no request may depend on: plans, drafts, accounts and times.

A phase of the engine has one boundary, and what fails inside costs what that phase is for, as noted
at `Part`. A failure is counted by part (the metric `specrouter_control_faults_total`), and the log
has one line a minute for each part.
RowGuard: around what concerns one row. A failure there ends that row's request, and no other.

Both leave a `BaseException` alone that is no `Exception`.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Literal, get_args

logger = logging.getLogger(__name__)

Part = Literal[
    "planning",  # view, admission, planner, scheduler: the next cycles run with the target alone
    "selection",  # of the drafted nodes that the target verifies: the same
    "drafting",  # all that a chain does before the target: its group decodes with the target alone
    "evaluation",  # of an idle drafter
    "feedback",  # what verifications say of drafters
    "timing",  # of forwards and stages
    "accounts",  # what cycles teach, totals, records, meters, objectives: each fact by itself
    "prefixes",  # that are shared: each request reads its own prompt
    "rows",  # what is done for several rows at once, and the closing of rows
]
_SILENT_S = 60.0  # after a line about a part


class FaultGuard:
    """`with guard.part("timing"): ...` Thread-safe; `counts` may be read anywhere.

    Attributes: `counts`: failures so far, of every part.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(get_args(Part), 0))
        self._clock = clock
        self._told_s: dict[str, float] = {}
        self._lock = threading.Lock()
        self._parts = {part: _Guarded(self, part) for part in get_args(Part)}

    def part(self, part: Part) -> "_Guarded":
        return self._parts[part]

    def each(self, part: Part, *tasks: Callable[[], object]) -> None:
        """Runs tasks in turn; one that fails costs no other."""
        for task in tasks:
            with self.part(part):
                task()

    def note(self, part: Part, error: BaseException) -> None:
        """A failure that was caught elsewhere."""
        now_s = self._clock()
        with self._lock:
            self.counts[part] = count = self.counts[part] + 1
            is_new = now_s - self._told_s.get(part, -_SILENT_S) >= _SILENT_S
            if is_new:
                self._told_s[part] = now_s
        if is_new:
            line = "%s failed (%d times so far); requests go on without it"
            logger.error(line, part, count, exc_info=error)


class _Guarded:
    """Has no state: it may be entered again inside itself."""

    def __init__(self, guard: FaultGuard, part: Part) -> None:
        self._guard = guard
        self._part: Part = part

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._guard.note(self._part, error)
        return True


class RowGuard:
    """`with RowGuard(errors, row, "its text"): ...`: a failure is put down to the row.

    Args:
        errors: by row, why it cannot go on; the first reason stays.
        what: failed, as the request is told.
    """

    def __init__(self, errors: dict[int, str], row: int, what: str) -> None:
        self._errors = errors
        self._row = row
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        if self._row not in self._errors:
            logger.error("row %d cannot go on: %s failed", self._row, self._what, exc_info=error)
            self._errors[self._row] = f"{self._what} failed: {type(error).__name__}: {error}"
        return True
