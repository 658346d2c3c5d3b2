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

Ints = NDArray[np.int64]

_SMALLEST_UNIFORM = 2.0**-54  # below what the generator can tell from 0; its log is finite
_NO_BLOCK = -1


def gumbel(
    seed: int,
    position: int,
    vocab_size: int,
    stream: int = 0,
    draw: int = 0,
    out: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """Standard Gumbel noise of one output position, [vocab_size].

    Args:
        seed: 0 .. 2**64 - 1.
        position: of the output token, from 0.
        stream: distinguishes samples of one request that share a seed.
        draw: distinguishes several draws for one position, which rejection sampling makes.
        out: [vocab_size] where it is written, instead of new memory.
    """
    values = _generator(seed, position, stream, draw=draw).random(vocab_size, out=out)
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
    Once somebody asked for float32 on a CPU, a rounded copy stands beside each position.
    """

    def __init__(self, vocab_size: int, window: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._window = window
        self._device = device
        self._blocks = np.zeros(0, dtype=np.int64)  # of each row, or _NO_BLOCK
        self._free: list[int] = []
        self._keys: dict[int, tuple[int, int]] = {}  # row -> seed, stream
        # Position and draw in each place of the blocks, one after the other.
        self._tags = np.full((0, 2), -1, dtype=np.int64)
        self._values = self._empty(0, torch.float64)  # [places, vocab_size]
        self._rounded: Tensor | None = None  # [places, vocab_size] float32

    def open(self, row: int, seed: int, stream: int = 0) -> None:
        if not self._free:
            self._grow()
        if row >= len(self._blocks):
            missing = (0, row + 1 - len(self._blocks))
            self._blocks = np.pad(self._blocks, missing, constant_values=_NO_BLOCK)
        block = self._free.pop()
        self._blocks[row] = block
        self._keys[row] = (seed, stream)
        self._tags[block * self._window : (block + 1) * self._window] = -1

    def close(self, row: int) -> None:
        if row in self._keys:
            self._free.append(int(self._blocks[row]))
            self._blocks[row] = _NO_BLOCK
            del self._keys[row]

    def take(
        self,
        rows: Sequence[int] | Ints,
        positions: Sequence[int] | Ints,
        draws: Sequence[int] | Ints | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """[n, vocab_size] copies, the noise of `positions[i]` of `rows[i]` for `draws[i]`, or 0.

        A row's position is asked for one draw at a time. `dtype`: float64, or float32, rounded.
        """
        index = torch.from_numpy(self._find(np.asarray(rows), np.asarray(positions), draws))
        index = index.to(self._device, non_blocking=True)
        if dtype == torch.float64:
            return self._values.index_select(0, index)
        if self._device.type != "cpu":  # where to round costs less than the memory
            return self._values.index_select(0, index).to(dtype)
        if self._rounded is None:
            self._rounded = self._empty(len(self._tags), torch.float32)
            self._rounded.copy_(self._values)
        return self._rounded.index_select(0, index)

    def recall(self, rows: Ints, positions: Ints, dtype: torch.dtype = torch.float64) -> Tensor:
        """[n, vocab_size] as `take`, of positions that may be long past: the ring keeps those that
        are ahead."""
        values = np.empty((len(rows), self._vocab_size))
        places = self._blocks[rows] * self._window + positions % self._window
        is_kept = (self._tags[places, 0] == positions) & (self._tags[places, 1] == 0)
        for index in np.flatnonzero(~is_kept).tolist():
            seed, stream = self._keys[int(rows[index])]
            gumbel(seed, int(positions[index]), self._vocab_size, stream, out=values[index])
        found = torch.from_numpy(values).to(self._device, dtype, non_blocking=True)
        if is_kept.any():
            where, kept = np.flatnonzero(is_kept), torch.from_numpy(places[is_kept])
            ring = self._values.index_select(0, kept.to(self._device))
            found[torch.from_numpy(where).to(self._device)] = ring.to(dtype)
        return found

    def peek(self, row: int, position: int) -> Tensor:
        """[vocab_size] of one place, not copied."""
        return self._values[int(self._find(np.array([row]), np.array([position]), None)[0])]

    def _find(self, rows: Ints, positions: Ints, draws: Sequence[int] | Ints | None) -> Ints:
        """[n] places that hold what is asked for."""
        blocks = self._blocks[rows]
        assert (blocks != _NO_BLOCK).all(), "a row has no noise"
        places: Ints = blocks * self._window + positions % self._window
        wanted = np.zeros((len(places), 2), dtype=np.int64)
        wanted[:, 0] = positions
        if draws is not None:
            wanted[:, 1] = draws
        missing = (self._tags[places] != wanted).any(axis=1)
        if missing.any():
            new = dict.fromkeys(  # once, however often it is asked for
                zip(
                    np.asarray(rows)[missing].tolist(),
                    places[missing].tolist(),
                    map(tuple, wanted[missing].tolist()),
                    strict=True,
                )
            )
            for row, place, (position, draw) in new:
                self._fill(row, place, position, draw)
        return places

    def _fill(self, row: int, place: int, position: int, draw: int) -> None:
        seed, stream = self._keys[row]
        values = self._values[place]
        on_host = self._device.type == "cpu"
        out = values.numpy() if on_host else None
        noise = gumbel(seed, position, self._vocab_size, stream, draw, out)
        if not on_host:
            values.copy_(torch.from_numpy(noise), non_blocking=True)
        if self._rounded is not None:
            self._rounded[place].copy_(values)
        self._tags[place] = position, draw

    def _grow(self) -> None:
        """Doubles the blocks."""
        old = len(self._tags)
        blocks = old // self._window
        new = max(1, 2 * blocks)
        size = new * self._window
        values = self._empty(size, torch.float64)
        values[:old] = self._values
        if self._rounded is not None:
            rounded = self._empty(size, torch.float32)
            rounded[:old] = self._rounded
            self._rounded = rounded
        tags = np.full((size, 2), -1, dtype=np.int64)
        tags[:old] = self._tags
        self._values, self._tags = values, tags
        self._free += range(new - 1, blocks - 1, -1)

    def _empty(self, places: int, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):  # rows are opened outside of inference
            return torch.empty((places, self._vocab_size), dtype=dtype, device=self._device)
