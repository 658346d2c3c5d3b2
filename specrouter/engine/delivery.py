"""Delivery: hands a cycle's tokens over to the requests, and ends those that are done.

Contract: one request that cannot take its tokens ends alone. Belongs to the engine's thread.
"""

import logging
from collections.abc import Sequence

from specrouter.cycle import Commit, CycleResult
from specrouter.engine.decode_counts import DecodeCounts, Gain
from specrouter.engine.quarantine import Quarantine
from specrouter.engine.request_book import RequestBook
from specrouter.execution.fault_guard import FaultGuard
from specrouter.request.output import Delta
from specrouter.request.running import RunningRequest, last_delta

logger = logging.getLogger(__name__)

News = list[tuple[RunningRequest, Commit, Delta]]


class Delivery:
    def __init__(
        self,
        book: RequestBook,
        quarantine: Quarantine,
        counts: DecodeCounts,
        faults: FaultGuard,
    ) -> None:
        self._book = book
        self._quarantine = quarantine
        self._counts = counts
        self._faults = faults

    def deliver(self, result: CycleResult, cycle: int, budget_nodes: int | None) -> None:
        """`budget_nodes`: see `CyclePlan`."""
        book = self._book
        with self._faults.part("prefixes"):
            self._hand_out()
        for request, _, delta in self._accept(result.commits, budget_nodes):
            if request.finished:
                book.conclude(request, delta)
            else:
                request.handle.deliver(delta)
        for row, error in result.errors.items():
            if row in book.running:  # else its text has ended before the place that failed
                book.end(book.running[row], "error", error)
        with self._faults.part("quarantine"):
            failed = self._quarantine.add_all(result.failures, cycle)
            well = {name for commit in result.commits for name in commit.chain[:-1]}
            self._quarantine.forgive(well - failed)

    def _hand_out(self) -> None:
        """What was read since the last cycle for requests whose texts go on elsewhere."""
        for row, request in self._book.running.items():
            if request.spec.prefill_only:
                part = self._book.executor.hand_over.read_since(row, request.handed_tokens)
                if part is not None:
                    request.handed_tokens = part.stop
                    request.handle.deliver(Delta(index=request.spec.sample, kv=part))

    def _accept(self, commits: Sequence[Commit], budget_nodes: int | None) -> News:
        """What the requests make of a cycle's tokens; it is counted before anybody hears of it."""
        news = []
        for commit in commits:
            request = self._book.running[commit.row]
            news.append((request, commit, _delta_of(request, commit)))
        with self._faults.part("learning"):
            self._counts.record([_gain(*each) for each in news], budget_nodes)
        return news


def _delta_of(request: RunningRequest, commit: Commit) -> Delta:
    """What a request makes of its tokens. One whose text cannot be made ends, and no other."""
    try:
        return request.accept(
            commit.tokens, commit.chain, commit.logprobs, commit.prompt_logprobs, commit.drafted
        )
    except Exception as error:
        logger.exception("request %d cannot go on", request.handle.request_id)
        return last_delta(request, "error", f"the tokens could not be made text: {error}")


def _gain(request: RunningRequest, commit: Commit, delta: Delta) -> Gain:
    tokens, produced = len(commit.tokens), len(delta.token_ids)
    return Gain(commit.chain, commit.drafted, tokens, produced, request.last_gap_s)
