"""ReplicaLink: the connection to one replica, in this process or on another machine.

Contract: if a replica is gone, its feed ends, with or without an exception, and its streams end
with an exception. If it hangs, neither happens: the listener needs a timeout. Closing a stream
cancels its request without waiting for the replica.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from specrouter.cluster.correction import UNCORRECTED, Correction
from specrouter.cluster.reports import ReplicaReport
from specrouter.cluster.state import ReplicaState, RoutedRequest
from specrouter.engine.request import Request
from specrouter.request.output import Delta


class ReplicaLostError(RuntimeError):
    """Raised when there is no replica at the other end, for now."""


@dataclass(frozen=True)
class Feed:
    """Periodic news of a replica, with a `report` in some of them."""

    state: ReplicaState
    report: ReplicaReport | None = None


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One sample of a request, continued from earlier attempts.

    Attributes:
        args: prompt and `generated` as token ids, with seed and sample.
        routed: the request, without what the replica has read already as far as the router knows.
        number: number of the attempt, from 1 on, for the log.
        request_id: id of the HTTP request, for the log.
        may_decline: the replica may decline if it cannot attain the objective.
        kv: tickets of KV that another replica has read for it.
        correction: correction of the replica's predictions, from its measured times.
    """

    args: Request
    routed: RoutedRequest
    number: int
    request_id: str | None
    may_decline: bool = False
    kv: tuple[str, ...] = ()
    correction: Correction = UNCORRECTED


@dataclass(frozen=True)
class Reply:
    """A message of an attempt.

    The first one says whether the attempt was accepted; the next ones carry all new `deltas`. The
    first and the last carry a `state`. `kv` holds tickets of KV that was read for an attempt that
    another replica continues.
    """

    state: ReplicaState | None = None
    declined: str | None = None
    deltas: tuple[Delta, ...] = ()
    kv: tuple[str, ...] = ()


class ReplicaLink(Protocol):
    """A connection to one replica; if that is lost, another one will replace it."""

    @property
    def name(self) -> str: ...

    def feed(self) -> AsyncGenerator[Feed]:
        """Yield news periodically, from now on."""

    def stream(self, attempt: Attempt) -> AsyncGenerator[Reply]: ...

    async def restart(self) -> None:
        """Replace this replica, which has no requests, by a new one."""


class ReplicaHost(Protocol):
    """The place where replicas run."""

    @property
    def links(self) -> Sequence[ReplicaLink]: ...

    async def leave(self) -> None:
        """Release what lives in the loop that called the links, before the loop ends."""

    def close(self) -> None:
        """End all replicas, once no stream is open; do not call it from an event loop."""
