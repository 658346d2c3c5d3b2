"""What the engine tells comes to the loop in order, and wakes it once for many."""

import asyncio
import threading
import weakref
from functools import partial

import pytest

from specrouter.request.loop_mailbox import LoopMailbox


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


def test_a_closed_loop_refuses_every_time() -> None:
    loop = asyncio.new_event_loop()
    mailbox = LoopMailbox(loop)
    loop.close()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            mailbox.post(lambda: None)


def test_a_mailbox_keeps_no_loop_alive() -> None:
    loop = asyncio.new_event_loop()
    mailbox, known = LoopMailbox(loop), weakref.ref(loop)
    loop.close()
    del loop
    assert known() is None
    with pytest.raises(RuntimeError, match="gone"):
        mailbox.post(lambda: None)
