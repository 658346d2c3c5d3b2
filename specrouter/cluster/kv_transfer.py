"""KVTransfer: moves the KV of a prompt from the process that has read it to another one.

Contract: a transport gives each piece of KV a ticket, a text that any message can carry; a ticket
can be used once. KV that cannot be moved is lost and logged. That costs time and changes no text: a
replica without the KV reads the prompt itself. This module imports nothing slow, so the mailbox can
be a process of its own.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from specrouter.request.output import Delta
from specrouter.request.spec import HandedKV

if TYPE_CHECKING:  # PyTorch takes seconds to import
    from statemgr import RowKV

logger = logging.getLogger(__name__)

_PATIENCE_S = 1.5  # as long as a replica may be silent; then the prompt is read again
_KEPT_S = 30.0  # a transfer takes milliseconds, or seconds if the request waits for a row

News = tuple[Delta, ...]
Left = TypeVar("Left")


class KVLostError(RuntimeError):
    """Raised when KV does not arrive."""


class KVTransport(Protocol):
    async def give(self, kv: "RowKV") -> str:
        """Return a ticket for the KV. Raises any error of the transport."""

    async def take(self, ticket: str) -> "RowKV":
        """Return the KV of a ticket. Raises `KVLostError` without it, or any other error."""


class KVTransfer:
    """A replica's end of a transport, for both directions."""

    def __init__(self, transport: KVTransport) -> None:
        self._transport = transport

    async def received(self, tickets: Sequence[str]) -> HandedKV | None:
        """Return the parts that arrive, up to the first that is lost; None without tickets.

        All parts are requested at once, because a part takes mostly the time of a round trip.
        """
        parts: list[RowKV] = []
        coming = [asyncio.ensure_future(self._transport.take(ticket)) for ticket in tickets]
        try:
            async with asyncio.timeout(_PATIENCE_S):
                for part in coming:
                    parts.append(await part)
        except Exception as error:
            lost = f"{len(tickets) - len(parts)} of {len(tickets)} parts"
            logger.warning("%s of what was read elsewhere are lost: %s", lost, _why(error))
        finally:
            for part in coming:
                part.cancel()
            await asyncio.gather(*coming, return_exceptions=True)
        return HandedKV(parts) if tickets else None

    async def sent(self, deltas: News) -> AsyncGenerator[tuple[News, tuple[str, ...]]]:
        """Yield deltas for the caller, with tickets of KV that was read.

        A first token does not wait for the transfer of KV. The end of this attempt, on which the
        continuation waits, follows after it.
        """
        parts = [delta.kv for delta in deltas if delta.kv is not None]
        if not parts:
            yield deltas, ()
            return
        plain = tuple(delta for delta in deltas if delta.kv is None)
        if any(delta.finish_reason is not None and not delta.goes_on for delta in plain):
            yield plain, ()  # no other replica continues it
            return
        if plain:
            news = tuple(
                replace(one, finish_reason=None, output=None, goes_on=False) for one in plain
            )
            yield news, ()
        ends = (_without_news(delta) for delta in plain if delta.goes_on)
        yield tuple(ends), await self._tickets(parts)

    async def _tickets(self, parts: "Sequence[RowKV]") -> tuple[str, ...]:
        """Return tickets of the parts that could be given, up to the first that failed."""
        tickets: list[str] = []
        try:
            async with asyncio.timeout(_PATIENCE_S):
                for part in parts:
                    tickets.append(await self._transport.give(part))
        except Exception as error:
            logger.warning("what was read for another replica is lost: %s", _why(error))
        return tuple(tickets)


class KVMailbox(Generic[Left]):
    """A store in which the KV of a prompt waits until another process takes it, once.

    KV that is not taken for 30 s, because its request has ended or moved, is dropped when the next
    is left; until then it stays in memory. `clock` is monotonic, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left: dict[str, tuple[float, Left]] = {}  # the oldest first

    def leave(self, key: str, left: Left) -> None:
        now_s = self._clock()
        for old, (left_s, _) in list(self._left.items()):
            if now_s - left_s < _KEPT_S:
                break
            del self._left[old]
        self._left[key] = (now_s, left)

    def take(self, key: str) -> Left | None:
        """Return the item and remove it; None if it is not there, or no longer."""
        _, left = self._left.pop(key, (0.0, None))
        return left


def _without_news(delta: Delta) -> Delta:
    return replace(delta, text="", token_ids=[], logprobs=None, prompt_logprobs=None, draft=None)


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
