"""RowNoise: the noise of the rows that sample, by purpose.

Contract: purpose 0 is the noise that all models of a chain share; every other purpose is
independent of it and of the others. A row takes memory for a purpose once that is asked for: those
that kernels draw for take none. What is drawn is a pure function of a row's seed and stream, the
purpose, and the place (`processors.noise`).
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from processors.contexts import Contexts
from processors.logits import on_device
from processors.noise import NoiseBank, gumbel_at, uniform
from processors.sampling_row import SamplingSettings
from processors.token_tree import Ints

_PURPOSE = 2**32  # streams of one purpose; those of a request's samples are fewer
# Where at most a 32nd of many ids can win, to draw for these alone takes half the time at most.
_MANY, _FEW = 2**15, 32
# No id wins over one whose score is so much larger without noise: noise is between -log(54 log 2)
# and 53 log 2, -3.63 and 36.74. At a small temperature that leaves few ids.
_FAR, _COLD = 41.0, 0.5


class RowNoise:
    """Args: `window`: the most output positions of a row that one cycle may look at."""

    def __init__(self, vocab_size: int, window: int) -> None:
        self._vocab_size = vocab_size
        self._window = window
        self._seeds: dict[int, tuple[int, int]] = {}  # row -> seed, stream; rows that sample
        self._limited = set[int]()  # those where few ids can win, by their settings
        self._banks: dict[int, NoiseBank] = {}  # by purpose

    def open(
        self,
        row: int,
        settings: SamplingSettings,
        held: tuple[torch.device, int] | None = None,
    ) -> None:
        """`held`: see `Sampler.open`."""
        self.close(row)
        if settings.temperature == 0:
            return
        self._seeds[row] = (settings.seed, settings.stream)
        has_limits = settings.top_k > 0 or settings.top_p < 1.0 or settings.min_p > 0.0
        if has_limits or settings.temperature <= _COLD:
            self._limited.add(row)
        if held is not None:
            device, purpose = held
            for each in {purpose, *self._banks}:
                self._bank(each, np.array([row]))
            self._banks[purpose].hold_on(device)

    def close(self, row: int) -> None:
        self._seeds.pop(row, None)
        self._limited.discard(row)
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
        rows, positions = contexts.rows[sampled], contexts.positions[sampled]
        bank, device = self._bank(purpose, rows), like.device
        if contexts.are_past:
            assert not purpose, "only the shared noise is asked for again"
            return bank.recall(device, rows, positions, dtype)[:, : like.shape[-1]]
        draws = draws_of(contexts)[sampled] if purpose else None
        return bank.take(device, rows, positions, draws, dtype)[:, : like.shape[-1]]

    def is_sparse(self, logits: Tensor, rows: Ints) -> bool:
        """Whether `add_to` may draw for few of the ids at places of all these rows."""
        is_large = logits.device.type == "cpu" and logits.shape[-1] >= _MANY
        return is_large and self._limited.issuperset(rows.tolist())

    def add_to(self, scores: Tensor, contexts: Contexts, purpose: int, sampled: list[int]) -> None:
        """Adds noise to some of the scores [n, V], where it may change which is the largest.

        On a CPU, where few ids among many can win, these alone get it: the same values.
        """
        few = self._few_able(scores, contexts, sampled)
        if few:
            self._add_to_few(scores, contexts, purpose, few)
            sampled = [index for index in sampled if index not in few]
        if not sampled:
            return
        noise = self.of(scores, contexts, purpose, sampled, scores.dtype)
        if len(sampled) == len(scores):
            scores.add_(noise)
        else:
            where = on_device(np.array(sampled, dtype=np.int64), scores.device)
            scores.index_add_(0, where, noise)

    def _few_able(self, scores: Tensor, contexts: Contexts, sampled: list[int]) -> dict[int, Ints]:
        """By place, the ids that can win there: of the places where they are few among many."""
        rows, able = contexts.rows, dict[int, Ints]()
        for index in sampled:
            if self.is_sparse(scores, rows[index : index + 1]):
                values = scores[index].numpy()
                least = max(values.max() - _FAR, np.finfo(values.dtype).min)
                ids = np.flatnonzero(values >= least)
                if len(ids) * _FEW <= len(values):
                    able[index] = ids
        return able

    def _add_to_few(
        self, scores: Tensor, contexts: Contexts, purpose: int, few: dict[int, Ints]
    ) -> None:
        values, which = scores.numpy(), np.array([*few])
        line = np.repeat(np.arange(len(few)), [len(ids) for ids in few.values()])
        at, ids = which[line], np.concatenate([*few.values()])
        keys = np.array(
            [self._seeds[row] for row in contexts.rows[which].tolist()], dtype=np.uint64
        )
        draws = draws_of(contexts)[at] if purpose else np.zeros_like(at)
        streams = keys[line, 1] + np.uint64(purpose * _PURPOSE)
        noise = gumbel_at(keys[line, 0], streams, contexts.positions[at], draws, ids)
        values[at, ids] += noise.astype(values.dtype)

    def at(self, row: int, position: int, ids: Ints) -> NDArray[np.float64]:
        """The shared noise of a row's output position at some ids, on the host; 0 if greedy."""
        if row not in self._seeds:
            return np.zeros(len(ids))
        bank, is_large = self._banks.get(0), self._vocab_size >= _MANY  # then few are drawn
        if bank is None or row not in bank or (is_large and row in self._limited):
            keys = np.repeat(np.array([self._seeds[row]], dtype=np.uint64), len(ids), axis=0)
            same = np.full(len(ids), position)
            return gumbel_at(keys[:, 0], keys[:, 1], same, np.zeros_like(same), ids)
        noise: NDArray[np.float64] = bank.peek(row, position)[ids]
        return noise

    def _bank(self, purpose: int, rows: Ints) -> NoiseBank:
        """With memory for these rows."""
        bank = self._banks.get(purpose)
        if bank is None:
            bank = self._banks[purpose] = NoiseBank(self._vocab_size, self._window)
        for row in bank.missing(rows):
            seed, stream = self._seeds[row]
            bank.open(row, seed, stream + purpose * _PURPOSE)
        return bank


def uniforms(
    settings: list[SamplingSettings], contexts: Contexts, purpose: int
) -> "NDArray[np.float64]":
    """A number in [0, 1) of each place, [n], independent of all Gumbel noise. `settings`: [n]."""
    positions, draws = contexts.positions.tolist(), draws_of(contexts).tolist()
    values = [
        uniform(one.seed, position, stream_of(one, purpose), draw)
        for one, position, draw in zip(settings, positions, draws, strict=True)
    ]
    return np.array(values, dtype=np.float64)


def stream_of(settings: SamplingSettings, purpose: int) -> int:
    """Of the generator, for a purpose."""
    return settings.stream + purpose * _PURPOSE


def draws_of(contexts: Contexts) -> Ints:
    """[n] which draw for its position it is: where its cycle began.

    A draw that a cycle threw away may have moved the router's next decision. The position is drawn
    anew in a later cycle, and must then know nothing of it.
    """
    draws: Ints = contexts.positions - contexts.depths + 1
    return draws
