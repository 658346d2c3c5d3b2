"""A stream brings what samples say to a coroutine, and cancels them where it is closed."""

from __future__ import annotations

import asyncio
import threading
import weakref
from contextlib import aclosing
from functools import partial

import pytest

from specrouter import Delta
from specrouter.request.delta_stream import DeltaStreams, LoopMailbox
from tests.specrouter.cluster.test_resume import last


class Sample:
    cancelled = 0

    def cancel(self) -> None:
        self.cancelled += 1


def test_deltas_come_until_every_sample_has_told_its_last() -> None:
    async def run() -> list[tuple[int, list[int]]]:
        async with aclosing(DeltaStreams().open()) as stream:
            stream.begin([Sample(), Sample()])
            for number, delta in ((1, Delta(token_ids=[5])), (1, last(6)), (0, last(7))):
                stream.put(number, delta)
            return [(number, delta.token_ids) async for number, delta in stream]

    assert asyncio.run(run()) == [(1, [5]), (1, [6]), (0, [7])]


def test_whatever_begins_before_or_after_the_close_is_cancelled() -> None:
    async def run(closes_first: bool) -> int:
        stream, sample = DeltaStreams().open(), Sample()
        if closes_first:
            await stream.aclose()
        stream.begin([sample])
        if not closes_first:
            await stream.aclose()
        return sample.cancelled

    assert [asyncio.run(run(first)) for first in (True, False)] == [1, 1]


# The mailbox of a loop


def test_everything_comes_in_order_from_whichever_thread() -> None:
    async def run() -> list[int]:
        mailbox, found = LoopMailbox(asyncio.get_running_loop()), list[int]()
        done = asyncio.Event()

        def tell() -> None:
            for number in range(5000):
                mailbox.post(partial(found.append, number))
            mailbox.post(done.set)

        thread = threading.Thread(target=tell)
        thread.start()
        async with asyncio.timeout(20):
            await done.wait()
        thread.join()
        return found

    assert asyncio.run(run()) == list(range(5000))


def test_what_comes_together_wakes_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> int:
        loop, wakes, found = asyncio.get_running_loop(), 0, list[int]()
        real = loop.call_soon_threadsafe

        def counted(*arguments: object) -> object:
            nonlocal wakes
            wakes += 1
            return real(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        mailbox = LoopMailbox(loop)
        for wave in (1, 2):
            for number in range(16):
                mailbox.post(partial(found.append, number))
            await asyncio.sleep(0)
            assert len(found) == 16 * wave
        return wakes

    assert asyncio.run(run()) == 2


def test_a_mailbox_keeps_no_loop_alive() -> None:
    loop = asyncio.new_event_loop()
    mailbox, known = LoopMailbox(loop), weakref.ref(loop)
    loop.close()
    del loop
    assert known() is None
    with pytest.raises(RuntimeError, match="gone"):
        mailbox.post(lambda: None)
