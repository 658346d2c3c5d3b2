"""PackSender: a pass's index arrays from the host to the device, in one copy.

Contract: arrays are written into a buffer of the host, copied as one, and the host goes on: the
next pass is written into another buffer. A buffer is written again only when its copy has ended
(`modelpool.in_flight`). For CUDA buffers are pinned: a copy from other memory may wait for the
stream, and cannot be captured in a graph.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelpool.fast.layer_reference import PackInputs
from modelpool.fast.pack_layout import Pack, PackLayout
from modelpool.in_flight import InFlight, Mark, Reached, mark_on

# More than the passes of a cycle that begin before the host waits for one: a draft's steps.
_BUFFERS = 32


class HostMemory:
    """Where passes to a device are written, and how they are copied."""

    def __init__(self, device: torch.device) -> None:
        self._is_pinned = device.type != "cpu"

    def empty(self, size: int) -> Tensor:
        """[size] int32, on the host."""
        return torch.empty(size, dtype=torch.int32, pin_memory=self._is_pinned)

    def copy(self, here: Tensor, there: Tensor) -> Mark:
        """Begins to copy what `there` has room for to a device. `here` may be written again when it
        has come to the mark."""
        there.copy_(here[: len(there)], non_blocking=True)
        return mark_on(there.device)


class PackSender:
    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._buffers = InFlight(lambda: _Buffer(memory), _BUFFERS)

    def send(self, layout: PackLayout, pack: Pack, there: Tensor, longest: int) -> PackInputs:
        """Writes a pack into `there`, a buffer of its device for the layout and no more. `longest`:
        that kernels are to know of; the pack's own or more.

        Returns:
            Views of `there`.
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
    """Memory of the host that grows with what is asked for."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._numbers: tuple[Tensor, NDArray[np.int32]] | None = None

    def numbers(self, size: int) -> tuple[Tensor, NDArray[np.int32]]:
        """[size or more], twice the same memory."""
        if self._numbers is None or len(self._numbers[0]) < size:
            numbers = self._memory.empty(1 << (size - 1).bit_length())
            self._numbers = numbers, numbers.numpy()
        return self._numbers
