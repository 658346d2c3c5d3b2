"""The total variation between models, at positions that both have computed anyway.

These are nodes of verified trees, and the ends of prompts, which the target reads before drafters
do. The profiler derives a prior of acceptance from it (SpecRouter, Equation 5).
"""

import itertools
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from processors import DraftResult, VerifyResult
from processors.token_tree import ROOT
from specrouter.cycle import Ints
from specrouter.execution.runtime import Runtime
from specrouter.profile.snapshot import Pair

_NODES = 4  # nodes of a verification whose distributions are compared
PROMPT_POSITIONS = 3  # last positions of a prompt that are compared
_EVERY = 4  # a pair is compared in every fourth cycle, because distributions cost time


@dataclass(frozen=True, eq=False)
class _PromptEnd:
    """The target's logits [n, V] after the last of a row's first `length` tokens."""

    logits: Tensor
    length: int


class ModelComparison:
    def __init__(self, runtime: Runtime) -> None:
        self._pool = runtime.pool
        self._manager = runtime.manager
        self._profiler = runtime.profiler
        self._cycles: Counter[Pair] = Counter()
        self._prompt_ends: dict[int, _PromptEnd] = {}

    def keep_prompt_ends(self, result: VerifyResult) -> None:
        """Keep the target's logits at the ends of prompts, to compare drafters with later."""
        for row in result.tree.rows.tolist():
            if row in result.earlier:
                logits = result.earlier[row][-PROMPT_POSITIONS:].clone()
                length = int(self._manager.counts[row]) - 1
                self._prompt_ends[row] = _PromptEnd(logits, length)

    def prompt_ends(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return [R] first and [R] end (exclusive) of the prompt positions with kept logits.

        Both are 0 for rows without any.
        """
        places = np.zeros((2, len(rows)), dtype=np.int64)
        for index, row in enumerate(rows.tolist()):
            end = self._prompt_ends.get(row)
            if end is not None:
                places[:, index] = end.length - len(end.logits), end.length
        return places[0], places[1]

    def compare_prompt_ends(
        self, drafter: str, rows: Ints, ends: Ints, counts: Ints, logits: Tensor
    ) -> None:
        """Compare a model's logits with the target's, at positions within `prompt_ends`.

        `logits` [sum(counts), V]: the model's, after each of the `counts[i]` tokens before token
        `ends[i]` of row i.
        """
        theirs = []
        for row, end, count in zip(rows.tolist(), ends.tolist(), counts.tolist(), strict=True):
            if count:
                known = self._prompt_ends[row]
                last = end - (known.length - len(known.logits))
                theirs.append(known.logits[last - count : last])
        variation = total_variation(logits, torch.cat(theirs).to(logits.device))
        self._profiler.record_similarity((drafter, self._pool.target), variation)

    def forget(self, row: int) -> None:
        self._prompt_ends.pop(row, None)

    def compare(
        self, draft: DraftResult, drafter: str, verifier: str, result: VerifyResult
    ) -> None:
        """Record the total variation between drafter and verifier, at nodes that both computed."""
        if not len(draft.logits):  # the drafter has no model
            return
        pair = (drafter, verifier)
        self._cycles[pair] += 1
        if self._cycles[pair] % _EVERY != 1:
            return
        index = np.searchsorted(result.tree.rows, draft.tree.rows)
        # Other rows each time; roots before deeper nodes.
        chosen = np.roll(np.arange(len(index)), -_NODES * (self._cycles[pair] // _EVERY))[:_NODES]
        walks = {
            own: result.walk(index[own]) for own in chosen.tolist() if result.sound[index[own]]
        }
        ours: list[Tensor] = []
        theirs: list[Tensor] = []
        for depth, own in itertools.product(range(_NODES), walks):
            row, walk = index[own], walks[own]
            if depth > len(walk) or len(ours) == _NODES:
                continue
            node = ROOT if depth == 0 else int(walk[depth - 1])
            place = draft.place(own, node)
            if place >= 0:  # the drafter has computed it
                ours.append(draft.logits[place])
                theirs.append(result.logits[int(result.places[row, node + 1])])
        if ours:
            q, p = torch.stack(ours), torch.stack(theirs)
            self._profiler.record_similarity(pair, total_variation(q.to(p.device), p))


def total_variation(p_logits: Tensor, q_logits: Tensor) -> float:
    """Return the mean over n of 1/2 sum |p - q|, for logits [n, V]; SpecRouter, Equation 5."""
    p = torch.softmax(p_logits.float(), dim=-1)
    q = torch.softmax(q_logits.float(), dim=-1)
    return float((p - q).abs().sum(dim=-1).mean()) / 2
