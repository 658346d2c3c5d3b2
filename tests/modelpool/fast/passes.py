"""Packs as a forward is given them, kernels in plain torch, and host memory whose copies end when a
test says so."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from modelpool.attention.path import NO_TAIL, PackPlaces
from modelpool.fast.pack_layout import Pack
from modelpool.fast.pack_sender import HostMemory
from modelpool.in_flight import Mark

BLOCK = 16  # slots


def pack_of(
    tokens: int, logits: int | None = None, path: int | None = None, longest: int = 9
) -> Pack:
    """One row's chain, the tokens numbered from 5 on; `path`: steps of what is a tree then."""
    own = np.arange(tokens, dtype=np.int32)
    numbers = np.stack((own, np.zeros_like(own), own, np.full_like(own, NO_TAIL)), dtype=np.int32)
    walks = None if path is None else torch.zeros((tokens, path), dtype=torch.int32)
    index = torch.arange(tokens if logits is None else logits)
    tables = np.arange(-(-max(tokens, longest) // BLOCK), dtype=np.int32)[None]
    places = PackPlaces(numbers, tables, BLOCK, walks, longest)
    return Pack(torch.arange(tokens) + 5, places, index)


@dataclass(eq=False)
class SlowMark:
    """Where the device comes when it is told, or waited for."""

    memory: "SlowMemory"
    here: Tensor
    there: Tensor
    is_reached: bool = False

    def query(self) -> bool:
        return self.is_reached

    def synchronize(self) -> None:
        if not self.is_reached:
            self.memory.waits += 1
        while not self.is_reached:
            self.memory.end_one()


@dataclass(eq=False)
class SlowMemory(HostMemory):
    """What a copy brings is what stands there when it ends."""

    copies: int = 0
    waits: int = 0
    made: int = 0
    pending: deque[SlowMark] = field(default_factory=deque)

    def empty(self, size: int) -> Tensor:
        self.made += 1
        with unset_fake_temporarily():  # of tests with a fake device
            return torch.full((size,), -1, dtype=torch.int32)

    def copy(self, here: Tensor, there: Tensor) -> Mark:
        self.copies += 1
        self.pending.append(SlowMark(self, here, there))
        return self.pending[-1]

    def end_all(self) -> None:
        while self.pending:
            self.end_one()

    def end_one(self) -> None:
        """The oldest copy ends."""
        mark = self.pending.popleft()
        mark.there.copy_(mark.here[: len(mark.there)])
        mark.is_reached = True
