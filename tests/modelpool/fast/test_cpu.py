"""What the CPU can do is found out without leaving OpenMP workers behind."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from modelpool import ModelPool
from modelpool.fast.cpu import int8_refusal
from modelpool.fast.direct_forward import direct_forward_of
from modelpool.fast.joined import keeps_bits
from modelpool.fast.sum_order import least_rows
from modelpool.fast.tuning import Tuning
from modelpool.packed_model import PackedModel
from test_support.factories import save_llama
from test_support.llama_models import LLAMA_SHAPED, VOCAB, make_model

_TASKS = Path("/proc/self/task")


@pytest.mark.skipif(not _TASKS.is_dir(), reason="threads are counted on Linux")
def test_a_pool_starts_no_workers_where_it_is_made(tmp_path: Path) -> None:
    # With more workers in a process than cores all of them sleep at every barrier.
    path = save_llama(tmp_path, dtype="bfloat16")
    settings = {"target": "m", "models": [{"name": "m", "source": str(path)}]}
    int8_refusal.cache_clear()
    assert _workers_started(lambda: ModelPool.from_config(settings), threads=2) == 0


@pytest.mark.skipif(not _TASKS.is_dir(), reason="threads are counted on Linux")
def test_trials_of_sums_start_no_workers_but_those_of_the_model() -> None:
    model = make_model(LLAMA_SHAPED["llama"](), torch.bfloat16)
    packed = PackedModel.wrap("m", model, VOCAB, Tuning(threads=1, pack_weights=True))
    keeps_bits.cache_clear()
    least_rows.cache_clear()
    assert _workers_started(lambda: direct_forward_of(packed), threads=2) == 0


def _workers_started(make: Callable[[], object], threads: int) -> int:
    """By what runs in a thread that has none yet, set to so many."""
    started: list[int] = []

    def run() -> None:
        torch.set_num_threads(threads)
        before = len(os.listdir(_TASKS))
        make()
        started.append(len(os.listdir(_TASKS)) - before)

    kept = torch.get_num_threads()
    try:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(kept)
    (count,) = started
    return max(0, count)  # another test's thread may have ended meanwhile
