"""Request to a drafter, and the draft that one level of a chain passes to the next."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from processors.pack import NO_SLOT, FedTree
from processors.token_tree import ROOT, Ints, TokenTree


@dataclass(frozen=True, eq=False, kw_only=True)
class DraftRequest:
    """Request for trees of `depths[i]` levels in row i, with at most `width` nodes on each level.

    `branching` has the children of every node by depth, one entry for each level; `width` is their
    product. Without it a level keeps its best `width` nodes, of any parents.
    """

    rows: Ints  # [B] ascending
    output_positions: Ints  # [B] of the token after each row's root
    depths: Ints  # [B]
    width: int = 1
    branching: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class DraftResult:
    """A tree with the logits that its nodes were chosen from.

    Nodes of `tree` are found in `places` by their `origins`.
    """

    tree: TokenTree
    logits: Tensor  # [n, V]
    places: Ints  # [B, 1 + W'] where the logits after the root and after each node are, or -1
    fed: FedTree  # what the drafter's own state holds

    @classmethod
    def without_logits(cls, tree: TokenTree) -> "DraftResult":
        """Return the result of a drafter without a model."""
        fed = FedTree(tree, np.full(tree.tokens.shape, NO_SLOT))
        places = np.full((len(tree.rows), 1 + tree.tokens.shape[1]), -1)
        return cls(tree, torch.zeros((0, 0)), places, fed)

    def of_rows(self, rows: Ints) -> "DraftResult":
        """Return the drafts of those of `rows` that it has; `logits` stay whole."""
        which = np.isin(self.tree.rows, rows)
        if which.all():
            return self
        return replace(
            self, tree=self.tree.of_rows(self.tree.rows[which]), places=self.places[which]
        )

    def place(self, index: int, node: int) -> int:
        """Return where the logits after a node (or ROOT) of the index-th row are, or -1."""
        origin = ROOT if node == ROOT else int(self.tree.origins[index, node])
        return int(self.places[index, origin + 1])
