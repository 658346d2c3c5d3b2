"""What one level of a chain proposes to the next, and from what."""

from dataclasses import dataclass

from torch import Tensor

from processors.pack import FedTree
from processors.token_tree import ROOT, Ints, TokenTree


@dataclass(frozen=True, eq=False)
class Proposal:
    """Nodes of `tree` are found in `places` by their `origins`."""

    tree: TokenTree
    logits: Tensor  # [n, V]
    places: Ints  # [B, 1 + W'] where the logits after the root and after each node stand, or -1
    fed: FedTree  # what the proposer's own state holds

    def place(self, index: int, node: int) -> int:
        """Where the logits after a node (ROOT: the root) of the index-th row stand, or -1."""
        origin = ROOT if node == ROOT else int(self.tree.origins[index, node])
        return int(self.places[index, origin + 1])
