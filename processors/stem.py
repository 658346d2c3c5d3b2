"""Stems: paths that a draft goes on from, beyond what is committed.

An intermediate that judges several short drafts before the next model sees the result hands back
the path that it accepted. The drafter goes on from that path's end: its new tree is grafted onto
the stem, and the whole is an ordinary tree from the root on.
"""

from dataclasses import replace

import numpy as np

from processors.token_tree import ROOT, Ints, TokenTree


def graft(stem: TokenTree, top: TokenTree) -> TokenTree:
    """The tree that begins with the stem, a path, and goes on with `top` at its end.

    Both have the same rows. The stem's nodes come first in each row, and are certain.
    """
    heights = stem.sizes[:, None]
    width = stem.tokens.shape[1]
    shifted = np.where(top.parents == ROOT, heights - 1, top.parents + width)
    whole = TokenTree(
        stem.rows,
        np.concatenate((stem.tokens, top.tokens), axis=1),
        np.concatenate((stem.parents, shifted), axis=1),
        np.concatenate((stem.depths, top.depths + heights), axis=1),
        np.concatenate((np.where(stem.real, 0.0, -np.inf), top.log_probs), axis=1),
        np.concatenate((stem.origins, top.origins), axis=1),
        np.full(len(stem.rows), width + top.tokens.shape[1]),
    )
    return whole.keep(np.concatenate((stem.real, top.real), axis=1))


def graft_values(stem: TokenTree, top: TokenTree, of_stem: Ints, of_top: Ints, none: int) -> Ints:
    """Values of the nodes of `stem` and `top`, [B, W] each, for the nodes of `graft(stem, top)`."""
    sizes = stem.sizes + top.sizes
    whole = np.full((len(stem.rows), int(sizes.max(initial=0))), none, dtype=np.int64)
    place = np.arange(whole.shape[1])
    whole[place < stem.sizes[:, None]] = of_stem[stem.real]
    behind = (place >= stem.sizes[:, None]) & (place < sizes[:, None])
    whole[behind] = of_top[top.real]
    return whole


def renumbered(tree: TokenTree) -> TokenTree:
    """The tree with its own numbering as origins."""
    index = np.broadcast_to(np.arange(tree.tokens.shape[1]), tree.tokens.shape)
    return replace(tree, origins=np.where(tree.real, index, 0))
