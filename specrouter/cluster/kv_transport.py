"""KVTransport: the way of keys and values from the process that has read a prompt to another one.

Contract: what is given is known by a ticket, a text that any message can carry. It is taken once.
What cannot be carried is lost, which costs time and no text: whoever takes a ticket and gets
nothing reads the prompt itself.
"""

import uuid
from typing import Protocol

from specrouter.cluster.kv_desk import KVDesk
from statemgr import RowKV


class KVLostError(RuntimeError):
    """Keys and values did not come."""


class KVTransport(Protocol):
    async def give(self, kv: RowKV) -> str:
        """Returns a ticket for it. Raises whatever went wrong."""
        ...

    async def take(self, ticket: str) -> RowKV:
        """Raises `KVLostError` where it is not there, else whatever went wrong."""
        ...


class LocalTransport:
    """Within one process."""

    def __init__(self) -> None:
        self._desk = KVDesk[RowKV]()

    async def give(self, kv: RowKV) -> str:
        ticket = uuid.uuid4().hex
        self._desk.leave(ticket, kv)
        return ticket

    async def take(self, ticket: str) -> RowKV:
        kv = self._desk.take(ticket)
        if kv is None:
            raise KVLostError("nothing is there")
        return kv
