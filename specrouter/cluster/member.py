"""Member: a replica as the router knows it, and the attempts that are in flight there.

Contract: belongs to the fleet's loop; states and counts may be read from any thread.
"""

import asyncio
import time
from collections.abc import Collection
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal, get_args

from specrouter.cluster.link import Attempt, ReplicaLink, ReplicaReport, Reply
from specrouter.cluster.roster import KnownReplica

Cause = Literal["error", "silence", "drain", "lost"]


class Moved(Exception):
    """A request has to go on at another replica."""

    def __init__(self, cause: Cause, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause


@dataclass(eq=False)
class InFlight:
    """An attempt at a replica, since `began_s`.

    Attributes:
        inbox: of its messages; `Moved` among them ends it.
        is_counted: in the replica's last state.
        came: when tokens came, and how many.
    """

    inbox: "asyncio.Queue[Reply | Moved]"
    prompt_tokens: int
    began_s: float
    is_counted: bool = False
    came: list[tuple[float, int]] = field(default_factory=list)

    def note(self, tokens: int) -> None:
        if tokens:
            self.came.append((time.monotonic(), tokens))

    async def pump(self, link: ReplicaLink, attempt: Attempt) -> None:
        """Brings all replies to the inbox, and at last why there are no more."""
        moved = Moved("error", f"{link.name} ended the stream early")
        try:
            async with aclosing(link.stream(attempt)) as replies:
                async for reply in replies:
                    self.inbox.put_nowait(reply)
        except Exception as error:
            moved = Moved("error", f"{link.name}: {type(error).__name__}: {error}")
        self.inbox.put_nowait(moved)


@dataclass(eq=False, kw_only=True)
class Member(KnownReplica):
    """A replica that runs.

    Attributes:
        past: what it had counted before it began anew.
        moves: requests that had to leave it, by cause; `attempts`, `declined`: that came.
    """

    link: ReplicaLink
    report: ReplicaReport | None = None
    past: ReplicaReport | None = None
    in_flight: set[InFlight] = field(default_factory=set)
    attempts: int = 0
    declined: int = 0
    moves: dict[Cause, int] = field(default_factory=lambda: dict.fromkeys(get_args(Cause), 0))

    @property
    def on_their_way(self) -> Collection[InFlight]:
        return self.in_flight

    @property
    def is_over(self) -> bool:
        """It will not come back."""
        return self.standing == "failed" and not self.link.is_replaced

    def evict(self, cause: Cause, reason: str) -> None:
        """Tells every attempt that is there to go on elsewhere."""
        for one in list(self.in_flight):
            one.inbox.put_nowait(Moved(cause, reason))
