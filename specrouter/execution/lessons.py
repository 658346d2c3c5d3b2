"""Lessons: what a cycle's verdicts teach the profiler about who accepts what.

Acceptances of drafted trees, and the total variation between models at places that both have
computed anyway: nodes of verified trees, and the ends of prompts.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelpool import ModelPool
from processors import Proposal, TokenTree, Verdict
from processors.ngram import context_distribution
from processors.token_tree import ROOT
from specrouter.execution.group_draft import GroupDraft
from specrouter.profile.acceptance import SHAPE_DEPTHS, JudgedTrees, shape_index
from specrouter.profile.profiler import PerformanceProfiler
from specrouter.profile.snapshot import Pair
from specrouter.request.params import Chain
from statemgr import NgramTable, StateManager

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_NODES = 4  # of a verified tree, whose distributions are compared
PROMPT_POSITIONS = 3  # of the end of a prompt, for the same
_EVERY = 4  # a pair is compared in one of so many cycles: distributions cost time


@dataclass(frozen=True, eq=False)
class _Lesson:
    """Trees of one group, [B, W], and what a verifier said of the nodes that it saw."""

    proposers: Chain
    verifier: str
    tree: TokenTree
    judged: Bools
    accepted: Bools
    counts: Bools  # [B] rows whose verdict is sound


@dataclass(frozen=True, eq=False)
class _PromptEnd:
    """The target's logits [n, V] after the last of a row's first `length` tokens."""

    logits: Tensor
    length: int


class Teacher:
    def __init__(
        self,
        pool: ModelPool,
        manager: StateManager,
        ngrams: NgramTable,
        profiler: PerformanceProfiler,
    ) -> None:
        self._pool = pool
        self._manager = manager
        self._ngrams = ngrams
        self._profiler = profiler
        self._compared: Counter[Pair] = Counter()
        self._prompt_ends: dict[int, _PromptEnd] = {}

    def learn_from_target(self, draft: GroupDraft, verdict: Verdict) -> None:
        """What the target said of a group's trees, in a verdict of all groups."""
        proposal, tree = draft.proposal, draft.candidates
        if proposal is None or tree is None or draft.selected is None:
            return
        target, used = self._pool.target, tuple(draft.used)
        if draft.group.branching is None:  # a fixed form says nothing of beams
            index = np.searchsorted(verdict.tree.rows, proposal.tree.rows)
            on_walk = verdict.accepted[index][:, : proposal.tree.tokens.shape[1]]
            accepted = np.zeros(tree.tokens.shape, dtype=np.bool_)
            accepted[draft.selected] = on_walk[proposal.tree.real]
            sound = verdict.sound[index]
            self._teach(draft, _Lesson(used, target, tree, draft.selected, accepted, sound))
        self._compare(proposal, used[-1], target, verdict)

    def learn_from_judge(
        self, draft: GroupDraft, proposal: Proposal, judge: str, verdict: Verdict
    ) -> None:
        """What an intermediate said of the trees that it was offered."""
        tree, used = proposal.tree, draft.used
        proposers = tuple(used[: used.index(judge)] if judge in used else used)
        if draft.group.branching is None:
            accepted = verdict.accepted[:, : tree.tokens.shape[1]]
            self._teach(draft, _Lesson(proposers, judge, tree, tree.real, accepted, verdict.sound))
        self._compare(proposal, proposers[-1], judge, verdict)

    def worth(self, draft: GroupDraft) -> Floats:
        """[B, W] how likely each node is to be on the target's walk, by what was seen so far."""
        assert draft.proposal is not None
        tree = draft.proposal.tree
        worth = np.zeros(tree.tokens.shape)
        log_probs = np.where(tree.real, tree.log_probs, -np.inf)
        for mode in (True, False):
            which = draft.sampled == mode
            if which.any():
                key = (tuple(draft.used), self._pool.target, mode)
                worth[which] = self._profiler.worth(
                    key, tree.parents[which], tree.depths[which], log_probs[which]
                )
        return np.where(np.isfinite(tree.log_probs) & tree.real, worth, 0.0)

    def keep_prompt_ends(self, verdict: Verdict) -> None:
        """The target has read prompts to their ends: what drafters are compared with later."""
        for row in verdict.tree.rows.tolist():
            if row in verdict.earlier:
                logits = verdict.earlier[row][-PROMPT_POSITIONS:].clone()
                length = int(self._manager.counts[row]) - 1
                self._prompt_ends[row] = _PromptEnd(logits, length)

    def prompt_ends(self, rows: Ints) -> tuple[Ints, Ints]:
        """[R] each: the first and, one less, the last of a prompt's tokens after which the target's
        logits are kept; 0 and 0 where there are none."""
        places = np.zeros((2, len(rows)), dtype=np.int64)
        for index, row in enumerate(rows.tolist()):
            end = self._prompt_ends.get(row)
            if end is not None:
                places[:, index] = end.length - len(end.logits), end.length
        return places[0], places[1]

    def compare_prompt_ends(
        self, proposer: str, rows: Ints, ends: Ints, counts: Ints, logits: Tensor
    ) -> None:
        """`logits` [sum(counts), V]: a model's own, after each of the `counts[i]` tokens before
        token `ends[i]`, all of them within `prompt_ends`."""
        theirs = []
        for row, end, count in zip(rows.tolist(), ends.tolist(), counts.tolist(), strict=True):
            if count:
                known = self._prompt_ends[row]
                last = end - (known.length - len(known.logits))
                theirs.append(known.logits[last - count : last])
        variation = total_variation(logits, torch.cat(theirs).to(logits.device))
        self._profiler.record_similarity((proposer, self._pool.target), variation)

    def forget(self, row: int) -> None:
        self._prompt_ends.pop(row, None)

    def _teach(self, draft: GroupDraft, lesson: _Lesson) -> None:
        """Acceptances, sampled and greedy rows apart."""
        proposers, tree, width = lesson.proposers, lesson.tree, draft.group.width
        is_plain = len(proposers) == 1 and not self._pool.is_weightless(proposers[0])
        exact, heights = None, draft.heights
        if not is_plain:  # the tree is all that its shape may hold, where the text does not end
            exact = shape_index(draft.group.depth, width)
            heights = np.where(heights >= draft.group.depth, int(SHAPE_DEPTHS[exact]), heights)
        for mode in (True, False):
            which = lesson.counts & (draft.sampled == mode)
            if not which.any():
                continue
            trees = JudgedTrees(
                tree.parents[which],
                tree.depths[which],
                np.where(tree.real, tree.log_probs, -np.inf)[which],
                lesson.judged[which],
                lesson.accepted[which],
                heights[which],
                width,
            )
            key = (proposers, lesson.verifier, mode)
            self._profiler.record_trees(key, trees, exact)

    def _compare(self, proposal: Proposal, proposer: str, verifier: str, verdict: Verdict) -> None:
        """The total variation between proposer and verifier, at nodes that both computed."""
        pair = (proposer, verifier)
        self._compared[pair] += 1
        if self._compared[pair] % _EVERY != 1:
            return
        index = np.searchsorted(verdict.tree.rows, proposal.tree.rows)
        # Now these rows, now those; roots before what comes after them.
        turn = np.roll(np.arange(len(index)), -_NODES * (self._compared[pair] // _EVERY))[:_NODES]
        walks = {
            own: verdict.walk(index[own]) for own in turn.tolist() if verdict.sound[index[own]]
        }
        ours: list[Tensor] = []
        theirs: list[Tensor] = []
        for depth, own in itertools.product(range(_NODES), walks):
            row, walk = index[own], walks[own]
            if depth > len(walk) or len(ours) == _NODES:
                continue
            node = ROOT if depth == 0 else int(walk[depth - 1])
            path = verdict.tree.tokens[row, walk[:depth]].tolist()
            logits = self._proposed(proposal, proposer, own, node, path)
            if logits is not None:
                ours.append(logits)
                theirs.append(verdict.logits[int(verdict.places[row, node + 1])])
        if ours:
            q, p = torch.stack(ours), torch.stack(theirs)
            self._profiler.record_similarity(pair, total_variation(q.to(p.device), p))

    def _proposed(
        self, proposal: Proposal, proposer: str, index: int, node: int, path: Sequence[int]
    ) -> Tensor | None:
        """[V] from which a node's children were proposed, if its proposer knows."""
        if not self._pool.is_weightless(proposer):
            place = proposal.place(index, node)
            return None if place < 0 else proposal.logits[place]
        row = int(proposal.tree.rows[index])
        shares = context_distribution(self._ngrams, self._manager, row, path)
        return torch.from_numpy(np.log(shares))


def total_variation(p_logits: Tensor, q_logits: Tensor) -> float:
    """Mean of 1/2 sum |p - q| over rows. [n, V] each. SpecRouter, Equation 5."""
    p = torch.softmax(p_logits.float(), dim=-1)
    q = torch.softmax(q_logits.float(), dim=-1)
    return float((p - q).abs().sum(dim=-1).mean()) / 2
