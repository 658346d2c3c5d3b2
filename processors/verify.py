"""VerifyProcessor: a model reads token trees, and accepts what it would choose itself.

There is one forward over all trees, with the target's prefill chunks in the same pack. The target's
walk is committed; an intermediate's result is the next level's draft (`VerifyResult.draft`). A
row's grammar masks every verifier, at every place of its tree (`processors.grammar`).
"""

import logging
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from processors.errors import RowFault
from processors.pack import ActiveModel, PackPlan, PackResult, run_pack, tree_contexts
from processors.sampler import Sampler
from processors.shared_noise import accept
from processors.token_tree import Ints, TokenTree
from processors.verify_result import VerifierForward, VerifyResult, joined

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class PrefillChunks:
    """Chunks of P rows without trees, which end before the rows' last committed tokens."""

    rows: Ints  # [P]
    counts: Ints  # [P] tokens of each chunk
    earlier: Ints | None = None  # [P] last tokens of each whose logits are wanted


@dataclass(frozen=True, eq=False, kw_only=True)
class VerifyRequest:
    """Trees of B rows to verify; for `rescore` see `accept`."""

    tree: TokenTree
    output_positions: Ints  # [B] of the token after each root
    rescore: bool = False
    earlier: Ints | None = None  # [B] tokens before each root whose logits are wanted, if fed
    chunks: PrefillChunks | None = None


class VerifyProcessor:
    """Stateless verifier."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def verify(self, active: ActiveModel, request: VerifyRequest) -> VerifyResult:
        """Run one forward over the trees' rows and prefill chunks, and decide on the trees.

        If the forward raises, its slots are scrubbed and the state is as it was before. If choosing
        tokens fails, each row is tried by itself: rows that fail emit no tokens
        (`Sampler.take_errors` has the reasons), and all others emit the same as without the
        failure.
        """
        plan, tree = _plan(active, request), request.tree
        pack = run_pack(active, plan, tree)
        earlier = _by_row(plan, pack.earlier)
        try:
            return self._accept(request, tree, pack, earlier)
        except Exception:
            logger.exception("tokens could not be chosen together; each row is tried by itself")
        found = [
            self._accept_alone(request, index, pack, earlier) for index in range(len(tree.rows))
        ]
        return joined(tree, _places(tree), pack, earlier, found)

    def _accept(
        self, request: VerifyRequest, tree: TokenTree, pack: PackResult, earlier: dict[int, Tensor]
    ) -> VerifyResult:
        """Decide for all rows, or for one."""
        at = np.searchsorted(request.tree.rows, tree.rows)
        positions, device = request.output_positions[at], pack.logits.device
        is_target = not request.rescore
        contexts = tree_contexts(self._sampler, tree, positions, device, is_target)
        forward = VerifierForward(tree, _places(tree), contexts, pack, earlier)
        return accept(self._sampler, forward, request.rescore)

    def _accept_alone(
        self, request: VerifyRequest, index: int, pack: PackResult, earlier: dict[int, Tensor]
    ) -> VerifyResult | None:
        """Decide for one row; return None if that fails."""
        whole = request.tree
        start = int((whole.sizes[:index] + 1).sum())
        logits = pack.logits[start : start + int(whole.sizes[index]) + 1]
        tree = whole.of_rows(whole.rows[index : index + 1])
        try:
            return self._accept(request, tree, replace(pack, logits=logits), earlier)
        except Exception as error:
            reason = f"no token could be chosen: {type(error).__name__}: {error}"
            self._sampler.refuse(int(whole.rows[index]), RowFault(reason))
            return None


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
    """Return the places of roots and nodes in row-after-row order, [B, W + 1], or -1."""
    counts = tree.sizes + 1
    starts = np.cumsum(counts) - counts
    place = np.arange(tree.tokens.shape[1] + 1)
    return np.where(place < counts[:, None], starts[:, None] + place, -1)
