"""Drafted tokens of several requests: token trees of width 1.

Node 0's parent is the root, the request's last committed token; node i's is node i - 1. Tokens stay
on the device that drafted them; how many there are is known on the host, so a verifier's pack can
be laid out without waiting for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TokenTree:
    rows: Ints  # [B] ascending
    tokens: Tensor  # [B, W] int64; of row i the first sizes[i] are nodes
    sizes: Ints  # [B]

    @classmethod
    def empty(cls, rows: Ints) -> "TokenTree":
        """Roots only: what a target verifies when nobody drafted."""
        return cls(rows, torch.zeros((len(rows), 0), dtype=torch.int64), np.zeros_like(rows))

    def capped(self, limits: Ints) -> "TokenTree":
        """At most `limits[i]` nodes of row i."""
        return TokenTree(self.rows, self.tokens, np.minimum(self.sizes, limits))

    def flat(self, device: torch.device) -> Tensor:
        """[sum(sizes)] nodes, row after row, on `device`."""
        if not self.sizes.any():
            return torch.zeros(0, dtype=torch.int64, device=device)
        width = self.tokens.shape[1]
        real = np.flatnonzero(np.arange(width) < self.sizes[:, None])
        index = torch.from_numpy(real).to(self.tokens.device, non_blocking=True)
        return self.tokens.reshape(-1).index_select(0, index).to(device)


def join(trees: Sequence[TokenTree]) -> TokenTree:
    """Trees of different rows as one, rows ascending."""
    trees = [tree for tree in trees if len(tree.rows)] or trees[:1]
    if len(trees) == 1:
        return trees[0]
    rows = np.concatenate([tree.rows for tree in trees])
    order = np.argsort(rows)
    width = max(tree.tokens.shape[1] for tree in trees)
    # Trees may come from different devices: they meet on the first one that drafted.
    device = next((t.tokens.device for t in trees if t.sizes.any()), trees[0].tokens.device)
    tokens = torch.zeros((len(rows), width), dtype=torch.int64, device=device)
    start = 0
    for tree in trees:
        tokens[start : start + len(tree.rows), : tree.tokens.shape[1]] = tree.tokens.to(device)
        start += len(tree.rows)
    index = torch.from_numpy(order).to(device)
    sizes = np.concatenate([tree.sizes for tree in trees])
    return TokenTree(rows[order], tokens.index_select(0, index), sizes[order])
