"""The noise that makes one seed one text: `Gumbel(seed, position, id)`, a pure function.

Contract: Philox 4x64 keyed by (seed, stream), counter (id, position). Neither the vocabulary's
size, nor who asks, nor the order of asking changes a value. Every model of a chain perturbs its
logits with the same values, so a draft that thinks like its verifier proposes what it will choose.
`uniform` draws from the same generator with another word of the counter set.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_SMALLEST_UNIFORM = 2.0**-54  # below what the generator can tell from 0; its log is finite


def gumbel(
    seed: int, position: int, vocab_size: int, stream: int = 0, draw: int = 0
) -> NDArray[np.float64]:
    """Standard Gumbel noise of one output position, [vocab_size].

    Args:
        seed: 0 .. 2**64 - 1.
        position: of the output token, from 0.
        stream: distinguishes samples of one request that share a seed.
        draw: distinguishes several draws for one position, which rejection sampling makes.
    """
    values = _generator(seed, position, stream, draw=draw).random(vocab_size)
    np.maximum(values, _SMALLEST_UNIFORM, out=values)
    for _ in range(2):  # -log(-log(u))
        np.log(values, out=values)
        np.negative(values, out=values)
    return values


def uniform(seed: int, position: int, stream: int = 0, draw: int = 0) -> float:
    """One number in [0, 1), independent of the Gumbel noise of the same arguments."""
    return float(_generator(seed, position, stream, word=1, draw=draw).random())


def _generator(
    seed: int, position: int, stream: int, word: int = 0, draw: int = 0
) -> np.random.Generator:
    bits = np.random.Philox(
        key=np.array([seed, stream], dtype=np.uint64),
        counter=np.array([0, position, word, draw], dtype=np.uint64),
    )
    return np.random.Generator(bits)


class NoiseBank:
    """Noise of the positions near each row's end, computed once per row and position.

    A row keeps a ring of `window` positions on the device; a row without noise takes no memory.
    """

    def __init__(self, vocab_size: int, window: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._window = window
        self._device = device
        self._blocks: dict[int, int] = {}  # row -> block
        self._free: list[int] = []
        self._keys: dict[int, tuple[int, int]] = {}  # row -> seed, stream
        self._tags = np.full((0, window, 2), -1, dtype=np.int64)  # position and draw in each place
        with torch.inference_mode(False):  # rows are opened outside of inference
            self._values = torch.empty((0, window, vocab_size), dtype=torch.float64, device=device)

    def open(self, row: int, seed: int, stream: int = 0) -> None:
        if not self._free:
            self._grow()
        block = self._free.pop()
        self._blocks[row] = block
        self._keys[row] = (seed, stream)
        self._tags[block] = -1

    def close(self, row: int) -> None:
        if row in self._blocks:
            self._free.append(self._blocks.pop(row))
            del self._keys[row]

    def take(
        self, rows: Sequence[int], positions: Sequence[int], draws: Sequence[int] | None = None
    ) -> Tensor:
        """[n, vocab_size] float64, the noise of `positions[i]` of `rows[i]` for `draws[i]`, or 0.

        A row's position is asked for one draw at a time.
        """
        places = []
        for row, position, draw in zip(rows, positions, draws or [0] * len(rows), strict=True):
            block, place = self._blocks[row], position % self._window
            if tuple(self._tags[block, place]) != (position, draw):
                seed, stream = self._keys[row]
                noise = gumbel(seed, position, self._vocab_size, stream, draw)
                self._values[block, place].copy_(torch.from_numpy(noise), non_blocking=True)
                self._tags[block, place] = position, draw
            places.append(block * self._window + place)
        index = torch.tensor(places, dtype=torch.int64).to(self._device, non_blocking=True)
        return self._values.view(-1, self._vocab_size).index_select(0, index)

    def peek(self, row: int, position: int) -> Tensor:
        """[vocab_size] of one place, not copied."""
        self.take([row], [position])
        return self._values[self._blocks[row], position % self._window]

    def _grow(self) -> None:
        """Doubles the blocks."""
        old = len(self._tags)
        new = max(1, 2 * old)
        with torch.inference_mode(False):
            values = self._values.new_empty((new, self._window, self._vocab_size))
            values[:old] = self._values
        tags = np.full((new, self._window, 2), -1, dtype=np.int64)
        tags[:old] = self._tags
        self._values, self._tags = values, tags
        self._free += range(new - 1, old - 1, -1)
