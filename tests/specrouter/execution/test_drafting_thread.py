"""A thread of its own for drafts: in order, given up alone, and gone with who made it."""

import gc
import threading
import time
from concurrent.futures import Future
from functools import partial

import pytest
import torch

from specrouter.execution.drafting_thread import DraftingThread
from specrouter.execution.hang_guard import HangGuard
from tests.specrouter.faults import PATIENCE_S


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "specrouter-drafting"]


def result_of(thread: DraftingThread, future: "Future[int]") -> int:
    assert thread.hung(future) is None
    return future.result(0)


def test_jobs_run_in_their_order_in_another_thread_and_without_gradients() -> None:
    seen: list[tuple[int, int, bool]] = []

    def job(number: int) -> int:
        seen.append((number, threading.get_ident(), torch.is_inference_mode_enabled()))
        return number

    thread = DraftingThread()
    futures = [thread.submit(partial(job, number)) for number in range(4)]
    assert [result_of(thread, future) for future in futures] == [0, 1, 2, 3]
    assert [number for number, *_ in seen] == [0, 1, 2, 3]
    assert all(ident != threading.get_ident() and inference for _, ident, inference in seen)


def test_what_a_job_raises_comes_to_who_takes_its_result() -> None:
    thread = DraftingThread()
    for error in (ValueError("lost"), SystemExit(3)):

        def fail(error: BaseException = error) -> int:
            raise error

        future = thread.submit(fail)
        assert thread.hung(future) is None
        with pytest.raises(type(error)):
            future.result(0)
    assert result_of(thread, thread.submit(lambda: 7)) == 7, "it goes on"


def test_a_forward_that_hangs_is_found_by_its_waiter_and_its_thread_ends_when_it_returns() -> None:
    before, now = set(threads()), [0.0]
    guard = HangGuard(1.0, clock=lambda: now[0])
    inside, release, ran = threading.Event(), threading.Event(), threading.Event()
    thread = DraftingThread(guard)

    def hang() -> int:
        with guard.inside("small"):
            inside.set()
            release.wait(PATIENCE_S)
        return 1

    hanging, waiting = thread.submit(hang), thread.submit(ran.set)
    assert inside.wait(PATIENCE_S)
    now[0] = 2.0
    assert guard.give_up() is None, "the watchdog would replace the engine's thread"
    assert thread.hung(hanging) == "small"
    assert waiting.cancel()
    [own] = set(threads()) - before
    release.set()
    own.join(PATIENCE_S)
    assert not own.is_alive()
    assert not ran.is_set()
    assert not hanging.done(), "nobody is told what came too late"


def test_a_job_that_takes_long_outside_of_forwards_is_waited_for() -> None:
    thread = DraftingThread(HangGuard(0.02))

    def slow() -> int:
        time.sleep(0.2)
        return 5

    assert result_of(thread, thread.submit(slow)) == 5


def test_the_thread_ends_with_who_made_it() -> None:
    before = set(threads())
    thread = DraftingThread()
    assert result_of(thread, thread.submit(lambda: 1)) == 1
    [own] = set(threads()) - before
    del thread
    gc.collect()
    own.join(PATIENCE_S)
    assert not own.is_alive()
