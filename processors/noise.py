"""Noise that makes one seed one output: `Gumbel(seed, position, id)`, a pure function.

Contract: Philox 4x64 keyed by (seed, stream), counter (id, position). Neither the vocabulary's
size, nor the caller, nor the order of calls changes a value. Every model of a chain perturbs its
logits with the same values, so a drafter with its verifier's logits drafts what the verifier will
choose.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelpool.kernels.library import linear_kernels
from processors.philox import Words, word_at
from processors.token_tree import Ints

ARITHMETIC = 2  # to be raised when a seed has other noise
_SMALLEST_UNIFORM = 2.0**-54  # below the generator's resolution; its log is finite
_ONE, _ROOT = 0x3FF0000000000000, 0x3FE6A09E667F3BCD  # bits of 1 and of sqrt(1/2)
_LOG_2 = (0.6931471803691238, 1.9082149292705877e-10)  # its leading digits, and the rest
_SERIES = (
    *(0.6666666666666735, 0.3999999999940942, 0.2857142874366239, 0.22222198432149784),
    *(0.1818357216161805, 0.15313837699209373, 0.14798198605116586),
)
_NO_BLOCK = -1
_MANY = 2**15  # ids from which on drawing takes longer than passing it to a thread
_HOST = torch.device("cpu")


def gumbel(
    seed: int,
    position: int,
    vocab_size: int,
    stream: int = 0,
    out: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """Return standard Gumbel noise of one output position, [vocab_size].

    Args:
        seed: 0 .. 2**64 - 1.
        position: position of the output token, from 0.
        vocab_size: number of ids.
        stream: distinguishes samples of one request that share a seed.
        out: [vocab_size] where it is written, instead of new memory.
    """
    kernels = linear_kernels()
    if kernels is not None:
        found = np.empty(vocab_size) if out is None else out
        key = np.array([seed, stream, position], dtype=np.uint64)
        kernels.library.sr_gumbel(key.ctypes.data, vocab_size, found.ctypes.data)
        return found
    bits = np.random.Philox(
        key=np.array([seed, stream], dtype=np.uint64),
        counter=np.array([0, position, 0, 0], dtype=np.uint64),
    )
    return _from_uniforms(np.random.Generator(bits).random(vocab_size, out=out))


def gumbel_at(
    seeds: Words, streams: Words | Ints, positions: Ints, ids: Ints
) -> NDArray[np.float64]:
    """Return, [m], what `gumbel` of `seeds[i]`, `streams[i]` and `positions[i]` has at `ids[i]`.

    Other ids are not drawn. It takes 0.2 ms, and 0.1 ms more for 1,000 values.
    """
    keys = np.stack((seeds, streams.astype(np.uint64)))
    bits = word_at(keys, positions, ids)
    return _from_uniforms((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def gumbel_of_place(seed: int, stream: int, position: int, ids: Ints) -> NDArray[np.float64]:
    """Return `gumbel` at some ids of one place, [m], in microseconds with the library."""
    kernels = linear_kernels()
    if kernels is None:
        key = np.array([[seed, stream]], dtype=np.uint64).repeat(len(ids), axis=0)
        return gumbel_at(key[:, 0], key[:, 1], np.full(len(ids), position), ids)
    own, key = np.ascontiguousarray(ids), np.array([seed, stream, position], dtype=np.uint64)
    found = np.empty(len(own))
    kernels.library.sr_gumbel_at(key.ctypes.data, own.ctypes.data, len(own), found.ctypes.data)
    return found


def _from_uniforms(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Turn uniform numbers into Gumbel noise, in place."""
    np.maximum(values, _SMALLEST_UNIFORM, out=values)
    values[:] = -_logarithm(-_logarithm(values))
    return values


