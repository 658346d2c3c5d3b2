"""ReplicaLink: the way to one replica, in this process or on another machine.

Contract: a replica that is gone ends its feed, with or without an exception, and its streams with
an exception. One that hangs does neither: the listener needs a timeout. Closing a
stream cancels its request without waiting for the replica.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from specrouter.cluster.correction import AS_TOLD, Correction
from specrouter.cluster.reports import ReplicaReport
from specrouter.cluster.state import ReplicaState, RoutedRequest
from specrouter.engine.request import Request
from specrouter.request.output import Delta


class ReplicaLostError(RuntimeError):
    """There is no replica at the other end, for now."""


@dataclass(frozen=True)
class Feed:
    """News that a replica tells by itself. `report`: now and then."""

    state: ReplicaState
    report: ReplicaReport | None = None


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One sample of a request, from where earlier attempts have got to.

    Attributes:
        args: prompt and `generated` as token ids, with seed and sample.
        number: of the attempt, from 1 on; `request_id`: of the HTTP request. Both are for the log.
        may_decline: where its objective cannot be attained there.
        kv: tickets of what another replica has read for it.
        routed: of it, what the replica has not read yet, to the router's knowledge.
        correction: of what the replica predicts, by what was measured of it.
    """

    args: Request
    routed: RoutedRequest
    number: int
    request_id: str | None
    may_decline: bool = False
    kv: tuple[str, ...] = ()
    correction: Correction = AS_TOLD


@dataclass(frozen=True)
class Reply:
    """A message of an attempt. The first one says whether it was taken; `deltas` follow, as many as
    have come. `state`: with the first message and with the last. `kv`: tickets of what was read for
    an attempt that is to go on elsewhere."""

    state: ReplicaState | None = None
    declined: str | None = None
    deltas: tuple[Delta, ...] = ()
    kv: tuple[str, ...] = ()


class ReplicaLink(Protocol):
    """Another replica takes the place of one that is lost, sooner or later."""

    @property
    def name(self) -> str: ...

    def feed(self) -> AsyncGenerator[Feed]:
        """From now on, every so often."""

    def stream(self, attempt: Attempt) -> AsyncGenerator[Reply]: ...

    async def restart(self) -> None:
        """Puts a new replica in the place of this one, which has nothing to do any more."""


class ReplicaHost(Protocol):
    """Where replicas run."""

    @property
    def links(self) -> Sequence[ReplicaLink]: ...

    async def leave(self) -> None:
        """Lets go of what lives in the loop that has called the links, before it ends."""

    def close(self) -> None:
        """Ends all replicas, once, when no stream is open any more. Not from an event loop."""
