"""FusedSampler: a sampler that chooses for plain rows by kernels, if the logits are on CUDA.

Contract: for a plain row (temperature alone), noise, scores and best ids are computed in one pass
over its logits (`processors.choice_kernels`), and no memory is used for noise there. Every other
row, with edits, limits, a grammar or processors of its own, is handled by `Sampler`; so are all
rows on other devices. Choices are those of `Sampler` unless two scores are within 1e-14 of each
other, because of the logarithms of two libraries.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from processors.choice_kernels import Best, NoiseKeys, best_of, scores_of
from processors.contexts import Contexts
from processors.logits import on_device
from processors.sampler import Choice, Sampler, by_kind, merged, rows_of
from processors.token_tree import Ints


class FusedSampler(Sampler):
    """A sampler whose kernels take logits on `device_type`; tests use another one."""

    def __init__(self, vocab_size: int, window: int, device_type: str = "cuda") -> None:
        super().__init__(vocab_size, window)
        self._device_type = device_type

    def _holds_noise(self, row: int, device: torch.device | None) -> torch.device | None:
        is_plain = self._plain[row] and row not in self.grammars
        is_drawn = device is not None and device.type == self._device_type and is_plain
        return None if is_drawn else device

    def choose(self, logits: Tensor, contexts: Contexts) -> tuple[Tensor, Tensor]:
        def fused(logits: Tensor, contexts: Contexts) -> Choice:
            best = self._best(logits, contexts, 1)
            return best.ids[:, 0], best.scores[:, 0]

        ids, scores = by_kind(
            logits, contexts, self._is_fused(logits, contexts), fused, super().choose
        )
        return ids, scores

    def rank(self, logits: Tensor, contexts: Contexts, width: int) -> tuple[Tensor, Tensor]:
        def fused(logits: Tensor, contexts: Contexts) -> Choice:
            best = self._best(logits, contexts, min(width, logits.shape[-1]))
            shares = (best.scores - _known(best.totals)[:, None]).clamp_(max=0.0)
            return best.ids, shares

        def other(logits: Tensor, contexts: Contexts) -> Choice:
            return super(FusedSampler, self).rank(logits, contexts, width)

        ids, log_probs = by_kind(logits, contexts, self._is_fused(logits, contexts), fused, other)
        return ids, log_probs

    def rescore(
        self, logits: Tensor, contexts: Contexts, parents: Ints, tokens: Ints
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        is_fused = self._is_fused(logits, contexts)
        if not is_fused.any():
            return super().rescore(logits, contexts, parents, tokens)
        kinds, own = (is_fused, ~is_fused), is_fused[parents]
        found, asked = [], []
        for kind, which in zip(kinds, (own, ~own), strict=True):
            index = np.flatnonzero(kind)
            among = np.searchsorted(index, parents[which])
            part = rows_of(logits, index), contexts.take(index), among, tokens[which]
            one = self._rescore_fused(*part) if kind is is_fused else super().rescore(*part)
            found.append((index, one[:3]))
            asked.append((np.flatnonzero(which), one[3:]))
        ids, scores, shares = merged(found)
        return ids, scores, shares, merged(asked)[0]

    def _rescore_fused(
        self, logits: Tensor, contexts: Contexts, parents: Ints, tokens: Ints
    ) -> Choice:
        best = self._best(logits, contexts, 1)
        totals, device = _known(best.totals), logits.device
        places = on_device(parents, device)
        keys = self._keys(contexts, device)
        scores = scores_of(logits, keys, places, on_device(tokens, device))
        shares = (best.scores[:, 0] - totals).clamp_(max=0.0)
        asked = (scores - totals.index_select(0, places)).clamp_(max=0.0)
        return best.ids[:, 0], best.scores[:, 0], shares, asked

    def _is_fused(self, logits: Tensor, contexts: Contexts) -> NDArray[np.bool_]:
        """Return a mask, [n], of the places that kernels choose for."""
        if logits.device.type != self._device_type:
            return np.zeros(len(contexts.rows), dtype=np.bool_)
        return self._is_plain(contexts)

    def _best(self, logits: Tensor, contexts: Contexts, width: int) -> Best:
        return best_of(logits, self._keys(contexts, logits.device), width)

    def _keys(self, contexts: Contexts, device: torch.device) -> NoiseKeys:
        """Copy the keys to the device at once, four numbers for each place."""
        numbers = np.empty((4, len(contexts.rows)), dtype=np.uint64)
        numbers[:2] = self._seeds[contexts.rows].T
        numbers[2] = contexts.positions
        numbers[3] = self._temperatures[contexts.rows].view(np.uint64)
        there = on_device(numbers.view(np.int64), device)
        return NoiseKeys(there[:3], there[3].view(torch.float64))


def _known(totals: Tensor) -> Tensor:
    """Replace totals by 0 where every score is -inf, like `processors.logits.log_total`."""
    return totals.masked_fill(totals.isneginf(), 0.0)
