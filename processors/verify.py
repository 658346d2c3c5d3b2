"""VerifyProcessor: a model reads token trees, and a rule says what it accepts of them.

One forward over all trees, with the target's prefill chunks in the same pack. The target's walk is
committed; an intermediate's result is the next level's draft (`AcceptanceRule.next_draft`).
A row's grammar masks every verifier, at every place of its tree (`processors.grammar`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from processors.acceptance_rule import AcceptanceRule
from processors.active_model import ActiveModel
from processors.drafts import DraftResult
from processors.pack import PackPlan, run_pack, tree_contexts
from processors.sampler import Sampler
from processors.token_tree import Ints, TokenTree
from processors.verify_result import VerifierForward, VerifyResult


@dataclass(frozen=True, eq=False)
class PrefillChunks:
    """Of P rows without trees: chunks that end before the rows' last committed tokens."""

    rows: Ints  # [P]
    counts: Ints  # [P] tokens of each chunk
    earlier: Ints | None = None  # [P] of the last tokens of each, whose logits are wanted


@dataclass(frozen=True, eq=False)
class VerifyRequest:
    """Trees to verify, of B rows; see `AcceptanceRule.accept` for what has no comment."""

    tree: TokenTree
    output_positions: Ints  # [B] of the token after each root
    drafts: Sequence[DraftResult] = ()
    level: int = 1
    rescore: bool = False
    earlier: Ints | None = None  # [B] tokens before each root whose logits are wanted, if fed
    chunks: PrefillChunks | None = None


class VerifyProcessor:
    """Stateless."""

    def __init__(self, sampler: Sampler, rule: AcceptanceRule) -> None:
        self._sampler = sampler
        self._rule = rule

    def verify(self, active: ActiveModel, request: VerifyRequest) -> VerifyResult:
        """One forward over the trees' rows and prefill chunks.

        If the forward raises, its slots are scrubbed and the state is as it was before.
        """
        plan, tree = _plan(active, request), request.tree
        pack = run_pack(active, plan, tree)
        contexts = tree_contexts(self._sampler, tree, request.output_positions, pack.logits.device)
        forward = VerifierForward(tree, _places(tree), contexts, pack, _by_row(plan, pack.earlier))
        drafts, level = request.drafts, request.level
        return self._rule.accept(self._sampler, forward, drafts, level, request.rescore)


def _plan(active: ActiveModel, request: VerifyRequest) -> PackPlan:
    rows = request.tree.rows
    feed, chunks = active.lag(rows) + 1, request.chunks
    wanted = np.ones(len(rows), dtype=np.bool_)
    earlier = request.earlier
    before = np.zeros_like(feed) if earlier is None else np.minimum(earlier, feed - 1)
    if chunks is not None and len(chunks.rows):
        of_chunks = np.zeros_like(chunks.rows) if chunks.earlier is None else chunks.earlier
        before = np.concatenate((before, np.minimum(of_chunks, chunks.counts)))
        rows = np.concatenate((rows, chunks.rows))
        feed = np.concatenate((feed, chunks.counts))
        wanted = np.concatenate((wanted, np.zeros(len(chunks.rows), dtype=np.bool_)))
    order = np.argsort(rows)
    return PackPlan(
        rows[order], feed[order], wanted[order], before[order] if before.any() else None
    )


def _by_row(plan: PackPlan, earlier: Tensor) -> dict[int, Tensor]:
    if plan.earlier is None:
        return {}
    asked = plan.earlier > 0
    counts = plan.earlier[asked].tolist()
    return dict(zip(plan.rows[asked].tolist(), torch.split(earlier, counts), strict=True))


def _places(tree: TokenTree) -> Ints:
    """[B, W + 1] where, in row-after-row order, root and nodes stand; -1 for none."""
    counts = tree.sizes + 1
    starts = np.cumsum(counts) - counts
    place = np.arange(tree.tokens.shape[1] + 1)
    return np.where(place < counts[:, None], starts[:, None] + place, -1)
