"""Fleet: the replicas as the router knows them, and their common limits.

Contract: a replica is alive as long as it sends news. The fleet listens to each one while it is
open; a state counts from the time it was received. A replica that is silent for `silence_s`, or
whose feed ends, is lost: its requests move at once, and the fleet tries to listen to it again. A
fleet belongs to one event loop; names, states and reports may be read from any thread.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal, get_args

from modelpool.errors import ConfigError
from specrouter.cluster.correction import Expected, measured_ms
from specrouter.cluster.link import Feed, ReplicaLink
from specrouter.cluster.prefix_index import SentPrompts
from specrouter.cluster.reports import ReplicaReport, counted_before
from specrouter.cluster.roster import KnownReplica, Roster, Standing
from specrouter.cluster.state import ReplicaState, ReplicaView
from specrouter.config import ClusterConfig
from specrouter.engine.serving import ReplicaFigures
from specrouter.request.errors import OverloadedError

logger = logging.getLogger(__name__)

Cause = Literal["error", "silence", "drain", "lost"]

_LOST = ("lost", "draining", "failed")  # without caches, which a silent replica may still have
_WATCH_S = 0.1  # period of the check for silence
_AGAIN_S = 0.2  # before listening to a lost replica again


class Moved(Exception):
    """Raised when a request has to continue at another replica."""

    def __init__(self, cause: Cause, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause


@dataclass(eq=False)
class RequestInFlight:
    """An attempt at a replica, since `began_s`.

    Attributes:
        scope: the timeout in which its listener runs.
        moved: why it has to leave the replica.
        came: times and numbers of tokens.
    """

    scope: asyncio.Timeout
    began_s: float
    moved: Moved | None = None
    came: list[tuple[float, int]] = field(default_factory=list)

    def note(self, tokens: int) -> None:
        if tokens:
            self.came.append((time.monotonic(), tokens))

    def evict(self, cause: Cause, reason: str) -> None:
        """Make the attempt leave the replica; only the first cause counts."""
        if self.moved is None:
            with suppress(RuntimeError):  # the attempt is ending anyway
                self.scope.reschedule(0.0)
                self.moved = Moved(cause, reason)


@dataclass(eq=False, kw_only=True)
class FleetMember(KnownReplica):
    """A replica of the fleet.

    Attributes:
        past: counts of the replica from before its last restart.
        attempts: attempts at the replica.
        declined: attempts that it declined.
        moves: requests that had to leave it, by cause.
    """

    link: ReplicaLink
    report: ReplicaReport | None = None
    past: ReplicaReport | None = None
    in_flight: set[RequestInFlight] = field(default_factory=set)
    attempts: int = 0
    declined: int = 0
    moves: dict[Cause, int] = field(default_factory=lambda: dict.fromkeys(get_args(Cause), 0))

    def figures(self, now_s: float) -> ReplicaFigures:
        state = self.state if self.standing == "ready" else None
        return ReplicaFigures(
            is_up=self.standing == "ready",
            state_age_s=None if self.reported is None else now_s - self.reported_s,
            running=None if state is None else state.running,
            waiting=None if state is None else state.waiting,
            rows=None if state is None else state.rows,
            kv_share=None if state is None else state.kv_share,
            attempts=self.attempts,
            declined=self.declined,
            moves={str(cause): count for cause, count in self.moves.items()},
        )

    def evict(self, cause: Cause, reason: str) -> None:
        """Make every attempt at the replica continue at another one."""
        for one in list(self.in_flight):
            one.evict(cause, reason)


class Fleet(Roster[FleetMember]):
    """The replicas at the other ends of `links`, at least one."""

    def __init__(self, links: Sequence[ReplicaLink], config: ClusterConfig) -> None:
        super().__init__(FleetMember(name=link.name, link=link) for link in links)
        self._config = config
        self.fingerprint: str | None = None  # the common one, once all have reported
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def all_ready(self, timeout_s: float) -> None:
        """Return when every replica has reported its state.

        Raises:
            ConfigError: their fingerprints differ.
            TimeoutError: one has not reported.
        """
        await self.until(lambda: all(one.state for one in self.members.values()), timeout_s)
        fingerprints = {
            name: member.state.fingerprint
            for name, member in self.members.items()
            if member.state is not None
        }
        if len(set(fingerprints.values())) > 1:
            each = ", ".join(f"{name} {fingerprint}" for name, fingerprint in fingerprints.items())
            reason = (
                "they serve different targets, dtypes or versions, or compute int8, int4 or "
                "recurrent layers on other kinds of device or without a C compiler, and texts "
                "would differ: "
                f"{each}"
            )
            raise ConfigError("cluster.replicas", reason)
        self.fingerprint = next(iter(fingerprints.values()))

    def start(self) -> None:
        """Start listening; call it in the loop that the fleet belongs to."""
        for member in self.members.values():
            self._tasks.append(asyncio.create_task(self._listen(member)))
        self._tasks.append(asyncio.create_task(self._watch()))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def max_request_tokens(self) -> int:
        """Most tokens of a request that every replica can serve, since it may move to any of them.

        It follows from the last states of all replicas, also of lost ones, which are expected back.
        """
        return min(state.max_request_tokens for state in self._states())

    def can_ever_fit(self, tokens: int) -> bool:
        return tokens <= self.max_request_tokens

    def baseline_tpot_ms(self) -> float:
        """Return the fastest replica's baseline, so relative objectives are the same everywhere."""
        return min(state.baseline_tpot_ms for state in self._states())

    def predicted_prefill_ms(self) -> float:
        """Return the slowest replica's time, so an implied TTFT can be attained anywhere."""
        return max(state.prefill_ms for state in self._states())

    def _states(self) -> list[ReplicaState]:
        states = [member.state for member in self.members.values()]
        return [state for state in states if state is not None]

    async def wait_for_change(self, timeout_s: float) -> None:
        """Wait until a replica comes or goes, or the time is up."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Return when the condition holds. Raises `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                await self.wait_for_change(_WATCH_S)

    @asynccontextmanager
    async def attempt(
        self, name: str, prompt_tokens: int, expected: Expected, left_s: float | None
    ) -> AsyncIterator[RequestInFlight]:
        """Run an attempt at a replica within the `with` block, and learn from its times.

        Raises `Moved` as soon as it has to leave the replica, `TimeoutError` after `left_s`.
        """
        member = self.members[name]
        member.attempts += 1
        try:
            async with asyncio.timeout(left_s) as scope:
                attempt = RequestInFlight(scope, time.monotonic())
                member.in_flight.add(attempt)
                member.uncounted[attempt] = prompt_tokens
                try:
                    yield attempt
                finally:
                    member.in_flight.discard(attempt)
                    member.uncounted.pop(attempt, None)
                    times_ms = measured_ms(attempt.began_s, attempt.came)
                    member.experience = member.experience.after(expected, *times_ms)
        except TimeoutError:
            if attempt.moved is not None:
                raise attempt.moved from None
            raise

    async def restart(self, name: str, timeout_s: float) -> None:
        """Empty and replace a replica once all others serve; return when it serves.

        Raises `TimeoutError` if a step takes longer than `timeout_s`, or the error of the restart;
        then the old process serves again, if it still sends news.
        """
        own = self.members[name]
        others = [one for one in self.members.values() if one is not own]
        await self.until(lambda: all(one.standing == "ready" for one in others), timeout_s)
        logger.info("replica %s is being restarted", name)
        self._set(own, "draining", "it is being restarted")
        own.evict("drain", f"{name} is emptied")
        why = "its restart has failed"
        try:
            async with asyncio.timeout(timeout_s):
                await own.link.restart()
            why = "it has been restarted"
        finally:
            own.reported = None
            self._set(own, "lost", why)
        await self.until(lambda: own.standing == "ready", timeout_s)

    async def _listen(self, member: FleetMember) -> None:
        while True:
            why = "its feed has ended"
            try:
                async with aclosing(member.link.feed()) as feed:
                    async for news in feed:
                        self._hear(member, news)
            except Exception as error:
                if _is_cancelled():  # an error of the closing feed has replaced the cancellation
                    raise asyncio.CancelledError from error
                why = f"{type(error).__name__}: {error}"
            if member.standing not in ("failed", "draining"):
                self._set(member, "lost", why)
                member.evict("lost", f"{member.name} is lost: {why}")
            await asyncio.sleep(_AGAIN_S)

    def _hear(self, member: FleetMember, news: Feed) -> None:
        now_s = time.monotonic()
        member.note_state(news.state, now_s)
        if news.report is not None:
            if member.report is not None:
                member.past = counted_before(member.past, member.report, news.report)
            member.report = news.report
        if member.standing == "draining":
            return
        if self.fingerprint not in (None, news.state.fingerprint):
            self._set(
                member,
                "failed",
                "its texts would differ: another target, dtype, version or kind of device",
            )
            member.evict("lost", f"{member.name} has come back as another one")
            return
        if news.state.status == "failed":
            self._set(member, "failed", news.state.failure or "it has stopped")
            member.evict("lost", f"{member.name} has failed: {news.state.failure}")
        elif member.standing != "ready":
            self._set(member, "ready", "")

    async def _watch(self) -> None:
        limit_s, looked_s = self._config.resume.silence_s, time.monotonic()
        while True:
            await asyncio.sleep(_WATCH_S)
            now_s, before_s = time.monotonic(), looked_s
            looked_s = now_s
            if now_s - before_s > limit_s / 2:
                continue  # this process was suspended, and has heard no replica
            for member in self.members.values():
                if member.standing == "ready" and now_s - member.reported_s > limit_s:
                    self._set(member, "silent", f"no news for {limit_s:g} s")
                    member.evict("silence", f"{member.name} is silent for {limit_s:g} s")

    def _set(self, member: FleetMember, standing: Standing, why: str) -> None:
        if member.standing != standing:
            level = logging.INFO if standing in ("ready", "draining") else logging.WARNING
            logger.log(level, "replica %s is %s%s", member.name, standing, why and f": {why}")
            if standing in _LOST:
                member.prompts = SentPrompts()
        member.standing, member.why = standing, why
        self._changed.set()


def _is_cancelled() -> bool:
    """Return True if the running task is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def overload_of(views: Sequence[ReplicaView], max_waiting: int | None) -> OverloadedError | None:
    """Return an error if all replicas are full and `max_waiting` requests wait; else None.

    The error says how many requests wait over all replicas, and when the first replica could give
    one more request a row. `views` are of the replicas that may be chosen, at least one. A free row
    anywhere is room: requests that wait at other replicas do not wait for it.
    """
    there = [view.state.requests + view.sent for view in views]
    if any(count < view.state.rows for count, view in zip(there, views, strict=True)):
        return None
    waiting = sum(there) - sum(view.state.rows for view in views)
    if max_waiting is None or waiting < max_waiting:
        return None
    return OverloadedError(waiting, min(view.state.retry_after_s for view in views))
