"""Guards that catch failures: in work that no request may depend on, and in work for one row.

`FaultGuard` is for plans, drafts, accounts and times. Each phase of the engine is one part; a
failure costs the part's result, as noted at `Part`. Failures are counted by part (the metric
`specrouter_control_faults_total`), and the log has at most one line a minute for each part.
`RowGuard` is for work for one row: a failure ends that row's request, and no other.

Both let a `BaseException` that is no `Exception` pass.
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
    "selection",  # of the nodes that the target verifies: the same
    "drafting",  # a chain's work before the target: its group decodes with the target alone
    "evaluation",  # of an idle drafter
    "feedback",  # statistics of acceptance
    "timing",  # of forwards and stages
    "accounts",  # learning, totals, records, meters, objectives: each by itself
    "prefixes",  # shared ones: each request then reads its own prompt
    "rows",  # work for several rows at once, and the closing of rows
]
_SILENT_S = 60.0  # least time between two log lines about a part


class FaultGuard:
    """A guard that catches and counts failures: `with guard.part("timing"): ...`; thread-safe.

    Attributes:
        counts: failures so far, by part; any thread may read it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(get_args(Part), 0))
        self._clock = clock
        self._logged_s: dict[str, float] = {}
        self._lock = threading.Lock()
        self._parts = {part: _Guarded(self, part) for part in get_args(Part)}

    def part(self, part: Part) -> "_Guarded":
        return self._parts[part]

    def each(self, part: Part, *tasks: Callable[[], object]) -> None:
        """Run tasks in turn, also after one has failed."""
        for task in tasks:
            with self.part(part):
                task()

    def note(self, part: Part, error: BaseException) -> None:
        """Count and log a failure that was caught elsewhere."""
        now_s = self._clock()
        with self._lock:
            self.counts[part] = count = self.counts[part] + 1
            is_new = now_s - self._logged_s.get(part, -_SILENT_S) >= _SILENT_S
            if is_new:
                self._logged_s[part] = now_s
        if is_new:
            line = "%s failed (%d times so far); requests go on without it"
            logger.error(line, part, count, exc_info=error)


class _Guarded:
    """The context of one part; it has no state, so it may be nested in itself."""

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
    """A guard that notes a failure as the row's error: `with RowGuard(errors, row, "its text"):`.

    Args:
        errors: error messages by row; the first one of a row stays.
        row: the row that the work is for.
        what: name of the work, for the message.
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
