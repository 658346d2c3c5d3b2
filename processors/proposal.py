"""What one level of a chain proposes to the next, and from what."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from processors.pack import NO_SLOT, FedTree
from processors.token_tree import ROOT, Bools, Ints, TokenTree


@dataclass(frozen=True, eq=False)
class Proposal:
    """Nodes of `tree` are found in `places` by their `origins`."""

    tree: TokenTree
    logits: Tensor  # [n, V]
    places: Ints  # [B, 1 + W'] where the logits after the root and after each node stand, or -1
    fed: FedTree  # what the proposer's own state holds
    is_masked: bool = False  # its tokens were chosen under grammars, as verifiers choose

    @classmethod
    def without_logits(cls, tree: TokenTree) -> "Proposal":
        """Of a drafter that has no model."""
        fed = FedTree(tree, np.full(tree.tokens.shape, NO_SLOT))
        places = np.full((len(tree.rows), 1 + tree.tokens.shape[1]), -1)
        return cls(tree, torch.zeros((0, 0)), places, fed)

    def part(self, which: Bools) -> "Proposal":
        """Of some of the rows. `which`: [B]."""
        places, fed = self.places[which], self.fed.part(which)
        return Proposal(self.tree.part(which), self.logits, places, fed, self.is_masked)

    def place(self, index: int, node: int) -> int:
        """Where the logits after a node (ROOT: the root) of the index-th row stand, or -1."""
        origin = ROOT if node == ROOT else int(self.tree.origins[index, node])
        return int(self.places[index, origin + 1])
