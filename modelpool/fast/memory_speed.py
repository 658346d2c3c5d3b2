"""Speed of this machine's memory, which limits a token if no CPU cache holds the weights."""

import time

import torch

from modelpool.fast.cpu import cpu_threads

_BYTES = 256 * 2**20  # more than a cache of one core holds
_READS = 6  # the fastest one counts, because others are disturbed


def read_bytes_per_s(threads: int | None = None) -> float:
    """Measure the speed of reading, in some 0.2 s, by the maximum of one large tensor.

    `threads` is by default torch's setting.
    """
    with cpu_threads(threads or torch.get_num_threads()):
        block = torch.ones(_BYTES // 4)
        return _BYTES / min(_seconds(block) for _ in range(_READS))


def _seconds(block: torch.Tensor) -> float:
    started = time.perf_counter()
    block.max()  # sums are a tenth slower
    return time.perf_counter() - started
