"""PackSender: copies a pass's index arrays from the host to the device, at once.

Contract: arrays are written into a host buffer and copied together, and the host does not wait: the
next pass is written into another buffer. A buffer is written again only when its copy has ended
(`modelpool.in_flight`). For CUDA, buffers are pinned: a copy from other memory may wait for the
stream, and cannot be captured in a graph.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelpool.fast.layer_reference import PackInputs
from modelpool.fast.pack_layout import Pack, PackLayout
from modelpool.in_flight import InFlight, Mark, Reached, mark_on

# More than the passes that a cycle starts before the host waits for one: a draft's steps.
_BUFFERS = 32


class HostMemory:
    """Host memory for passes to a device, and how it is copied."""

    def __init__(self, device: torch.device) -> None:
        self._is_pinned = device.type != "cpu"

    def empty(self, size: int) -> Tensor:
        """Return [size] int32 on the host, not initialised."""
        return torch.empty(size, dtype=torch.int32, pin_memory=self._is_pinned)

    def copy(self, here: Tensor, there: Tensor) -> Mark:
        """Start to copy from `here` to the device, as much as `there` has room for.

        `here` may be written again when the mark is reached.
        """
        there.copy_(here[: len(there)], non_blocking=True)
        return mark_on(there.device)


class PackSender:
    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._buffers = InFlight(lambda: _Buffer(memory), _BUFFERS)

    def send(self, layout: PackLayout, pack: Pack, there: Tensor, longest: int) -> PackInputs:
        """Write a pack into `there`, a device buffer of exactly the layout's size.

        `longest`, for the kernels, is that of the pack or more. Returns views of `there`.
        """
        buffer = self._buffers.take()
        mark: Mark = Reached()
        try:
            here, array = buffer.numbers(layout.size)
            layout.fill(array, pack)
            mark = self._memory.copy(here, there)
        finally:
            self._buffers.give_back(buffer, mark)
        layout.fill_rest(there, pack)
        return layout.inputs(there, longest)


class _Buffer:
    """Host memory that grows on demand."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._numbers: tuple[Tensor, NDArray[np.int32]] | None = None

    def numbers(self, size: int) -> tuple[Tensor, NDArray[np.int32]]:
        """Return the same memory, [size or more], as a tensor and as an array."""
        if self._numbers is None or len(self._numbers[0]) < size:
            numbers = self._memory.empty(1 << (size - 1).bit_length())
            self._numbers = numbers, numbers.numpy()
        return self._numbers
