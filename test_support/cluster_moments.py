"""The moments of a request's way through a stream pair, at which something can be made to happen.

Contract: a moment is just before the message that it is named by is passed on. Whoever is told of
it may raise: then the message is lost.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Literal, get_args

from specrouter.cluster.link import Attempt, Feed, ReplicaLink, Reply

Moment = Literal[
    "the prompt is sent",
    "the prompt is being read",
    "the first token comes",
    "all has been read",
    "the rest is sent",
    "the rest is taken",
    "the rest goes on",
    "the rest is decoded",
    "the end comes",
]
MOMENTS: tuple[Moment, ...] = get_args(Moment)
At = Callable[[Moment], None]


class WatchedLink:
    """Args: `at`: told of every moment of requests that two halves serve, in the fleet's loop."""

    def __init__(self, link: ReplicaLink, at: At) -> None:
        self._link = link
        self._at = at

    @property
    def name(self) -> str:
        return self._link.name

    def feed(self) -> AsyncGenerator[Feed]:
        return self._link.feed()

    async def stream(self, attempt: Attempt) -> AsyncGenerator[Reply]:
        reads, goes_on, seen = attempt.args.prefill_only, bool(attempt.kv), 0
        if reads or goes_on:
            self._at("the prompt is sent" if reads else "the rest is sent")
        async with aclosing(self._link.stream(attempt)) as replies:
            async for reply in replies:
                moments = _read(reply) if reads else _decoded(reply, seen)
                for moment in moments if reads or goes_on else ():
                    self._at(moment)
                seen += sum(len(delta.token_ids) for delta in reply.deltas)
                yield reply

    async def restart(self) -> None:
        await self._link.restart()


def _read(reply: Reply) -> tuple[Moment, ...]:
    """In their order: where the loop is slow, one message brings the first token and the end."""
    moments: list[Moment] = []
    if any(delta.token_ids for delta in reply.deltas):
        moments.append("the first token comes")
    if any(delta.goes_on for delta in reply.deltas):
        moments.append("all has been read")
    return tuple(moments) or (("the prompt is being read",) if reply.kv else ())


def _decoded(reply: Reply, seen: int) -> tuple[Moment, ...]:
    """In their order. `seen`: tokens that have come."""
    moments: list[Moment] = []
    if reply.state is not None and not reply.deltas:
        moments.append("the rest is taken")
    if any(delta.token_ids for delta in reply.deltas):
        moments.append("the rest is decoded" if seen else "the rest goes on")
    if any(delta.finish_reason is not None for delta in reply.deltas):
        moments.append("the end comes")
    return tuple(moments)
