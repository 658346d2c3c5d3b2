"""RowNoise: the noise of the rows that sample, which all models of a chain share.

Contract: a row takes memory for noise when noise is first requested: rows that kernels draw for
take none. The noise is a pure function of a row's seed and stream and the place
(`processors.noise`).
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from processors.contexts import Contexts
from processors.logits import on_device
from processors.noise import NoiseBank, gumbel_at, gumbel_of_place
from processors.sampling_row import SamplingSettings
from processors.token_tree import Ints

# If at most 1/32 of many ids can win, drawing for these alone takes at most half the time.
_MANY, _FEW = 2**15, 32
# An id cannot win if another's score without noise is larger by this: noise is between
# -log(54 log 2) and 53 log 2, -3.63 and 36.74. At a low temperature that leaves few ids.
_FAR, _COLD = 41.0, 0.5


class RowNoise:
    """Noise of the open rows; a cycle may read at most `window` output positions of a row."""

    def __init__(self, vocab_size: int, window: int) -> None:
        self._seeds: dict[int, tuple[int, int]] = {}  # row -> seed, stream; rows that sample
        self._limited = set[int]()  # rows where few ids can win, by their settings
        self._bank = NoiseBank(vocab_size, window)

    def open(
        self, row: int, settings: SamplingSettings, device: torch.device | None = None
    ) -> None:
        """Open a row; for `device` see `Sampler.open`."""
        self.close(row)
        if settings.temperature == 0:
            return
        self._seeds[row] = (settings.seed, settings.stream)
        has_limits = settings.top_k > 0 or settings.top_p < 1.0 or settings.min_p > 0.0
        if has_limits or settings.temperature <= _COLD:
            self._limited.add(row)
        if device is not None:
            self._hold(np.array([row]))
            self._bank.hold_on(device)

    def close(self, row: int) -> None:
        self._seeds.pop(row, None)
        self._limited.discard(row)
        self._bank.close(row)

    def of(
        self,
        like: Tensor,
        contexts: Contexts,
        sampled: "list[int] | slice" = slice(None),
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """Return Gumbel noise, [len(sampled), V], in its own memory.

        `like`, [..., V], has its vocabulary and device. `sampled` are the contexts whose rows
        sample.
        """
        rows, positions = contexts.rows[sampled], contexts.positions[sampled]
        self._hold(rows)
        noise = self._bank.recall if contexts.are_past else self._bank.take
        return noise(like.device, rows, positions, dtype)[:, : like.shape[-1]]

    def is_sparse(self, logits: Tensor, rows: Ints) -> bool:
        """Return whether `add_to` may draw for few of the ids at places of all these rows."""
        is_large = logits.device.type == "cpu" and logits.shape[-1] >= _MANY
        return is_large and self._limited.issuperset(rows.tolist())

    def add_to(self, scores: Tensor, contexts: Contexts, sampled: list[int]) -> None:
        """Add noise to some of the scores [n, V], where it may change which is the largest.

        On a CPU, if few ids among many can win, only these get noise, with the same values.
        """
        few = self._few_able(scores, contexts, sampled)
        if few:
            self._add_to_few(scores, contexts, few)
            sampled = [index for index in sampled if index not in few]
        if not sampled:
            return
        noise = self.of(scores, contexts, sampled, scores.dtype)
        if len(sampled) == len(scores):
            scores.add_(noise)
        else:
            where = on_device(np.array(sampled, dtype=np.int64), scores.device)
            scores.index_add_(0, where, noise)

    def _few_able(self, scores: Tensor, contexts: Contexts, sampled: list[int]) -> dict[int, Ints]:
        """Return by place the ids that can win, for places where they are few among many."""
        rows, able = contexts.rows, dict[int, Ints]()
        for index in sampled:
            if self.is_sparse(scores, rows[index : index + 1]):
                values = scores[index].numpy()
                least = max(values.max() - _FAR, np.finfo(values.dtype).min)
                ids = np.flatnonzero(values >= least)
                if len(ids) * _FEW <= len(values):
                    able[index] = ids
        return able

    def _add_to_few(self, scores: Tensor, contexts: Contexts, few: dict[int, Ints]) -> None:
        values, which = scores.numpy(), np.array([*few])
        line = np.repeat(np.arange(len(few)), [len(ids) for ids in few.values()])
        at, ids = which[line], np.concatenate([*few.values()])
        keys = np.array(
            [self._seeds[row] for row in contexts.rows[which].tolist()], dtype=np.uint64
        )
        noise = gumbel_at(keys[line, 0], keys[line, 1], contexts.positions[at], ids)
        values[at, ids] += noise.astype(values.dtype)

    def at(self, row: int, position: int, ids: Ints) -> NDArray[np.float64]:
        """Return the noise of a row's output position at some ids, on the host; 0 if greedy."""
        if row not in self._seeds:
            return np.zeros(len(ids))
        return gumbel_of_place(*self._seeds[row], position, ids)

    def _hold(self, rows: Ints) -> None:
        """Allocate memory for these rows."""
        for row in self._bank.missing(rows):
            self._bank.open(row, *self._seeds[row])
