"""Requests begin and end once each, whatever of their own fails."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from specrouter.engine.request_book import RequestBook
from specrouter.engine.slo_accounts import AdmissionCounts, SloAccounts
from specrouter.execution.fault_guard import FaultGuard
from specrouter.request.output import Delta
from specrouter.slo.admission import Admission


class Rows:
    """`closed`: rows that were freed; `kept`: those whose memory is."""

    def __init__(self) -> None:
        self.free = [0, 1]
        self.closed: list[int] = []
        self.kept: list[int] = []
        self.copied = 7
        self.gained: list[int] = []
        self.prefixes = self

    def inherited(self, row: int) -> int:
        return self.copied

    def follow(self) -> list[int]:
        return self.gained

    def allocate(self, spec: Any) -> int | None:
        return self.free.pop(0) if self.free else None

    def open(self, row: int, spec: Any) -> None:
        pass

    prepare = open

    def close(self, row: int, keep: bool = False) -> None:
        self.closed.append(row)
        self.kept += [row] * keep
        self.free.append(row)


class Handle:
    def __init__(self, number: int) -> None:
        self.request_id = number
        self.is_cancelled = self.is_done = False
        self.log_extra: dict[str, Any] = {"request_id": None}
        self.deltas: list[Delta] = []

    def deliver(self, delta: Delta) -> bool:
        first, self.is_done = not self.is_done, True
        self.deltas.append(delta)
        return first


class Request:
    """`late` may be an error, as `output` may."""

    def __init__(self, name: str, number: int) -> None:
        self.spec: Any = SimpleNamespace(token_ids=[5] * 8, kv=None)
        self.continuation: Any = name
        self.objective = None
        self.has_objective = False
        self.is_declined = self.rejects = self.is_promised = self.finished = False
        self.handle = Handle(number)
        self.row: int | None = None
        self.admission_key = self.submitted_s = float(number)
        self.rank, self.place, self.gave_way = 0.0, math.inf, False
        self.produced_tokens, self.preemptions, self.cached_tokens = 1, 0, 0
        self.pace: Any = SimpleNamespace(stages_before=0)
        self.late: bool | Exception = False

    @property
    def order(self) -> tuple[float, float]:
        return self.rank, self.place

    @property
    def is_late(self) -> bool:
        if isinstance(self.late, Exception):
            raise self.late
        return self.late

    def finish(self, reason: Any, error: str | None = None) -> Delta:
        output: Any = SimpleNamespace(metrics=None, finish_reason=reason, error=error)
        return Delta(finish_reason=reason, output=output)

    @property
    def ends(self) -> list[tuple[str | None, str | None]]:
        outputs = [(one.finish_reason, one.output) for one in self.handle.deltas]
        return [(reason, output.error if output else None) for reason, output in outputs]


class Accounts:
    def note(self, *_: Any, **__: Any) -> None:
        pass

    record = note_admission = note


def book_of(names: str) -> tuple[Any, list[Request]]:
    parts: dict[str, Any] = {"executor": Rows(), "meter": Accounts(), "slo_accounts": Accounts()}
    book: Any = RequestBook(faults=FaultGuard(), **parts)
    requests = [Request(name, number) for number, name in enumerate(names)]
    for request in requests:
        book.waiting.push(request)
    return book, requests


def test_what_a_request_did_not_have_to_read_is_noted() -> None:
    book, (first, second) = book_of("ab")
    second.preemptions = 1  # what it finds now is its own
    book.admit(1, [first, second])
    assert (first.cached_tokens, second.cached_tokens) == (7, 0)
    book.executor.copied, book.executor.gained = 12, [0, 1]
    book.follow()
    assert (first.cached_tokens, second.cached_tokens) == (12, 0)


def test_what_was_read_is_kept_unless_the_request_has_failed() -> None:
    book, (first, second) = book_of("ab")
    book.admit(1, [first, second])
    book.end(first, "cancelled")
    book.end(second, "error", "a reason")
    assert (book.executor.closed, book.executor.kept) == ([0, 1], [0])


def test_whoever_is_given_a_row_is_counted_where_policies_rest_or_their_plan_fails_too() -> None:
    book, (first, second) = book_of("ab")
    book.slo_accounts = SloAccounts()
    second.is_declined = True
    book.admit(3, [second])
    book.follow_admission(4, Admission(admitted=(0,)), {0: first})
    assert book.slo_accounts.admissions() == {"none": AdmissionCounts(best_effort=2)}
    told = [(one.cycle, one.request, one.outcome) for one in book.admissions.records]
    assert told == [(3, 1, "best_effort")]
    assert book.counts.figures().prompt_tokens == 16


def test_who_leaves_is_ended_with_its_reason() -> None:
    book, (cancelled, late, odd, stays) = book_of("abcd")
    book.admit(1, [late, odd])
    cancelled.handle.is_cancelled = True
    late.late, odd.late = True, OverflowError("its clock")
    book.retire()
    assert cancelled.ends == [("cancelled", None)]
    assert late.ends == [("timeout", None)]
    [(reason, error)] = odd.ends
    assert reason == "error"
    assert "its clock" in (error or "")
    assert (list(book.waiting), book.running) == ([stays], {})


def test_of_thousands_that_wait_it_is_looked_now_and_then_who_leaves() -> None:
    book, requests = book_of("a" * 1000)
    now_s = 1.0
    book.clock = lambda: now_s
    running, waiting = requests[:2]
    book.admit(1, [running])
    book.retire()
    running.handle.is_cancelled = waiting.handle.is_cancelled = True
    now_s = 1.1
    book.retire()
    assert (running.ends, waiting.ends) == ([("cancelled", None)], [])
    now_s = 1.3
    book.retire()
    assert waiting.ends == [("cancelled", None)]
    assert len(book.waiting) == 998


def test_an_engine_that_failed_tells_each_once_whether_it_ran_or_waited() -> None:
    book, (running, waiting) = book_of("ab")
    book.admit(1, [running])
    book.abandon("it crashed", [])
    book.abandon("again", [waiting])
    assert running.ends == waiting.ends == [("engine_dead", "it crashed")]


@pytest.mark.parametrize(
    ("is_promised", "kept", "reason", "counts"),
    [
        (True, False, "length", True),
        (True, False, "cancelled", False),  # its caller's doing
        (False, False, "length", False),  # nothing was promised
        (True, None, "length", False),  # nothing to be judged
    ],
)
def test_a_promise_that_was_not_kept_counts(
    is_promised: bool, kept: bool | None, reason: Any, counts: bool
) -> None:
    book, (request,) = book_of("a")
    book.follow_admission(
        1, Admission(admitted=(0,), promised=frozenset({0} if is_promised else ())), {0: request}
    )
    assert request.is_promised == is_promised
    output: Any = SimpleNamespace(
        metrics=SimpleNamespace(attained=kept, output_tokens=3),
        finish_reason=reason,
        error=None,
    )
    book.conclude(request, Delta(finish_reason=reason, output=output))
    assert bool(book.promises.broken) == counts
