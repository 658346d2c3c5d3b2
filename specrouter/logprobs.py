"""Log-probabilities of tokens, as the target has them, before any processing."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specrouter.output import TokenLogprobs

Ints = NDArray[np.int64]


def token_logprobs(logits: Tensor, tokens: Ints, count: int) -> list[TokenLogprobs]:
    """Log-probabilities of `tokens` [n] and of the `count` likeliest ids by `logits` [n, V]."""
    values = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
    chosen = values.gather(1, torch.from_numpy(tokens).to(values.device).unsqueeze(1))[:, 0]
    best, ids = values.topk(min(count, values.shape[1]), dim=1)
    return [
        TokenLogprobs(token, logprob, tuple(zip(names, others, strict=True)))
        for token, logprob, names, others in zip(
            tokens.tolist(), chosen.tolist(), ids.tolist(), best.tolist(), strict=True
        )
    ]


@dataclass
class _Reading:
    prompt: Ints
    count: int
    found: list[TokenLogprobs | None] = field(default_factory=lambda: [None])


class PromptLogprobs:
    """Of the requests that ask for those of their prompts, as the target reads them."""

    def __init__(self) -> None:
        self._rows: dict[int, _Reading] = {}

    def open(self, row: int, prompt: Sequence[int], count: int | None) -> None:
        if count is not None:
            self._rows[row] = _Reading(np.array(prompt, dtype=np.int64), count)

    def close(self, row: int) -> None:
        self._rows.pop(row, None)

    def asked(self, rows: Ints) -> NDArray[np.bool_]:
        """[R] rows whose prompts are not done."""
        if not self._rows:
            return np.zeros(len(rows), dtype=np.bool_)
        return np.isin(rows, list(self._rows))

    def note(self, row: int, logits: Tensor) -> None:
        """`logits` [n, V] after the next n tokens that the target has read of the text.

        Tokens behind the prompt, which an earlier attempt generated, are left out.
        """
        if row not in self._rows:
            return
        reading = self._rows[row]
        start = len(reading.found)
        tokens = reading.prompt[start : start + len(logits)]
        reading.found += token_logprobs(logits[: len(tokens)], tokens, reading.count)

    def take(self, row: int) -> list[TokenLogprobs | None] | None:
        """Of the whole prompt, once; None where nobody asks for them."""
        reading = self._rows.pop(row, None)
        if reading is None:
            return None
        assert len(reading.found) == len(reading.prompt), "the target has not read the prompt"
        return reading.found
