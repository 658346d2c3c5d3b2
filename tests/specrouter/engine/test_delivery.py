"""Tokens reach their requests. Faults on the way: `test_engine`."""

from types import SimpleNamespace
from typing import Any

from specrouter.cycle import Commit, CycleResult
from specrouter.engine.delivery import Delivery
from specrouter.execution.fault_guard import FaultGuard
from specrouter.request.output import Delta

PAIR = ("small", "target")


class Request:
    def __init__(self, row: int, ends_with: int | None = None) -> None:
        self.row = row
        self.told: list[Delta] = []
        self.handle = SimpleNamespace(request_id=row, deliver=self.told.append)
        self.spec = SimpleNamespace(token_ids=(1,), seed=0, sample=0, objective=None)
        self.finished = False
        self.last_gap_s = 0.01
        self._ends_with = ends_with

    def accept(self, tokens: list[int], *_: Any) -> Delta:
        self.finished = tokens[-1] == self._ends_with
        return Delta(
            text=str(tokens), token_ids=tokens, finish_reason="stop" if self.finished else None
        )


class Bench:
    def __init__(self, requests: list[Request]) -> None:
        self.concluded: list[tuple[int, Delta]] = []
        self.ended: list[tuple[int, str | None]] = []
        self.gains: list[Any] = []
        running = {request.row: request for request in requests}

        def conclude(request: Request, delta: Delta) -> None:
            self.concluded.append((request.row, delta))
            del running[request.row]

        def record(gains: list[Any], budget: int | None) -> None:
            self.gains += gains

        book: Any = SimpleNamespace(
            running=running,
            conclude=conclude,
            end=lambda request, reason, error: self.ended.append((request.row, error)),
        )
        counts: Any = SimpleNamespace(record=record)
        self.delivery = Delivery(book, counts, FaultGuard())


def test_a_row_with_an_error_ends_after_its_tokens_unless_they_ended_its_text() -> None:
    bench = Bench([Request(0), Request(1, ends_with=9)])
    commits = [Commit(row=0, tokens=[5], chain=PAIR), Commit(row=1, tokens=[9], chain=PAIR)]
    bench.delivery.deliver(CycleResult(commits=commits, errors={0: "bad", 1: "bad"}), None)
    assert bench.ended == [(0, "bad")]
