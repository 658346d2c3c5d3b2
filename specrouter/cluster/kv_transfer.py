"""KVTransfer: keys and values on their way from the process that has read a prompt to another one.

Contract: what is given to a transport is known by a ticket, a text that any message can carry, and
is taken once. What cannot be carried is lost and logged. That costs time and changes no text: a
replica that gets nothing for a ticket reads the prompt itself. Imports nothing of weight, so that
the mailbox can be a process.
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
_KEPT_S = 30.0  # a hand-over takes milliseconds, and seconds where a row has to be waited for

News = tuple[Delta, ...]
Left = TypeVar("Left")


class KVLostError(RuntimeError):
    """Keys and values did not come."""


class KVTransport(Protocol):
    async def give(self, kv: "RowKV") -> str:
        """Returns a ticket for it. Raises whatever went wrong."""

    async def take(self, ticket: str) -> "RowKV":
        """Raises `KVLostError` where it is not there, else whatever went wrong."""


class KVTransfer:
    """A replica's end of a transport: both directions."""

    def __init__(self, transport: KVTransport) -> None:
        self._transport = transport

    async def received(self, tickets: Sequence[str]) -> HandedKV | None:
        """As much from the beginning as there is; None: no tickets. All are asked for at once: what
        a part takes is mostly the way there and back."""
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
        """News, and tickets of what was read. A first token does not wait for what is carried: its
        end, which the text's next part waits for, comes behind."""
        parts = [delta.kv for delta in deltas if delta.kv is not None]
        if not parts:
            yield deltas, ()
            return
        plain = tuple(delta for delta in deltas if delta.kv is None)
        if any(delta.finish_reason is not None and not delta.goes_on for delta in plain):
            yield plain, ()  # nothing goes on
            return
        if plain:
            news = tuple(
                replace(one, finish_reason=None, output=None, goes_on=False) for one in plain
            )
            yield news, ()
        ends = (_without_news(delta) for delta in plain if delta.goes_on)
        yield tuple(ends), await self._tickets(parts)

    async def _tickets(self, parts: "Sequence[RowKV]") -> tuple[str, ...]:
        """As many from the beginning as could be given."""
        tickets: list[str] = []
        try:
            async with asyncio.timeout(_PATIENCE_S):
                for part in parts:
                    tickets.append(await self._transport.give(part))
        except Exception as error:
            logger.warning("what was read for another replica is lost: %s", _why(error))
        return tuple(tickets)


class KVMailbox(Generic[Left]):
    """Where keys and values of a prompt wait until another process takes them, once.

    What is not taken for 30 s, because its request has ended or went on elsewhere, is dropped when
    the next is left: until then it stays in memory. Args: `clock`: monotonic, in seconds.
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
        """None: it is not there, or not any more."""
        _, left = self._left.pop(key, (0.0, None))
        return left


def _without_news(delta: Delta) -> Delta:
    return replace(delta, text="", token_ids=[], logprobs=None, prompt_logprobs=None, draft=None)


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
