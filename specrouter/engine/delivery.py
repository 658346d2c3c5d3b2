"""Delivery: hands a cycle's tokens over to the requests, and ends those that are done.

Contract: one request that cannot take its tokens ends alone. Belongs to the engine's thread.
"""

import logging

from specrouter.cycle import Commit, CycleResult
from specrouter.engine.decode_counts import DecodeCounts, Gain
from specrouter.engine.request_book import RequestBook
from specrouter.execution.fault_guard import FaultGuard
from specrouter.request.output import Delta
from specrouter.request.running import RunningRequest, last_delta

logger = logging.getLogger(__name__)


class Delivery:
    def __init__(self, book: RequestBook, counts: DecodeCounts, faults: FaultGuard) -> None:
        self._book = book
        self._counts = counts
        self._faults = faults

    def deliver(self, result: CycleResult, budget_nodes: int | None) -> None:
        """It is counted before anybody hears of it. `budget_nodes`: see `CyclePlan`."""
        book = self._book
        rows = [(book.running[commit.row], commit) for commit in result.commits]
        news = [(request, commit, _delta_of(request, commit)) for request, commit in rows]
        self._faults.each(
            "accounts",
            self._hand_out,
            lambda: self._counts.record([_gain(*each) for each in news], budget_nodes),
        )
        for request, _, delta in news:
            if request.finished:
                book.conclude(request, delta)
            else:
                request.handle.deliver(delta)
        for row, error in result.errors.items():
            if row in book.running:  # else its text has ended before the place that failed
                book.end(book.running[row], "error", error)

    def _hand_out(self) -> None:
        """What was read since the last cycle for requests whose texts go on elsewhere."""
        for row, request in self._book.running.items():
            if request.spec.prefill_only:
                part = self._book.executor.hand_over.read_since(row, request.handed_tokens)
                if part is not None:
                    request.handed_tokens = part.stop
                    request.handle.deliver(Delta(index=request.spec.sample, kv=part))


def _delta_of(request: RunningRequest, commit: Commit) -> Delta:
    """What a request makes of its tokens. One whose text cannot be made ends, and no other."""
    try:
        return request.accept(
            commit.tokens,
            commit.chain,
            commit.logprobs,
            commit.prompt_logprobs,
            commit.drafted,
            commit.draft,
        )
    except Exception as error:
        logger.exception("request %d cannot go on", request.handle.request_id)
        return last_delta(request, "error", f"the tokens could not be made text: {error}")


def _gain(request: RunningRequest, commit: Commit, delta: Delta) -> Gain:
    tokens, produced = len(commit.tokens), len(delta.token_ids)
    return Gain(commit.chain, commit.drafted, tokens, produced, request.last_gap_s)
