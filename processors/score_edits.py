"""Changes of scores by rows' settings before a token is chosen, in their order.

Contract: `edit` is everything before the temperature, `warp` the temperature and everything after
it. Places are independent of one another, but each step handles all places that need it at once.
`processors.sampler` documents the order, and `processors.logits` has the arithmetic of a step. Only
a row's own processors wait for the device. Noise and the choice are not here.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from processors.contexts import Contexts
from processors.grammar import exclude_others
from processors.logits import (
    add_entries,
    change_rows,
    column,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    on_device,
    penalize,
)
from processors.sampling_row import SamplingRow, SamplingSettings

Rows = Sequence[SamplingRow]  # [n] the row of each place

_NO_TOKEN = -1  # fills short texts


def edit(scores: Tensor, rows: Rows, contexts: Contexts) -> dict[int, Exception]:
    """Change scores [n, V] float64 in place, by the rows' settings and `contexts.masks`.

    Returns:
        The first error of each row whose own processors failed, by its number. All ids are excluded
        where one failed.
    """
    if any(contexts.depths[i] for i, row in enumerate(rows) if row.reads_text):
        assert contexts.paths is not None, "settings look at the text, but paths are unknown"
    biased = [index for index, row in enumerate(rows) if len(row.biased)]
    if biased:
        _add_biases(scores, rows, biased)
    penalized = [index for index, row in enumerate(rows) if row.penalized]
    if penalized:
        _penalize(scores, rows, penalized, contexts)
    excluded = [index for index, row in enumerate(rows) if row.excludes]
    if excluded:
        _exclude_ids(scores, rows, excluded, contexts)
    phrased = [index for index, row in enumerate(rows) if row.phrases]
    if phrased:
        _exclude_endings(scores, rows, phrased, contexts)
    errors = _run_processors(scores, rows, contexts)
    if contexts.masks is not None:
        restrained = [index for index, row in enumerate(rows) if row.settings.grammar]
        masks = _pick(contexts.masks, restrained)
        change_rows(scores, restrained, lambda part: exclude_others(part, masks))
    return errors


def warp(scores: Tensor, settings: Sequence[SamplingSettings], precision: torch.dtype) -> Tensor:
    """Return scores [n, V] in new memory, where those at temperature 0 change in precision only.

    `settings`, [n], are those of each place; `precision` is float64 or float32.
    """
    # A greedy row's divisor is 1.
    divisors = [s.temperature if s.temperature > 0 else 1.0 for s in settings]
    device, size = scores.device, scores.shape[-1]
    warped = scores.to(precision) / column(divisors, device, precision)
    sampled = [(index, s) for index, s in enumerate(settings) if s.temperature > 0]
    limits = [(index, s.top_k) for index, s in sampled if 0 < s.top_k < size]
    if limits:
        top_k = [k for _, k in limits]
        change_rows(warped, [index for index, _ in limits], lambda part: keep_top_k(part, top_k))
    shares = [(index, s.top_p) for index, s in sampled if s.top_p < 1.0]
    if shares:
        top_p = column([p for _, p in shares], device)
        change_rows(warped, [index for index, _ in shares], lambda part: keep_top_p(part, top_p))
    ratios = [(index, s.min_p) for index, s in sampled if s.min_p > 0.0]
    if ratios:
        min_p = column([p for _, p in ratios], device)
        change_rows(warped, [index for index, _ in ratios], lambda part: keep_min_p(part, min_p))
    return warped


def _add_biases(scores: Tensor, rows: Rows, which: list[int]) -> None:
    ids = np.concatenate([rows[index].biased for index in which])
    biases = np.concatenate([rows[index].biases for index in which])
    places = np.repeat(which, [len(rows[index].biased) for index in which])
    known = ids < scores.shape[-1]
    add_entries(scores, places[known], ids[known], on_device(biases[known], scores.device))


def _penalize(scores: Tensor, rows: Rows, which: list[int], contexts: Contexts) -> None:
    device, size = scores.device, scores.shape[-1]
    counted = [rows[index].counts(device) for index in which]
    in_prompt = torch.stack([one.in_prompt for one in counted])
    in_output = torch.stack([one.in_output for one in counted])
    depths = contexts.depths[which]
    if contexts.paths is not None and depths.any():
        paths = _pick(contexts.paths, which)
        steps = torch.arange(paths.shape[1], device=device)
        real = steps < on_device(depths, device).unsqueeze(1)
        in_output.scatter_add_(1, paths.where(real, 0), real.to(in_output.dtype))
    settings = [rows[index].settings for index in which]
    repetition = column([s.repetition_penalty for s in settings], device)
    presence = column([s.presence_penalty for s in settings], device)
    frequency = column([s.frequency_penalty for s in settings], device)

    def change(part: Tensor) -> None:
        penalize(part, in_prompt[:, :size], in_output[:, :size], repetition, presence, frequency)

    change_rows(scores, which, change)


def _exclude_ids(scores: Tensor, rows: Rows, which: list[int], contexts: Contexts) -> None:
    """Exclude bad words of one token, and ends that come too early."""
    excluded = [rows[index].excluded(int(contexts.positions[index])) for index in which]
    ids = np.concatenate(excluded)
    places = np.repeat(which, [len(one) for one in excluded])
    known = ids < scores.shape[-1]
    values = scores.new_full((int(known.sum()),), -math.inf)
    add_entries(scores, places[known], ids[known], values)


def _exclude_endings(scores: Tensor, rows: Rows, which: list[int], contexts: Contexts) -> None:
    """Exclude the last ids of bad words whose other ids the text ends with."""
    lengths = sorted({length for index in which for length in rows[index].phrases})
    reach = lengths[-1] - 1  # tokens of the committed text
    texts = _tails(rows, which, reach, contexts, scores.device)
    ends = reach + contexts.depths[which]
    for length in lengths:
        held = [line for line, index in enumerate(which) if length in rows[index].phrases]
        groups = [rows[which[line]].phrases[length] for line in held]
        phrases = np.concatenate(groups)
        lines = np.repeat(held, [len(group) for group in groups])
        known = phrases[:, -1] < scores.shape[-1]
        phrases, lines = phrases[known], lines[known]
        before = ends[lines][:, None] + np.arange(1 - length, 0)  # [p, length - 1] places in texts
        found = texts[on_device(lines[:, None], scores.device), on_device(before, scores.device)]
        matching = (found == on_device(phrases[:, :-1], scores.device)).all(dim=-1)
        values = scores.new_zeros(len(lines)).masked_fill_(matching, -math.inf)
        add_entries(scores, np.array(which)[lines], phrases[:, -1], values)


def _tails(
    rows: Rows, which: list[int], reach: int, contexts: Contexts, device: torch.device
) -> Tensor:
    """Return the last `reach` committed ids, then the path, [len(which), reach + L].

    Shorter texts have `_NO_TOKEN` in front.
    """
    committed = np.full((len(which), reach), _NO_TOKEN, dtype=np.int64)
    for line, index in enumerate(which):
        tail = rows[index].text[-reach:]
        committed[line, reach - len(tail) :] = tail
    tails = on_device(committed, device)
    if contexts.paths is None or not contexts.depths[which].any():
        return tails
    return torch.cat((tails, _pick(contexts.paths, which)), dim=1)


def _run_processors(scores: Tensor, rows: Rows, contexts: Contexts) -> dict[int, Exception]:
    """Run the caller's processors, place by place, and return errors as in `edit`."""
    errors: dict[int, Exception] = {}
    for index, row in enumerate(rows):
        if not row.settings.logits_processors:
            continue
        text = torch.tensor([row.text], dtype=torch.int64, device=scores.device)
        depth = int(contexts.depths[index])
        if contexts.paths is not None and depth:
            text = torch.cat((text, contexts.paths[index : index + 1, :depth]), dim=1)
        place = scores[index : index + 1]
        try:
            for processor in row.settings.logits_processors:
                place.copy_(_result(processor, text, place))
        except Exception as error:  # the caller's code: it may raise anything
            errors.setdefault(int(contexts.rows[index]), error)
            place.fill_(-math.inf)
    return errors


def _result(processor: Any, text: Tensor, scores: Tensor) -> Tensor:
    """Return a processor's result for `scores` [1, V], which it cannot change itself."""
    result = processor(text, scores.clone())
    if not isinstance(result, Tensor) or result.shape != scores.shape:
        shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        name = type(processor).__name__
        raise ValueError(f"{name} must return scores {tuple(scores.shape)}, not {shape}")
    if bool(result.isnan().any()) and not bool(scores.isnan().any()):
        raise ValueError(f"{type(processor).__name__} returned NaN")
    return result


def _pick(tensor: Tensor, which: list[int]) -> Tensor:
    if len(which) == len(tensor):
        return tensor
    return tensor.index_select(0, on_device(np.array(which, dtype=np.int64), tensor.device))
