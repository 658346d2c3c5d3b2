"""RequestForwarder: sends a sample to a replica, and to another one if that is lost.

Contract: the listener gets every token once, in order, and the end once. Nothing is fenced: a
replica that was wrongly considered dead costs compute, and its tokens are dropped. It belongs to
the fleet's loop.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Literal

from transformers import PreTrainedTokenizerBase

from specrouter.cluster.dispatcher import Dispatcher, feasible
from specrouter.cluster.fleet import Fleet, FleetMember, Moved, RequestInFlight
from specrouter.cluster.instruments import ClusterAccounts
from specrouter.cluster.link import Attempt, ReplicaLink, Reply
from specrouter.cluster.pairs import Halves, reading
from specrouter.cluster.resume import StreamProgress
from specrouter.cluster.state import Ranking, RoutedRequest
from specrouter.config import ResumeConfig
from specrouter.logs import REQUEST_ID
from specrouter.request.output import UNATTAINABLE, Delta, FinishReason

logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # period in which a request without a replica checks its time limit
_OVERDUE_S = 1.0  # time beyond the limit that a replica has to report the timeout itself

Outcome = Literal["done", "declined", "moved", "handed over"]


@dataclass(frozen=True, kw_only=True)
class ForwardingContext:
    """Objects that all forwarders share."""

    fleet: Fleet
    dispatcher: Dispatcher
    accounts: ClusterAccounts
    config: ResumeConfig
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: frozenset[int]


class RequestForwarder:
    """A sample on its way through replicas.

    Args:
        context: shared by all forwarders.
        progress: what the sample has received so far.
        listener: gets all deltas, in the fleet's loop.
    """

    def __init__(
        self,
        context: ForwardingContext,
        progress: StreamProgress,
        listener: Callable[[Delta], None],
    ) -> None:
        self._context = context
        self._progress = progress
        self._request_id = REQUEST_ID.get()
        self._listener = listener
        self._has_ended = False
        self._avoided = dict[str, float]()  # replicas that have failed it, and when
        self._failures = 0
        self._tickets: list[str] = []  # of KV that the first half of a pair has read
        self._declined: str | None = None  # why the last replica declined
        self._decliner = ""  # name of that replica; of a pair, the half

    async def run(self) -> None:
        """Serve the sample to its end; cancelling this coroutine cancels the request."""
        try:
            while True:
                routed = self._routed()
                ranking = self._ranked(routed)
                if ranking is not None:
                    if await self._tried(ranking, routed):
                        return
                elif not await self._waited():
                    return
        except asyncio.CancelledError:
            self.stop()
            raise
        except Exception as error:
            logger.exception("request %s: its forwarder has failed", self._request_id)
            self._end("error", f"{type(error).__name__}: {error}")

    def stop(self) -> None:
        """End the sample with what it has, unless it has ended."""
        if not self._has_ended:
            self._end("cancelled", None)

    async def _waited(self) -> bool:
        """Wait for a change of the replicas; return False if the request's time is up."""
        left_s = self._progress.left_s()
        if left_s == 0.0:
            self._end("timeout", None)
            return False
        await self._context.fleet.wait_for_change(
            _LOOK_S if left_s is None else min(left_s, _LOOK_S)
        )
        return True

    async def _tried(self, ranking: Ranking, routed: RoutedRequest) -> bool:
        """Ask the replicas in turn; return False if the request has to be ranked again."""
        asked = self._context.dispatcher.may_decline(ranking, routed)
        rejects = bool(asked) and self._progress.rejects
        offers = [(name, True) for name in asked]
        if not rejects:
            offers += [(name, False) for name in ranking.order]
        for name, may_decline in offers:
            if not self._is_there(name):
                return False
            outcome = await self._attempt(name, ranking, routed, may_decline)
            if outcome != "declined":
                return outcome == "done"
        if rejects:
            # Ranked again, with the replicas' states from their answers, and the elapsed time.
            now = self._progress.routed(routed.number)
            self._reject(self._ranked(now) or ranking)
            return True
        return self._failed(self._decliner, self._declined or "no replica takes it") == "done"

    def _routed(self) -> RoutedRequest:
        """Return the request in its present state, for a new decision."""
        return self._progress.routed(next(self._context.dispatcher.numbers))

    def _ranked(self, routed: RoutedRequest) -> Ranking | None:
        return self._context.dispatcher.rank(routed, self._progress.keys, self._avoided)

    def _is_there(self, name: str) -> bool:
        """Return True if the replica is ready; a call to one that was lost would wait."""
        members = self._context.fleet.members
        halves = self._context.dispatcher.pairs.get(name, (name,))
        return all(members[half].standing == "ready" for half in halves)

    async def _attempt(
        self, name: str, ranking: Ranking, routed: RoutedRequest, may_decline: bool
    ) -> Outcome:
        asks = "next in order" if may_decline else "best effort"
        why = f"{asks}, since {self._declined}" if self._declined else None
        pair = self._context.dispatcher.pairs.get(name)
        if pair is None:
            return await self._serve(name, ranking, routed, may_decline, why)
        slack = ranking.terms.get(name, {}).get("slack", 0.0)
        if may_decline and slack < 0.0:  # its first half checks only the first token
            return self._decline(pair[1], f"{name} would be late by {-slack:.0%}")
        self._tickets = []
        first = reading(routed)
        outcome = await self._serve(pair[0], ranking, first, may_decline, why, reads_only=True)
        return await self._gone_on(pair, ranking) if outcome == "handed over" else outcome

    async def _gone_on(self, pair: Halves, ranking: Ranking) -> Outcome:
        """Continue at the decode half of a pair, with the KV that the prefill half has read."""
        prefill, decode = pair
        if not self._is_there(decode):
            return "moved"
        routed, kv = self._routed(), tuple(self._tickets)
        if kv:
            routed = replace(routed, prompt_tokens=1)
        why = f"goes on from what {prefill} has read"
        outcome = await self._serve(decode, ranking, routed, False, why, kv=kv)
        if outcome != "declined":
            return outcome
        return self._failed(decode, self._declined or f"{decode} declined")

    async def _serve(
        self,
        name: str,
        ranking: Ranking,
        asked: RoutedRequest,
        may_decline: bool,
        why: str | None,
        reads_only: bool = False,
        kv: tuple[str, ...] = (),
    ) -> Outcome:
        """Serve a part of the sample at one replica.

        Args:
            name: the replica.
            ranking: the ranking in which it was chosen.
            asked: the request as the policy saw it.
            may_decline: the replica may decline.
            why: reason for this replica, if it is not the ranking's.
            reads_only: only up to the next token; then the other half of a pair continues.
            kv: tickets of the KV that the other half has read.
        """
        context, progress = self._context, self._progress
        progress.attempts += 1
        number, args = progress.attempts, replace(progress.args(), prefill_only=reads_only)
        routed, expected = context.dispatcher.expected(name, asked, progress.keys)
        if kv:  # no prompt is read there, so the TTFT teaches nothing
            expected = replace(expected, first_ms=0.0)
        attempt = Attempt(
            args=args,
            routed=routed,
            number=number,
            request_id=self._request_id,
            may_decline=may_decline,
            kv=kv,
            correction=expected.correction,
        )
        named = {"request_id": self._request_id, "sample": progress.sample, "attempt": number}
        context.dispatcher.keep(ranking, name, asked, named, why)
        left_s, tokens = progress.left_s(), routed.prompt_tokens
        overdue_s = None if left_s is None else left_s + _OVERDUE_S
        try:
            async with context.fleet.attempt(name, tokens, expected, overdue_s) as in_flight:
                return await self._listen(name, attempt, in_flight)
        except Moved as moved:
            return self._moved(name, moved)
        except TimeoutError:
            self._end("timeout", None)
            return "done"

    async def _listen(self, name: str, attempt: Attempt, in_flight: RequestInFlight) -> Outcome:
        """Process the replies of an attempt. Raises `Moved` if the request must move."""
        member = self._context.fleet.members[name]
        async with aclosing(_replies(member.link, attempt)) as replies:
            async for reply in replies:
                outcome = self._heard(reply, member, in_flight, attempt.may_decline)
                if outcome is not None:
                    return outcome
        raise Moved("error", f"{name} ended the stream early")

    def _heard(
        self, reply: Reply, member: FleetMember, in_flight: RequestInFlight, may_decline: bool
    ) -> Outcome | None:
        """Process one reply; return None if more will come. Raises `Moved`."""
        name = member.name
        if reply.state is not None:
            member.note(reply.state, time.monotonic())
            member.uncounted.pop(in_flight, None)
        if reply.declined is not None:
            if reply.state is not None and reply.state.status == "failed":
                raise Moved("error", f"{name}: {reply.declined}")
            return self._decline(name, reply.declined)
        if reply.state is not None:
            self._context.dispatcher.note_sent(name, self._progress.keys)
        self._tickets += reply.kv
        for delta in reply.deltas:
            if may_decline and delta.output and delta.output.error_field == "unattainable":
                return self._decline(name, delta.output.error or "")
            failure = _failure_of_replica(delta)
            if failure is not None:
                raise Moved("error", f"{name}: {failure}")
            in_flight.note(len(delta.token_ids))
            shown = self._progress.take(delta)
            if shown.token_ids or not delta.goes_on:
                self._deliver(shown)
            if delta.finish_reason is not None:
                return "handed over" if delta.goes_on else "done"
        return None

    def _decline(self, name: str, why: str) -> Outcome:
        self._context.fleet.members[name].declined += 1
        self._declined, self._decliner = f"{name} declined: {why}", name
        return "declined"

    def _moved(self, name: str, moved: Moved) -> Outcome:
        self._context.fleet.members[name].moves[moved.cause] += 1
        logger.log(
            logging.INFO if moved.cause == "drain" else logging.WARNING,
            "attempt %d has to go on elsewhere: %s",
            self._progress.attempts,
            moved,
            extra={"request_id": self._request_id},
        )
        self._declined = None
        return "moved" if moved.cause == "drain" else self._failed(name, str(moved))

    def _failed(self, name: str, cause: str) -> Outcome:
        """Count a failure, and return its outcome: one too many ends the request."""
        self._failures += 1
        self._avoided[name] = time.monotonic()
        if self._failures <= self._context.config.limit:
            return "moved"
        self._end("error", cause)
        return "done"

    def _reject(self, ranking: Ranking) -> None:
        delta = self._last("error", f"{UNATTAINABLE} at any replica now: {self._declined}")
        assert delta.output is not None
        output = replace(delta.output, feasible=feasible(ranking))
        self._deliver(replace(delta, output=output))

    def _end(self, reason: FinishReason, error: str | None) -> None:
        self._deliver(self._last(reason, error))

    def _deliver(self, delta: Delta) -> None:
        if self._has_ended:
            return
        if delta.output is not None:
            self._has_ended = True
            try:
                self._context.accounts.ended(delta.output, self._progress.elapsed_s())
            except Exception:
                logger.exception("request %s is missing in the accounts", self._request_id)
        try:
            self._listener(delta)
        except RuntimeError as error:  # its event loop is closed
            logger.debug("a listener is gone: %s", error)

    def _last(self, reason: FinishReason, error: str | None) -> Delta:
        context = self._context
        return self._progress.ended(reason, error, context.tokenizer, context.eos_token_ids)


async def _replies(link: ReplicaLink, attempt: Attempt) -> AsyncGenerator[Reply]:
    """Yield the link's replies. Raises `Moved` for any error of the link."""
    try:
        async with aclosing(link.stream(attempt)) as replies:
            async for reply in replies:
                yield reply
    except Exception as error:
        raise Moved("error", f"{link.name}: {type(error).__name__}: {error}") from error


def _failure_of_replica(delta: Delta) -> str | None:
    """Return why a sample has ended if the replica is the cause, not the request; else None."""
    output = delta.output
    if output is None or output.error_field is not None:
        return None
    if delta.finish_reason in ("error", "engine_dead"):
        return output.error or "it failed"
    return "it has stopped" if delta.finish_reason == "cancelled" else None