def _logarithm(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return natural logarithms of positive normal numbers, step by step as in choose.c.

    numpy's own have other bits on another CPU. Source: fdlibm's `e_log.c`.
    """
    bits = values.view(np.int64) + (_ONE - _ROOT)
    k = ((bits >> 52) - 1023).astype(np.float64)
    f = ((bits & (2**52 - 1)) + _ROOT).view(np.float64) - 1.0
    half, s = 0.5 * f * f, f / (2.0 + f)
    z = s * s
    w = z * z
    l1, l2, l3, l4, l5, l6, l7 = _SERIES
    even = w * (l2 + w * (l4 + w * l6))
    odd = z * (l1 + w * (l3 + w * (l5 + w * l7)))
    low, high = k * _LOG_2[1], k * _LOG_2[0]
    found: NDArray[np.float64] = high - ((half - (s * (half + (even + odd)) + low)) - f)
    return found


_Missed = tuple[int, int, int]  # row, place, and the place's new position


class NoiseBank:
    """Noise of the positions near each row's end, drawn once for all devices that need it.

    A row keeps a ring of `window` positions on each of them; a row without noise takes no memory.
    One thread at a time may call it. Positions of many ids are drawn by several threads at once,
    `threads`, by default torch's number.
    """

    def __init__(self, vocab_size: int, window: int, threads: int | None = None) -> None:
        self._vocab_size = vocab_size
        self._threads = threads or torch.get_num_threads()
        self._window = window
        self._blocks = np.zeros(0, dtype=np.int64)  # of each row, or _NO_BLOCK
        self._free: list[int] = []
        self._size = 0  # number of blocks
        self._keys: dict[int, tuple[int, int]] = {}  # row -> seed, stream
        self._rings: dict[torch.device, _Rings] = {}

    def open(self, row: int, seed: int, stream: int = 0) -> None:
        """Open a row; raise if a device has no memory left for it."""
        assert row not in self._keys, "a row is open"
        if not self._free:
            self._grow()
        if row >= len(self._blocks):
            missing = (0, row + 1 - len(self._blocks))
            self._blocks = np.pad(self._blocks, missing, constant_values=_NO_BLOCK)
        block = self._free.pop()
        self._blocks[row] = block
        self._keys[row] = (seed, stream)
        for rings in self._rings.values():
            rings.positions[block * self._window : (block + 1) * self._window] = -1

    def missing(self, rows: Ints) -> set[int]:
        """Return those of the rows that are not open."""
        return set(rows.tolist()).difference(self._keys)

    def close(self, row: int) -> None:
        if row in self._keys:
            self._free.append(int(self._blocks[row]))
            self._blocks[row] = _NO_BLOCK
            del self._keys[row]

    def hold_on(self, device: torch.device) -> "_Rings":
        """Return a device's memory, allocated once; raise if the device has too little."""
        if device not in self._rings:
            self._rings[device] = _Rings(self._size * self._window, self._vocab_size, device)
        return self._rings[device]

    def take(
        self,
        device: torch.device,
        rows: Sequence[int] | Ints,
        positions: Sequence[int] | Ints,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """Return copies, [n, vocab_size], of the noise of `positions[i]` of `rows[i]`.

        `dtype` is float64, or float32, to which values are rounded.
        """
        places = self._find(device, np.asarray(rows), np.asarray(positions))
        return self._rings[device].copied(places, dtype)

    def recall(
        self,
        device: torch.device,
        rows: Ints,
        positions: Ints,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """Return the noise, [n, vocab_size], of positions that may be long past.

        The ring keeps positions that are ahead; the others are drawn again.
        """
        values = np.empty((len(rows), self._vocab_size))
        places = self._blocks[rows] * self._window + positions % self._window
        rings = self.hold_on(device)
        is_kept = rings.positions[places] == positions
        kept = rings.copied(places[is_kept], torch.float64) if is_kept.any() else None
        for index in np.flatnonzero(~is_kept).tolist():
            seed, stream = self._keys[int(rows[index])]
            gumbel(seed, int(positions[index]), self._vocab_size, stream, out=values[index])
        found = torch.from_numpy(values).to(device, dtype, non_blocking=True)
        if kept is not None:
            where = torch.from_numpy(np.flatnonzero(is_kept)).to(device)
            found[where] = kept.to(dtype)
        return found

    def _find(self, device: torch.device, rows: Ints, positions: Ints) -> Ints:
        """Return the places, [n], of noise on a device, which is drawn if it is missing."""
        self.hold_on(device)
        blocks = self._blocks[rows]
        assert (blocks != _NO_BLOCK).all(), "a row has no noise"
        places: Ints = blocks * self._window + positions % self._window
        missing = self._rings[device].positions[places] != positions
        if missing.any():
            new = dict.fromkeys(  # each of them once
                zip(
                    np.asarray(rows)[missing].tolist(),
                    places[missing].tolist(),
                    positions[missing].tolist(),
                    strict=True,
                )
            )
            missed = [*new]
            for start in range(0, len(missed), self._threads):
                self._fill(missed[start : start + self._threads])
        return places

    def _fill(self, missed: list[_Missed]) -> None:
        """Draw noise for every device, because copying is much less work than drawing."""
        host = self._rings.get(_HOST)

        def drawn(one: _Missed) -> NDArray[np.float64]:
            row, place, position = one
            seed, stream = self._keys[row]
            out = None if host is None else host.values[place].numpy()
            return gumbel(seed, position, self._vocab_size, stream, out)

        noises: Iterable[NDArray[np.float64]] = map(drawn, missed)
        if len(missed) > 1 and self._vocab_size >= _MANY:
            noises = self._workers.map(drawn, missed)
        for (_, place, position), noise in zip(missed, noises, strict=True):
            for rings in self._rings.values():
                rings.put(place, position, None if rings is host else torch.from_numpy(noise))

    @cached_property
    def _workers(self) -> ThreadPoolExecutor:
        """Threads that draw noise, and end with the bank."""
        return ThreadPoolExecutor(self._threads, "specrouter-noise")

    def _grow(self) -> None:
        """Double the blocks.

        If that fails on one device, no block is in use that another device lacks.
        """
        size = max(1, 2 * self._size)
        for rings in self._rings.values():
            rings.grow(size * self._window)
        self._free += range(size - 1, self._size - 1, -1)
        self._size = size


class _Rings:
    """The rings of all rows on one device, one after the other.

    After the first request for float32 on a CPU, a rounded copy is kept of each position.
    """

    def __init__(self, places: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self.positions = np.full(places, -1, dtype=np.int64)  # of each place
        self.values = self._empty(places, torch.float64)  # [places, vocab_size]
        self._rounded: Tensor | None = None  # [places, vocab_size] float32

    def grow(self, places: int) -> None:
        """Add places, and keep the contents of the others."""
        old = len(self.positions)
        if places <= old:
            return
        values = self._empty(places, torch.float64)
        values[:old] = self.values
        if self._rounded is not None:
            rounded = self._empty(places, torch.float32)
            rounded[:old] = self._rounded
            self._rounded = rounded
        self.values = values
        self.positions = np.pad(self.positions, (0, places - old), constant_values=-1)

    def put(self, place: int, position: int, noise: Tensor | None) -> None:
        """Store `noise`, [vocab_size] on the host, in a place; None: it is there already."""
        if noise is not None:
            self.values[place].copy_(noise, non_blocking=True)
        if self._rounded is not None:
            self._rounded[place].copy_(self.values[place])
        self.positions[place] = position

    def copied(self, places: Ints, dtype: torch.dtype) -> Tensor:
        """Return copies, [n, vocab_size], in float64, or rounded to float32."""
        index = torch.from_numpy(places).to(self._device, non_blocking=True)
        if dtype == torch.float64:
            return self.values.index_select(0, index)
        if self._device.type != "cpu":  # rounding costs less there than the memory
            return self.values.index_select(0, index).to(dtype)
        if self._rounded is None:
            self._rounded = self._empty(len(self.positions), torch.float32)
            self._rounded.copy_(self.values)
        return self._rounded.index_select(0, index)

    def _empty(self, places: int, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):  # rows are opened outside inference mode
            return torch.empty((places, self._vocab_size), dtype=dtype, device=self._device)
