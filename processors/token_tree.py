"""Token trees of several requests, which one level of a chain passes to the next.

A row's root is its request's last committed token, and not a node. Nodes are in arrays padded to
the widest row, parents before children, so that everything here is a few array operations for all
requests at once. Siblings have different tokens. Trees are on the host: a drafting loop keeps its
tokens on the device and copies them once, at its end.
Sources: SpecInfer's token trees; AdaServe, section 4.1 (candidate trees from beam search).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

ROOT = -1  # the parent of a node of depth 1
# Values of a tree's arrays where there is no node.
_PADDING = {"tokens": 0, "parents": ROOT, "depths": 0, "log_probs": -np.inf, "origins": 0}


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenTree:
    """Trees of B rows, at most W nodes each; the first `sizes[i]` entries of row i are nodes."""

    rows: Ints  # [B] ascending
    tokens: Ints  # [B, W]
    parents: Ints  # [B, W] index of the parent, or ROOT
    depths: Ints  # [B, W] 1 for children of the root; 0 where there is no node
    log_probs: Floats  # [B, W] of the path from the root, by the model that read it last
    origins: Ints  # [B, W] the node's index in the tree as its drafter made it
    sizes: Ints  # [B]

    @classmethod
    def empty(cls, rows: Ints) -> "TokenTree":
        """Return trees of roots only, which a target verifies without drafts."""
        none = np.zeros((len(rows), 0), dtype=np.int64)
        return cls(
            rows=rows,
            tokens=none,
            parents=none,
            depths=none,
            log_probs=none.astype(np.float64),
            origins=none,
            sizes=np.zeros_like(rows),
        )

    @classmethod
    def path(
        cls, rows: Ints, tokens: Ints, sizes: Ints, log_probs: Floats | None = None
    ) -> "TokenTree":
        """Return trees of width 1 from tokens [B, W]; without `log_probs` [B, W] all are 0."""
        index = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
        real = index < sizes[:, None]
        return cls(
            rows=rows,
            tokens=np.where(real, tokens, 0),
            parents=np.where(real, index - 1, ROOT),
            depths=np.where(real, index + 1, 0),
            log_probs=np.where(real, 0.0 if log_probs is None else log_probs, -np.inf),
            origins=index,
            sizes=sizes,
        )

    @property
    def real(self) -> Bools:
        """Mask of the nodes, [B, W]."""
        real: Bools = np.arange(self.tokens.shape[1]) < self.sizes[:, None]
        return real

    def of_rows(self, rows: Ints) -> "TokenTree":
        """Return the trees of some of the rows, in arrays of the same width."""
        if len(rows) == len(self.rows):
            return self
        which = np.isin(self.rows, rows)
        return TokenTree(**{one.name: getattr(self, one.name)[which] for one in fields(self)})

    @property
    def height(self) -> int:
        """Depth of the deepest node, 0 without nodes."""
        return int(self.depths.max(initial=0))

    @property
    def is_path(self) -> bool:
        """True if no node has a sibling or a cousin, so that positions determine descent."""
        index = np.arange(self.tokens.shape[1])
        return bool(((self.parents == index - 1) | ~self.real).all())

    @cached_property
    def lineage(self) -> Ints:
        """Ancestors of each node, [B, W, height]: the node, its parent and so on, then ROOT."""
        steps = [np.where(self.real, np.arange(self.tokens.shape[1]), ROOT)]
        for _ in range(self.height - 1):
            steps.append(_follow(self.parents, steps[-1], ROOT))
        return np.stack(steps, axis=2) if self.height else np.zeros((*self.tokens.shape, 0), int)

    def routes(self) -> Ints:
        """Return the nodes from the root's child down to each node, [B, W, height].

        The node itself is repeated at the end.
        """
        step = self.depths[:, :, None] - 1 - np.arange(self.height)  # how far up the k-th node is
        nodes: Ints = np.take_along_axis(self.lineage, np.maximum(step, 0), axis=2)
        return nodes

    def paths(self) -> Ints:
        """Return the tokens from the root's child down to each node, then 0, [B, W, height]."""
        tokens = self.tokens[np.arange(len(self.rows))[:, None, None], self.routes()]
        return np.where(np.arange(self.height) < self.depths[:, :, None], tokens, 0)

    def select(self, limits: Ints, heights: Ints) -> "TokenTree":
        """Return the `limits[i]` most probable nodes of row i, at most `heights[i]` deep.

        A path is never more probable than its beginning and ties go to the shallower node, so the
        result is a tree. Impossible nodes (log-probability -inf) are left out.
        """
        wanted = self.real & np.isfinite(self.log_probs) & (self.depths <= heights[:, None])
        score = np.where(wanted, self.log_probs, -np.inf)
        rank = np.empty_like(self.tokens)
        order = np.argsort(-score, axis=1, kind="stable")
        np.put_along_axis(rank, order, np.arange(self.tokens.shape[1])[None], axis=1)
        return self.keep(wanted & (rank < limits[:, None]))

    def keep(self, kept: Bools) -> "TokenTree":
        """Return the tree of the nodes in `kept` [B, W], which must hold all their parents."""
        if kept.all():
            return self
        sizes = kept.sum(axis=1)
        width = int(sizes.max(initial=0))
        order = np.argsort(~kept, axis=1, kind="stable")[:, :width]
        new_index = np.cumsum(kept, axis=1) - 1
        real = np.arange(width) < sizes[:, None]
        values = vars(self) | {"parents": _follow(new_index, self.parents, ROOT)}
        columns = {
            name: np.where(real, np.take_along_axis(values[name], order, axis=1), padding)
            for name, padding in _PADDING.items()
        }
        return TokenTree(rows=self.rows, sizes=sizes, **columns)

    def holds_parents(self, kept: Bools) -> bool:
        """Return whether `kept` [B, W] marks only nodes, and the parent of each."""
        is_tree = kept.shape == self.tokens.shape and kept.dtype == np.bool_
        return is_tree and not (kept & ~(self.real & (_follow(kept, self.parents, 1) == 1))).any()

    def matching(self, choices: Ints) -> Bools:
        """Return a mask, [B, W], of the nodes on the path that the choices take.

        `choices`, [B, W + 1], are the tokens chosen after the root (first) and after each node.
        """
        after_parent = np.take_along_axis(choices, self.parents + 1, axis=1)
        return self._whole_paths((self.tokens == after_parent) & self.real)

    def on_text(self, texts: Ints, lengths: Ints) -> Bools:
        """Return a mask, [B, W], of the nodes whose path is the beginning of row i's output.

        `texts`, [B, L], are tokens after the root, of which row i has `lengths[i]`.
        """
        if not texts.shape[1]:
            return np.zeros(self.tokens.shape, dtype=np.bool_)
        place = np.clip(self.depths - 1, 0, texts.shape[1] - 1)
        equal = self.tokens == np.take_along_axis(texts, place, axis=1)
        return self._whole_paths(equal & self.real & (self.depths <= lengths[:, None]))

    def _whole_paths(self, good: Bools) -> Bools:
        """Return the nodes that are good with all their ancestors."""
        for _ in range(self.height - 1):
            good = good & (_follow(good.astype(np.int64), self.parents, 1) == 1)
        return good


