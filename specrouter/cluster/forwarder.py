"""RequestForwarder: brings a sample to a replica, and on to another where that is lost.

Contract: the listener gets every token once, in order, and the end once. Nothing is fenced: a
replica that was taken for dead and was not costs compute, and its tokens are dropped. Belongs to
the loop of the fleet.
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
from specrouter.cluster.fleet import Fleet, InFlight, Member, Moved
from specrouter.cluster.instruments import ClusterAccounts
from specrouter.cluster.link import Attempt, ReplicaLink, Reply
from specrouter.cluster.pairs import Halves, reading
from specrouter.cluster.resume import Progress
from specrouter.cluster.state import Ranking, RoutedRequest
from specrouter.config import ResumeConfig
from specrouter.logs import REQUEST_ID
from specrouter.request.output import UNATTAINABLE, Delta, FinishReason

logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # how often a request without a replica looks whether its time is up
_OVERDUE_S = 1.0  # beyond its time, after which a replica is not waited for to say so

Outcome = Literal["done", "declined", "moved", "handed over"]


@dataclass(frozen=True, kw_only=True)
class ForwardingContext:
    """What all forwarders share."""

    fleet: Fleet
    dispatcher: Dispatcher
    accounts: ClusterAccounts
    config: ResumeConfig
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: frozenset[int]


class RequestForwarder:
    """Args: `listener`: is told all news, in the fleet's loop."""

    def __init__(
        self,
        context: ForwardingContext,
        progress: Progress,
        listener: Callable[[Delta], None],
    ) -> None:
        self._context = context
        self._progress = progress
        self._request_id = REQUEST_ID.get()
        self._listener = listener
        self._has_ended = False
        self._avoided = dict[str, float]()  # replicas that have failed it, and when
        self._failures = 0
        self._tickets: list[str] = []  # of what the first half of a pair has read
        self._declined: str | None = None  # why the last replica that was asked declined
        self._decliner = ""  # which one that was: of a pair, the half

    async def run(self) -> None:
        """To the end; cancelling it cancels the request."""
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
        """Ends it as it stands; nothing happens where it has ended."""
        if not self._has_ended:
            self._end("cancelled", None)

    async def _waited(self) -> bool:
        """For a replica to come; False where the time is up."""
        left_s = self._progress.left_s()
        if left_s == 0.0:
            self._end("timeout", None)
            return False
        await self._context.fleet.wait_for_change(
            _LOOK_S if left_s is None else min(left_s, _LOOK_S)
        )
        return True

    async def _tried(self, ranking: Ranking, routed: RoutedRequest) -> bool:
        """Asks the replicas in turn; False where the request has to be ranked anew."""
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
            # By what replicas have told with their answers since, and by the time that has gone.
            now = self._progress.routed(routed.number)
            self._reject(self._ranked(now) or ranking)
            return True
        return self._failed(self._decliner, self._declined or "no replica takes it") == "done"

    def _routed(self) -> RoutedRequest:
        """As it stands now."""
        return self._progress.routed(next(self._context.dispatcher.numbers))

    def _ranked(self, routed: RoutedRequest) -> Ranking | None:
        return self._context.dispatcher.rank(routed, self._progress.keys, self._avoided)

    def _is_there(self, name: str) -> bool:
        """One that was lost since the ranking is not to be asked: calls to it would wait."""
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
        if may_decline and slack < 0.0:  # its first half is asked for a first token only
            return self._decline(pair[1], f"{name} would be late by {-slack:.0%}")
        self._tickets = []
        first = reading(routed)
        outcome = await self._serve(pair[0], ranking, first, may_decline, why, reads_only=True)
        return await self._gone_on(pair, ranking) if outcome == "handed over" else outcome

    async def _gone_on(self, pair: Halves, ranking: Ranking) -> Outcome:
        """At the half that decodes, from what the other one has read."""
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
        """A part of the sample's way, at one replica.

        Args:
            why: it goes there, where that is not the ranking's reason.
            reads_only: up to its next token; then the other half of a pair goes on.
            kv: tickets of what that other half has read.
        """
        context, progress = self._context, self._progress
        progress.attempts += 1
        number, args = progress.attempts, replace(progress.args(), prefill_only=reads_only)
        routed, expected = context.dispatcher.expected(name, asked, progress.keys)
        if kv:  # nothing is read there, and nothing learned of a first token's time
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

    async def _listen(self, name: str, attempt: Attempt, in_flight: InFlight) -> Outcome:
        """Raises `Moved` where the request has to go on elsewhere."""
        member = self._context.fleet.members[name]
        async with aclosing(_replies(member.link, attempt)) as replies:
            async for reply in replies:
                outcome = self._heard(reply, member, in_flight, attempt.may_decline)
                if outcome is not None:
                    return outcome
        raise Moved("error", f"{name} ended the stream early")

    def _heard(
        self, reply: Reply, member: Member, in_flight: InFlight, may_decline: bool
    ) -> Outcome | None:
        """None: there is more to come. Raises `Moved`."""
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
            told = self._progress.take(delta)
            if told.token_ids or not delta.goes_on:
                self._deliver(told)
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
        """What becomes of the request: one failure too many ends it."""
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
    """Raises `Moved` where the link raises anything."""
    try:
        async with aclosing(link.stream(attempt)) as replies:
            async for reply in replies:
                yield reply
    except Exception as error:
        raise Moved("error", f"{link.name}: {type(error).__name__}: {error}") from error


def _failure_of_replica(delta: Delta) -> str | None:
    """Why a sample has ended, where the replica is to blame, and not the request."""
    output = delta.output
    if output is None or output.error_field is not None:
        return None
    if delta.finish_reason in ("error", "engine_dead"):
        return output.error or "it failed"
    return "it has stopped" if delta.finish_reason == "cancelled" else None
