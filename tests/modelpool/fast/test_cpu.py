"""What the CPU can do is found out without leaving OpenMP workers behind."""

import os
import threading
from pathlib import Path

import pytest
import torch

from modelpool import ModelPool
from modelpool.fast.cpu import int8_refusal
from tests.modelpool.factories import save_llama

_TASKS = Path("/proc/self/task")


@pytest.mark.skipif(not _TASKS.is_dir(), reason="threads are counted on Linux")
def test_a_pool_starts_no_workers_where_it_is_made(tmp_path: Path) -> None:
    # With more workers in a process than cores all of them sleep at every barrier.
    path = save_llama(tmp_path, dtype="bfloat16")
    started: list[int] = []

    def make() -> None:  # a thread that has none yet
        torch.set_num_threads(2)
        before = len(os.listdir(_TASKS))
        ModelPool.from_config({"target": "m", "models": [{"name": "m", "source": str(path)}]})
        started.append(len(os.listdir(_TASKS)) - before)

    threads = torch.get_num_threads()
    int8_refusal.cache_clear()
    try:
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(threads)
    assert len(started) == 1
    assert started[0] <= 0


def test_the_trial_of_int8_leaves_the_number_of_threads() -> None:
    threads = torch.get_num_threads()
    int8_refusal.cache_clear()
    int8_refusal()
    assert torch.get_num_threads() == threads
