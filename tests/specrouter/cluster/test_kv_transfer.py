"""What was read is handed in behind a first token, and its loss is told and costs no text."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from specrouter.cluster import kv_transfer
from specrouter.cluster.kv_transfer import KVMailbox, KVTransfer, KVTransport, News
from specrouter.request.output import Delta
from statemgr import KVFormat, RowKV
from tests.specrouter.cluster.links import LocalTransport
from tests.specrouter.cluster.test_resume import last

FORMAT = KVFormat("fp", "float32", ((1, 2, 2),))


def part(start: int) -> RowKV:
    data = np.zeros(16, dtype=np.uint8)
    return RowKV(format=FORMAT, start=start, count=1, text="", data=data)


class Broken:
    """Carries so many parts; then it fails, or hangs."""

    def __init__(self, good: int, hangs: bool = False) -> None:
        self._good, self._hangs = good, hangs
        self._within = LocalTransport()

    async def _fails(self) -> None:
        self._good -= 1
        if self._good < 0:
            if self._hangs:
                await asyncio.Event().wait()
            raise ConnectionError("the way is cut")

    async def give(self, kv: RowKV) -> str:
        await self._fails()
        return await self._within.give(kv)

    async def take(self, ticket: str) -> RowKV:
        await self._fails()
        return await self._within.take(ticket)


async def sent(transfer: KVTransfer, *deltas: Delta) -> list[tuple[News, tuple[str, ...]]]:
    return [each async for each in transfer.sent(deltas)]


def test_news_without_keys_and_values_pass_as_they_are() -> None:
    given = (Delta(text="a", token_ids=[1]), last(2))
    assert asyncio.run(sent(KVTransfer(Broken(0)), *given)) == [(given, ())]


def test_what_is_handed_in_is_taken_once_in_order() -> None:
    transfer, parts = KVTransfer(LocalTransport()), [part(0), part(1)]

    async def both() -> None:
        [(told, tickets)] = await sent(transfer, *(Delta(kv=each) for each in parts))
        assert told == ()
        taken = await transfer.received(tickets)
        assert taken is not None
        assert taken.take() == parts
        again = await transfer.received(tickets)
        assert again is not None
        assert again.take() == []
        assert await transfer.received(()) is None, "nothing is asked for"

    asyncio.run(both())


def test_a_first_token_does_not_wait_for_what_is_carried() -> None:
    end = Delta(
        text="a", token_ids=[1], finish_reason="length", output=last(1).output, goes_on=True
    )
    found = asyncio.run(sent(KVTransfer(LocalTransport()), Delta(kv=part(0)), end))
    [((first,), none), ((then,), tickets)] = found
    assert (first.token_ids, first.finish_reason, first.output, none) == ([1], None, None, ())
    assert (then.token_ids, then.text, then.goes_on, then.output) == ([], "", True, end.output)
    assert len(tickets) == 1


def test_a_text_that_has_ended_hands_nothing_in() -> None:
    end = last(1)
    assert asyncio.run(sent(KVTransfer(Broken(0)), Delta(kv=part(0)), end)) == [((end,), ())]


@pytest.mark.parametrize("hangs", [False, True])
def test_what_cannot_be_carried_is_lost_and_told(
    hangs: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_transfer, "_PATIENCE_S", 0.05)

    async def both(transport: KVTransport) -> int:
        transfer = KVTransfer(transport)
        [(_, tickets)] = await sent(transfer, *(Delta(kv=part(at)) for at in range(3)))
        taken = await transfer.received(tickets)
        return 0 if taken is None else len(taken.take())

    assert asyncio.run(both(Broken(2, hangs))) == 0, "two are handed in, and none is taken"
    why = "TimeoutError" if hangs else "ConnectionError: the way is cut"
    assert f"what was read for another replica is lost: {why}" in caplog.text
    assert f"2 of 2 parts of what was read elsewhere are lost: {why}" in caplog.text
    assert asyncio.run(both(Broken(5, hangs))) == 2


def test_what_nobody_takes_is_dropped_after_a_while() -> None:
    now = [0.0]
    mailbox = KVMailbox[Any](lambda: now[0])
    mailbox.leave("old", 1)
    now[0] = 20.0
    mailbox.leave("young", 2)
    now[0] = 31.0
    mailbox.leave("new", 3)
    assert [mailbox.take(each) for each in ("old", "young", "new", "new")] == [None, 2, 3, None]
