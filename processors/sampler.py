"""Sampler: the one rule by which every model of a chain chooses a token from its logits.

The token at output position k is the argmax of `processed logits / temperature + Gumbel(seed, k)`,
plain argmax at temperature 0; ties go to the lowest id. It depends on the logits, the row's
settings, its tokens and k, and on no other row of the batch. Order: logit bias, repetition,
frequency and presence penalties, bad words, minimum length, own processors, the row's grammar;
then, above temperature 0, temperature, top-k, top-p, min-p, noise. Drafts ignore grammars. A row's
settings and text are in `sampling_row`, the changes of its scores in `score_edits`.
Source: the Gumbel-max trick; Daliri, Musco, Suresh, arXiv 2408.07978 (shared noise as a coupling).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelpool.kernels.library import linear_kernels
from processors.contexts import Contexts
from processors.grammar import Bits, TokenGrammar
from processors.grammar_masks import GrammarMasks
from processors.logits import best, column, log_shares, log_total, on_device, parts, top
from processors.row_noise import RowNoise
from processors.sampling_row import SamplingRow, SamplingSettings
from processors.score_edits import edit, warp
from processors.token_tree import Ints


class Sampler:
    """Choice of tokens; a cycle may read at most `window` output positions of a row."""

    def __init__(self, vocab_size: int, window: int) -> None:
        self._vocab_size = vocab_size
        self._rows: dict[int, SamplingRow] = {}
        # By row, to read many contexts at once; a closed row is not plain.
        self._temperatures = np.zeros(0)
        self._plain = np.zeros(0, dtype=np.bool_)
        self._seeds = np.zeros((0, 2), dtype=np.uint64)  # and streams
        self._errors: dict[int, Exception] = {}
        self._masks = GrammarMasks(vocab_size, self._errors)
        self._noise = RowNoise(vocab_size, window)

    @property
    def grammars(self) -> Mapping[int, TokenGrammar]:
        """The grammars of the rows that have one."""
        return self._masks.by_row

    def open(
        self,
        row: int,
        settings: SamplingSettings,
        prompt: Sequence[int] = (),
        output: Sequence[int] = (),
        device: torch.device | None = None,
    ) -> None:
        """Open a row with its committed text, `prompt` and `output`.

        `device` is where a sampled row will need noise in any case. Without memory for it this
        raises, which concerns the row alone; later the error could occur in a pack of many rows.
        """
        self._errors.pop(row, None)
        self._rows[row] = opened = SamplingRow(settings, prompt, output, self._vocab_size)
        missing = (0, max(0, row + 1 - len(self._plain)))
        self._temperatures = np.pad(self._temperatures, missing)
        self._plain = np.pad(self._plain, missing)
        self._seeds = np.pad(self._seeds, (missing, (0, 0)))
        self._seeds[row] = settings.seed, settings.stream
        self._temperatures[row] = settings.temperature
        self._plain[row] = not (opened.edits or opened.warps)
        self._masks.open(row, opened, list(output))
        self._noise.open(row, settings, self._holds_noise(row, device))

    def _holds_noise(self, row: int, device: torch.device | None) -> torch.device | None:
        """Return the device on which a row takes memory for noise at once."""
        return device

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """Add committed output tokens to a row."""
        self._rows[row].extend(tokens)
        self._masks.extend(row, list(tokens))

    def close(self, row: int) -> None:
        if self._rows.pop(row, None) is not None:
            self._plain[row] = False
        self._errors.pop(row, None)
        self._masks.close(row)
        self._noise.close(row)

    def take_errors(self) -> dict[int, Exception]:
        """Return the first errors, by row, of own processors or grammars since the last call.

        No token may be chosen where one failed, which matters only if the text gets there.
        """
        errors = dict(self._errors)
        self._errors.clear()
        return errors

    def forget_errors(self, rows: Ints) -> None:
        """Forget the errors of these rows, which drafters met and which concern drafts only."""
        for row in rows.tolist() if self._errors else ():
            self._errors.pop(row, None)

    def refuse(self, row: int, error: Exception) -> None:
        """Record that no token can be chosen for a row, due to its own settings or text."""
        self._errors.setdefault(row, error)

    def needs_paths(self, rows: Ints) -> bool:
        """Return whether the settings of any of the rows depend on the text."""
        return any(self._rows[row].reads_text for row in rows.tolist())

    def can_look_back(self, rows: Ints) -> NDArray[np.bool_]:
        """Return a mask, [R], of rows whose earlier choices can be made again.

        None of their settings depends on the text, which is longer now.
        """
        able = [
            not self._rows[row].reads_text and row not in self.grammars for row in rows.tolist()
        ]
        return np.array(able, dtype=np.bool_)

    def masks(
        self, rows: Ints, positions: Ints, depths: Ints, paths: Ints, of_target: bool = True
    ) -> Bits | None:
        """Return what grammars allow at n places; see `GrammarMasks.at`."""
        return self._masks.at(rows, positions, depths, paths, of_target)

    def scores(self, logits: Tensor, contexts: Contexts) -> Tensor:
        """Return the scores whose argmax is the choice, [n, V] float64.

        `logits` are [n, V] in any precision, and are not changed; for plain greedy they are
        returned. This waits for the device only if a row has processors of its own.
        """
        return self._scores(logits, contexts, torch.float64)

    def choose(self, logits: Tensor, contexts: Contexts) -> tuple[Tensor, Tensor]:
        """Return the choices [n] int64 and their scores [n], NaN where logits hold NaN."""
        if logits.device.type != "cpu" or logits.dtype is not torch.float32:
            return self._chosen(logits, contexts)
        kernels = linear_kernels()
        if kernels is None:
            return self._chosen(logits, contexts)
        by_kernel = partial(self._chosen_by, kernels.library)
        is_plain = self._is_plain(contexts)
        ids, scores = by_kind(logits, contexts, is_plain, by_kernel, self._chosen)
        return ids, scores

    def _is_plain(self, contexts: Contexts) -> NDArray[np.bool_]:
        """Return a mask, [n], of the places of rows with no settings but a temperature."""
        plain = self._plain[contexts.rows]
        if contexts.masks is not None:
            plain &= ~np.isin(contexts.rows, list(self.grammars))
        return plain

    def _chosen_by(self, library: Any, logits: Tensor, contexts: Contexts) -> tuple[Tensor, Tensor]:
        """Choose for plain places, without memory for noise."""
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        rows, positions = contexts.rows, contexts.positions.astype(np.uint64)
        keys = np.column_stack((self._seeds[rows], positions))
        temperatures = self._temperatures[rows]
        ids = torch.empty(len(rows), dtype=torch.int64)
        scores = torch.empty(len(rows), dtype=torch.float64)
        library.sr_choose(
            logits.data_ptr(), *logits.shape, logits.stride(0), keys.ctypes.data,
            temperatures.ctypes.data, ids.data_ptr(), scores.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return ids, scores

    def _chosen(self, logits: Tensor, contexts: Contexts) -> tuple[Tensor, Tensor]:
        pieces = parts(len(logits), logits)
        values, ids = _joined(
            [best(self.scores(logits[part], contexts.take(part))) for part in pieces]
        )
        return ids.squeeze(1), values.squeeze(1)

    def rank(self, logits: Tensor, contexts: Contexts, width: int) -> tuple[Tensor, Tensor]:
        """Return the `width` best ids [n, width], best first, and their log-softmax of the scores.

        The first is the choice, up to rounding: drafts need not be exact, and their scores are
        float32 unless logits are float64 or a row's scores are edited. Log-probabilities are
        float64, at most 0, and NaN where logits hold NaN. Ties after the first place are in no
        order.
        """
        pieces = parts(len(logits), logits)
        ids, log_probs = _joined(
            [self._rank(logits[part], contexts.take(part), width) for part in pieces]
        )
        return ids, log_probs

    def _rank(self, logits: Tensor, contexts: Contexts, width: int) -> tuple[Tensor, Tensor]:
        precision = torch.float64 if logits.dtype == torch.float64 else torch.float32
        scores = self._scores(logits, contexts, precision)
        values, ids = top(scores, width)
        return ids, log_shares(scores, values, ids)

    def rescore(
        self, logits: Tensor, contexts: Contexts, parents: Ints, tokens: Ints
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Choose, and return log-probabilities under the same scores.

        `parents` and `tokens`, [m], are a context and an id after it.

        Returns:
            Choices [n], their scores [n], their log-probabilities [n] float64, and those of the
            tokens [m] float64.
        """
        order = np.argsort(parents, kind="stable")
        ordered = parents[order]
        found = []
        for part in parts(len(logits), logits):
            own = slice(*np.searchsorted(ordered, (part.start, part.stop)).tolist())
            asked = ordered[own] - part.start, tokens[order[own]]
            found.append(self._rescore(logits[part], contexts.take(part), *asked))
        ids, values, log_probs, others = _joined(found)
        back = on_device(np.argsort(order), logits.device)
        return ids.squeeze(1), values.squeeze(1), log_probs.squeeze(1), others.index_select(0, back)

    def _rescore(
        self, logits: Tensor, contexts: Contexts, parents: Ints, tokens: Ints
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the results of `rescore`, as columns for those of contexts."""
        scores = self.scores(logits, contexts)
        values, ids = best(scores)
        total = log_total(scores)
        own = (values.double() - total).clamp_(max=0.0)
        where = on_device(parents, logits.device), on_device(tokens, logits.device)
        return ids, values, own, _log_probabilities(scores, total, *where)

    def noise_at(self, row: int, position: int, ids: Ints) -> NDArray[np.float64]:
        """Return the shared noise of a row's output position at some ids, on the host."""
        return self._noise.at(row, position, ids)

    def _rows_of(self, contexts: Contexts) -> list[SamplingRow]:
        return [self._rows[row] for row in contexts.rows.tolist()]

    # Processing

    def _scores(self, logits: Tensor, contexts: Contexts, precision: torch.dtype) -> Tensor:
        """Return the scores; `precision` is float64, or float32 for rows that are not edited."""
        temperatures = self._temperatures[contexts.rows]
        plain = contexts.masks is None and bool(self._plain[contexts.rows].all())
        if plain and not temperatures.any():
            return logits
        if plain and temperatures.all() and not self._noise.is_sparse(logits, contexts.rows):
            noise = self._noise.of(logits, contexts, dtype=precision)  # becomes the scores
            if (temperatures == 1.0).all():
                return noise.add_(logits)
            return noise.add_(logits.to(precision) / column(temperatures, logits.device, precision))
        rows = self._rows_of(contexts)
        if contexts.masks is not None or any(row.edits for row in rows):
            precision = torch.float64
        scores = self._processed(logits, rows, contexts, precision)
        sampled = [index for index, row in enumerate(rows) if row.settings.temperature > 0]
        if sampled:
            self._noise.add_to(scores, contexts, sampled)
        return scores

    def _processed(
        self, logits: Tensor, rows: list[SamplingRow], contexts: Contexts, precision: torch.dtype
    ) -> Tensor:
        """Return scores without noise, in their own memory unless all rows are plain greedy."""
        scores = logits
        if contexts.masks is not None or any(row.edits for row in rows):
            scores = logits.to(torch.float64, copy=True)
            for row, error in edit(scores, rows, contexts).items():
                self._errors.setdefault(row, error)
        settings = [row.settings for row in rows]
        if any(one.temperature > 0 for one in settings):
            return warp(scores, settings, precision)
        return scores


Choice = tuple[Tensor, ...]  # each for n places
_Choose = Callable[[Tensor, Contexts], Choice]


def by_kind(
    logits: Tensor, contexts: Contexts, is_first: NDArray[np.bool_], first: _Choose, other: _Choose
) -> Choice:
    """Return what `first` gives for the places in `is_first` [n], and `other` for the others."""
    if is_first.all():
        return first(logits, contexts)
    if not is_first.any():
        return other(logits, contexts)
    found = []
    for kind, choose in ((is_first, first), (~is_first, other)):
        index = np.flatnonzero(kind)
        found.append((index, choose(rows_of(logits, index), contexts.take(index))))
    return merged(found)


def rows_of(logits: Tensor, index: Ints) -> Tensor:
    return logits.index_select(0, on_device(index, logits.device))


def merged(found: Sequence[tuple[Ints, Choice]]) -> Choice:
    """Merge parts by the `index` of their places; scores become float64."""
    order = np.argsort(np.concatenate([index for index, _ in found]))
    joined = []
    for alike in zip(*(choice for _, choice in found), strict=True):
        whole = torch.cat([one.double() if one.is_floating_point() else one for one in alike])
        joined.append(whole.index_select(0, on_device(order, whole.device)))
    return tuple(joined)


def _joined(found: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    if len(found) == 1:
        return found[0]
    return tuple(map(torch.cat, zip(*found, strict=True)))


def _log_probabilities(scores: Tensor, total: Tensor, places: Tensor, tokens: Tensor) -> Tensor:
    """Return log-probabilities, [m] float64; -inf for ids outside the vocabulary."""
    size = scores.shape[-1]
    known = (tokens >= 0) & (tokens < size)
    values = scores[places, tokens.clamp(0, size - 1)].double() - total.squeeze(1)[places]
    return values.clamp_(max=0.0).masked_fill_(~known, -math.inf)
