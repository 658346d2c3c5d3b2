"""One rule by which every model of a chain chooses a token from its logits.

The token at output position k is the argmax of `processed logits / temperature + Gumbel(seed, k)`,
plain argmax at temperature 0; ties go to the lowest id. Order: temperature, top-k, top-p. It
depends on the logits, the row's settings and k, and on nothing that stands beside it.
Source: the Gumbel-max trick; Daliri, Musco, Suresh, arXiv 2408.07978 (shared noise as a coupling).
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from processors.noise import NoiseBank

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class SamplingSettings:
    """Of one row. temperature 0: greedy; top_k 0 and top_p 1.0: off."""

    temperature: float
    top_k: int
    top_p: float
    seed: int


class Sampler:
    """Args: `window`: the most output positions of a row that one cycle may look at."""

    def __init__(self, vocab_size: int, window: int) -> None:
        self._vocab_size = vocab_size
        self._window = window
        self._settings: dict[int, SamplingSettings] = {}
        self._banks: dict[torch.device, NoiseBank] = {}

    def open(self, row: int, settings: SamplingSettings) -> None:
        self._settings[row] = settings
        if settings.temperature > 0:
            for bank in self._banks.values():
                bank.open(row, settings.seed)

    def close(self, row: int) -> None:
        self._settings.pop(row, None)
        for bank in self._banks.values():
            bank.close(row)

    def choose(self, logits: Tensor, rows: Ints, positions: Ints) -> Tensor:
        """Choices [n] int64 on the logits' device.

        Args:
            logits: [n, V].
            rows, positions: [n], whose settings apply, and the output position of each choice.
        """
        settings = [self._settings[row] for row in rows.tolist()]
        sampled = [index for index, s in enumerate(settings) if s.temperature > 0]
        if not sampled:
            return logits.argmax(dim=-1)
        chosen = self._sample(
            logits if len(sampled) == len(settings) else logits[_index(sampled, logits)],
            [settings[index] for index in sampled],
            rows[sampled],
            positions[sampled],
        )
        if len(sampled) == len(settings):
            return chosen
        choices = logits.argmax(dim=-1)
        return choices.index_copy_(0, _index(sampled, logits), chosen)

    def _sample(
        self, logits: Tensor, settings: list[SamplingSettings], rows: Ints, positions: Ints
    ) -> Tensor:
        scores = process_logits(logits, settings)
        noise = self._bank(logits.device).take(rows.tolist(), positions.tolist())
        return scores.add_(noise[:, : scores.shape[-1]]).argmax(dim=-1)

    def _bank(self, device: torch.device) -> NoiseBank:
        if device not in self._banks:
            bank = NoiseBank(self._vocab_size, self._window, device)
            for row, settings in self._settings.items():
                if settings.temperature > 0:
                    bank.open(row, settings.seed)
            self._banks[device] = bank
        return self._banks[device]


def process_logits(logits: Tensor, settings: list[SamplingSettings]) -> Tensor:
    """Logits over temperature, what top-k and top-p exclude at -inf. [n, V] -> [n, V] float64."""
    temperature = _column([s.temperature for s in settings], logits)
    scores = logits.to(torch.float64, copy=True).div_(temperature)
    if any(s.top_k > 0 for s in settings):
        size = scores.shape[-1]
        _keep_top_k(scores, [min(s.top_k, size) if s.top_k > 0 else size for s in settings])
    if any(s.top_p < 1.0 for s in settings):
        _keep_top_p(scores, _column([s.top_p for s in settings], logits))
    return scores


def _keep_top_k(scores: Tensor, top_k: list[int]) -> None:
    """Excludes what is below the k-th largest; ties with it stay, as in `transformers`."""
    limited = [index for index, k in enumerate(top_k) if k < scores.shape[-1]]
    if not limited:
        return
    which = _index(limited, scores)
    ranks = torch.tensor([top_k[index] - 1 for index in limited]).to(scores.device)
    largest = scores[which].topk(max(top_k[index] for index in limited), dim=-1).values
    threshold = largest.gather(1, ranks.unsqueeze(1))  # [m, 1]
    kept = scores[which]
    scores[which] = kept.masked_fill_(kept < threshold, float("-inf"))


def _keep_top_p(scores: Tensor, top_p: Tensor) -> None:
    """Keeps the smallest set of most probable ids that holds `top_p`; ties to the lowest id."""
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1).sub_(probabilities)
    excluded = (before >= top_p) & (top_p < 1.0)
    excluded[:, 0] = False
    scores.masked_fill_(torch.zeros_like(excluded).scatter_(1, ids, excluded), float("-inf"))


def _column(values: list[float], like: Tensor) -> Tensor:
    """[n, 1] float64."""
    return torch.tensor(values, dtype=torch.float64).to(like.device).unsqueeze(1)


def _index(values: list[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(like.device)