def join(trees: Sequence[TokenTree]) -> TokenTree:
    """Join trees of different rows into one, rows ascending."""
    trees = [tree for tree in trees if len(tree.rows)] or list(trees[:1])
    if len(trees) == 1:
        return trees[0]
    rows = np.concatenate([tree.rows for tree in trees])
    order = np.argsort(rows)
    shape = (len(rows), max(tree.tokens.shape[1] for tree in trees))
    columns = {name: np.full(shape, padding) for name, padding in _PADDING.items()}
    start = 0
    for tree in trees:
        end, width = start + len(tree.rows), tree.tokens.shape[1]
        for name, column in columns.items():
            column[start:end, :width] = getattr(tree, name)
        start = end
    columns = {name: column[order] for name, column in columns.items()}
    sizes = np.concatenate([tree.sizes for tree in trees])[order]
    return TokenTree(rows=rows[order], sizes=sizes, **columns)


def _follow(values: NDArray[Any], index: Ints, at_root: int) -> NDArray[Any]:
    """Return `values[b, index[b, i]]`, or `at_root` where the index is ROOT."""
    if not values.shape[1]:
        return np.full_like(index, at_root)
    return np.where(
        index == ROOT, at_root, np.take_along_axis(values, np.maximum(index, 0), axis=1)
    )
