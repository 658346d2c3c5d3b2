"""The speed of memory is measured, and nothing else is changed by it."""

import torch

from modelpool.fast.memory_speed import read_bytes_per_s


def test_memory_is_read_at_some_speed_and_the_threads_stay() -> None:
    before = torch.get_num_threads()
    assert 1e8 < read_bytes_per_s(1) < 1e13
    assert torch.get_num_threads() == before
