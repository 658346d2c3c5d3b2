"""VerifyProcessor: a model checks drafted tokens, and says what it would choose itself. Stateless.

One rule at every level: walk down from the root, follow the child that equals the verifier's
choice, stop where there is none, and take that choice. The target's walk is committed. An
intermediate's walk, its own choice included, is what the next level verifies (`extend`); under hard
rejection only the accepted prefix goes on (SpecRouter, section 4.3).
The target's prefill chunks travel in the same pack.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelpool.packed_model import PackedModel
from processors.pack import PackPlan, lag, run_pack
from processors.sampler import Sampler
from processors.token_tree import TokenTree
from statemgr import ModelState, StateManager

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class VerifyResult:
    """Of the B rows of the verified tree, on the host but for the logits."""

    rows: Ints  # [B]
    drafts: Ints  # [B, W] the nodes
    sizes: Ints  # [B] nodes offered
    accepted: Ints  # [B] nodes on the accepted path
    choices: Ints  # [B, W + 1] the verifier's choice after the root and after each node
    logits: Tensor  # [sum(sizes + 1), V]
    pack_tokens: int

    def path(self, index: int) -> Ints:
        """Accepted nodes of a row, then the verifier's own choice, [accepted + 1]."""
        return self.choices[index, : self.accepted[index] + 1]

    def next_tree(self, hard_rejection: bool) -> TokenTree:
        """What the next level is to verify."""
        sizes = self.accepted if hard_rejection else self.accepted + 1
        return TokenTree(self.rows, torch.from_numpy(self.choices), sizes)


class VerifyProcessor:
    def verify(
        self,
        model: PackedModel,
        state: ModelState,
        manager: StateManager,
        sampler: Sampler,
        tree: TokenTree,
        output_positions: Ints,
        prefill: tuple[Ints, Ints] | None = None,
    ) -> VerifyResult:
        """One forward over the trees' rows and prefill chunks.

        Args:
            output_positions: [B], of the token after each root.
            prefill: rows and token counts of chunks that end before their last token.

        Waits for the device once: choices and nodes come back together.
        """
        plan = self._plan(state, manager, tree, prefill)
        result = run_pack(model, state, manager, plan, tree)
        offsets = np.concatenate(([0], np.cumsum(tree.sizes + 1)))
        which = np.repeat(np.arange(len(tree.rows)), tree.sizes + 1)
        depth = np.arange(offsets[-1]) - offsets[which]
        chosen = sampler.choose(result.logits, tree.rows[which], output_positions[which] + depth)
        nodes = tree.flat(chosen.device)
        both = torch.cat((chosen, nodes)).cpu().numpy()  # the one wait
        state.set_tokens(result.flat_slots[result.draft_places], both[offsets[-1] :])
        width = int(tree.sizes.max(initial=0))
        choices = np.zeros((len(tree.rows), width + 1), dtype=np.int64)
        choices[which, depth] = both[: offsets[-1]]
        drafts = np.full((len(tree.rows), width), -1, dtype=np.int64)
        drafts[np.arange(width) < tree.sizes[:, None]] = both[offsets[-1] :]
        return VerifyResult(
            tree.rows,
            drafts,
            tree.sizes,
            accepted_lengths(drafts, choices, tree.sizes),
            choices,
            result.logits,
            len(result.flat_slots),
        )

    def _plan(
        self,
        state: ModelState,
        manager: StateManager,
        tree: TokenTree,
        prefill: tuple[Ints, Ints] | None,
    ) -> PackPlan:
        rows, feed = tree.rows, lag(state, manager, tree.rows) + 1
        nodes, wanted = tree.sizes, np.ones(len(rows), dtype=np.bool_)
        if prefill is not None and len(prefill[0]):
            rows = np.concatenate((rows, prefill[0]))
            feed = np.concatenate((feed, prefill[1]))
            nodes = np.concatenate((nodes, np.zeros_like(prefill[0])))
            wanted = np.concatenate((wanted, np.zeros(len(prefill[0]), dtype=np.bool_)))
        order = np.argsort(rows)
        return PackPlan(rows[order], feed[order], nodes[order], wanted[order])


def accepted_lengths(drafts: Ints, choices: Ints, sizes: Ints) -> Ints:
    """Length of the common prefix of each row's nodes and the verifier's choices, [B]."""
    width = drafts.shape[1]
    equal = (drafts == choices[:, :width]) & (np.arange(width) < sizes[:, None])
    lengths: Ints = np.cumprod(equal, axis=1).sum(axis=1)
    return lengths
