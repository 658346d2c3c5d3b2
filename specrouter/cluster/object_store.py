"""ObjectStoreTransport: keys and values through Ray's object store.

Contract: written there once, and read in place by processes of the same machine. What a process has
written is lost with it. Ray drops what has no reference, so a mailbox in a process of
its own keeps references until they are taken.

Imported by `serve_link` alone, after it has told Ray how to be.
"""

import asyncio
import uuid
from typing import Any

import ray

from specrouter.cluster.kv_mailbox import KVMailbox
from specrouter.cluster.kv_transfer import KVLostError
from statemgr import RowKV

_NAME, _NAMESPACE = "specrouter-kv-mailbox", "specrouter"


def start_mailbox() -> Any:
    """Returns what keeps it; the mailbox of a Ray that has one."""
    options = {"name": _NAME, "namespace": _NAMESPACE, "get_if_exists": True}
    return ray.remote(KVMailbox).options(**options, num_cpus=0, max_restarts=-1).remote()


class ObjectStoreTransport:
    """Where a mailbox has been started."""

    def __init__(self) -> None:
        self._mailbox: Any = None

    async def give(self, kv: RowKV) -> str:
        ticket, mailbox = uuid.uuid4().hex, await self._found()
        reference = await asyncio.to_thread(ray.put, kv)
        await mailbox.leave.remote(ticket, [reference])  # in a list: else it would be fetched there
        return ticket

    async def take(self, ticket: str) -> RowKV:
        mailbox = await self._found()
        left = await mailbox.take.remote(ticket)
        if left is None:
            raise KVLostError("nothing is there")
        kv: RowKV = await left[0]
        return kv

    async def _found(self) -> Any:
        if self._mailbox is None:
            self._mailbox = await asyncio.to_thread(ray.get_actor, _NAME, _NAMESPACE)
        return self._mailbox
