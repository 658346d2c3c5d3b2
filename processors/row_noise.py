"""RowNoise: the noise of the rows that sample, by purpose.

Contract: purpose 0 is the noise that all models of a chain share; every other purpose is
independent of it and of the others. A purpose takes memory once it is asked for. What is drawn is a
pure function of a row's seed and stream, the purpose, and the place (`processors.noise`).
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from processors.contexts import Contexts, Ints
from processors.noise import NoiseBank, uniform
from processors.sampling_row import SamplingSettings

_PURPOSE = 2**32  # streams of one purpose; those of a request's samples are fewer


class RowNoise:
    """Args: `window`: the most output positions of a row that one cycle may look at."""

    def __init__(self, vocab_size: int, window: int) -> None:
        self._vocab_size = vocab_size
        self._window = window
        self._seeds: dict[int, tuple[int, int]] = {}  # row -> seed, stream; rows that sample
        self._banks: dict[int, NoiseBank] = {}  # by purpose

    def open(
        self,
        row: int,
        settings: SamplingSettings,
        held: tuple[torch.device, int] | None = None,
    ) -> None:
        """`held`: see `Sampler.open`."""
        self._seeds.pop(row, None)
        if settings.temperature == 0:
            return
        self._seeds[row] = (settings.seed, settings.stream)
        for purpose, bank in self._banks.items():
            bank.open(row, settings.seed, settings.stream + purpose * _PURPOSE)
        if held is not None:
            device, purpose = held
            self._bank(purpose).hold_on(device)

    def close(self, row: int) -> None:
        self._seeds.pop(row, None)
        for bank in self._banks.values():
            bank.close(row)

    def of(
        self,
        like: Tensor,
        contexts: Contexts,
        purpose: int,
        sampled: "list[int] | slice" = slice(None),
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """[len(sampled), V] Gumbel noise, of its own memory.

        Args:
            like: [..., V], whose vocabulary and device it takes.
            sampled: those of the contexts whose rows sample.
        """
        bank, device = self._bank(purpose), like.device
        rows, positions = contexts.rows[sampled], contexts.positions[sampled]
        if contexts.are_past:
            assert not purpose, "only the shared noise is asked for again"
            return bank.recall(device, rows, positions, dtype)[:, : like.shape[-1]]
        draws = _draws(contexts)[sampled] if purpose else None
        return bank.take(device, rows, positions, draws, dtype)[:, : like.shape[-1]]

    def at(self, row: int, position: int, ids: Ints) -> NDArray[np.float64]:
        """The shared noise of a row's output position at some ids, on the host; 0 if greedy."""
        if row not in self._seeds:
            return np.zeros(len(ids))
        noise: NDArray[np.float64] = self._bank(0).peek(row, position)[ids]
        return noise

    def _bank(self, purpose: int) -> NoiseBank:
        if purpose not in self._banks:
            bank = NoiseBank(self._vocab_size, self._window)
            for row, (seed, stream) in self._seeds.items():
                bank.open(row, seed, stream + purpose * _PURPOSE)
            self._banks[purpose] = bank
        return self._banks[purpose]


def uniforms(
    settings: list[SamplingSettings], contexts: Contexts, purpose: int
) -> "NDArray[np.float64]":
    """A number in [0, 1) of each place, [n], independent of all Gumbel noise. `settings`: [n]."""
    positions, draws = contexts.positions.tolist(), _draws(contexts).tolist()
    values = [
        uniform(one.seed, position, one.stream + purpose * _PURPOSE, draw)
        for one, position, draw in zip(settings, positions, draws, strict=True)
    ]
    return np.array(values, dtype=np.float64)


def _draws(contexts: Contexts) -> Ints:
    """[n] which draw for its position it is: where its cycle began.

    A draw that a cycle threw away may have moved the router's next decision. The position is drawn
    anew in a later cycle, and must then know nothing of it.
    """
    draws: Ints = contexts.positions - contexts.depths + 1
    return draws
