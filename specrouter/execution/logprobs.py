"""Log-probabilities of tokens by the target's logits, before any processing of these."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from processors.errors import RowFault
from processors.logits import on_device, parts
from specrouter.cycle import Ints
from specrouter.request.output import TokenLogprobs


@dataclass(frozen=True, eq=False)
class AskedLogprobs:
    """The n tokens of one request that it asks for, each with the `count` likeliest ids."""

    places: Ints  # [n] indices of the logits before each token
    tokens: Ints  # [n]
    count: int


def token_logprobs(logits: Tensor, asked: Sequence[AskedLogprobs]) -> list[list[TokenLogprobs]]:
    """Return log-probabilities by `logits` [m, V], for each request, with one wait for the device.

    Raises:
        RowFault: one of them is NaN.
    """
    groups: dict[int, list[int]] = {}
    for index, one in enumerate(asked):
        groups.setdefault(one.count, []).append(index)
    shares = []
    for count, members in groups.items():
        places = np.concatenate([asked[index].places for index in members])
        tokens = np.concatenate([asked[index].tokens for index in members])
        for part in parts(len(places), logits):
            own = logits.index_select(0, on_device(places[part], logits.device))
            shares.append(_shares(own, on_device(tokens[part], logits.device), count).flatten())
    values = torch.cat(shares).cpu().numpy()  # the one wait
    if np.isnan(values).any():
        raise RowFault("log-probabilities are not numbers")
    found: list[list[TokenLogprobs]] = [[] for _ in asked]
    start = 0
    for count, members in groups.items():
        width = 2 + 2 * min(count, logits.shape[1])
        for index in members:
            tokens = asked[index].tokens
            end = start + len(tokens) * width
            found[index] = _named(tokens, values[start:end].reshape(-1, width))
            start = end
    return found


def _shares(logits: Tensor, tokens: Tensor, count: int) -> Tensor:
    """Return [n, 2 + 2k] float64: two values per token, then its k likeliest ids, then theirs.

    The two are the log-probability and the logit; those of the ids are log-probabilities.
    """
    values = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
    chosen = [one.gather(1, tokens.unsqueeze(1)).double() for one in (values, logits)]
    best, ids = values.topk(min(count, values.shape[1]), dim=1)
    return torch.cat((*chosen, ids.double(), best.double()), dim=1)


def _named(tokens: Ints, shares: NDArray[np.float64]) -> list[TokenLogprobs]:
    ids, best = np.split(shares[:, 2:], 2, axis=1)
    return [
        TokenLogprobs(token, logprob, tuple(zip(names, others, strict=True)), logit)
        for token, logprob, logit, names, others in zip(
            tokens.tolist(),
            shares[:, 0].tolist(),
            shares[:, 1].tolist(),
            ids.astype(np.int64).tolist(),
            best.tolist(),
            strict=True,
        )
    ]


@dataclass
class _Reading:
    prompt: Ints
    count: int
    found: list[TokenLogprobs | None] = field(default_factory=lambda: [None])


class PromptLogprobs:
    """Log-probabilities of prompts, collected as the target reads them, for requests that ask."""

    def __init__(self) -> None:
        self._rows: dict[int, _Reading] = {}

    def open(self, row: int, prompt: Sequence[int], count: int | None) -> None:
        self._rows.pop(row, None)
        if count is not None:
            self._rows[row] = _Reading(np.array(prompt, dtype=np.int64), count)

    def close(self, row: int) -> None:
        self._rows.pop(row, None)

    def asked(self, rows: Ints) -> NDArray[np.bool_]:
        """Return [R]: True for rows whose prompt log-probabilities are not complete."""
        if not self._rows:
            return np.zeros(len(rows), dtype=np.bool_)
        return np.isin(rows, list(self._rows))

    def note(self, row: int, logits: Tensor) -> None:
        """Add the logits [n, V] after the next n tokens of a text that the target has read.

        Tokens after the prompt, which an earlier attempt generated, are left out.
        """
        if row not in self._rows:
            return
        reading = self._rows[row]
        start = len(reading.found)
        tokens = reading.prompt[start : start + len(logits)]
        asked = AskedLogprobs(np.arange(len(tokens)), tokens, reading.count)
        reading.found += token_logprobs(logits, [asked])[0]

    def take(self, row: int) -> list[TokenLogprobs | None] | None:
        """Return those of a whole prompt, once; None if its request does not ask for them."""
        reading = self._rows.pop(row, None)
        if reading is None:
            return None
        assert len(reading.found) == len(reading.prompt), "the target has not read the prompt"
        return reading.found
