"""Grammars: the ids that may follow a row's text, and token trees under them.

Contract: a grammar's mask depends on the text alone, not on the drafter, so that tokens stay a
function of logits, seed and structure. Drafts are free; `prune` removes from them what no verifier
could choose, in one pass on the host. Only verifiers are masked (`Sampler.masks`). A grammar that
does not bind drafts masks the target alone and prunes nothing: drafts are as good and cost as much
as if the target produced the text without a grammar. Compiling a grammar is in
`specrouter.request.grammar`.
"""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from processors.token_tree import ROOT, Bools, TokenTree

Bits = NDArray[np.uint8]  # id v is bit v % 8, counted from the lowest, of byte v // 8
Path = tuple[int, ...]


class GrammarError(RuntimeError):
    """Error raised if a grammar allows no continuation, or exceeds its limits to find one."""


class TokenGrammar(Protocol):
    """Position of one row's text in its grammar.

    With `binds_drafts`, drafts are pruned by it and intermediate models follow it; else only the
    target does.
    """

    @property
    def binds_drafts(self) -> bool: ...

    def advance(self, tokens: list[int]) -> None:
        """Advance by committed output tokens; those after an end-of-text id are ignored."""

    def mask(self, path: Path) -> Bits | None:
        """Return the ids, [ceil(V / 8)], that may follow the committed text and a path after it.

        Returns None for a path that no text has: after an id that is not allowed, or after the
        text's end. Paths that share a beginning cost least one after the other, depth first.

        Raises:
            GrammarError: it fails for this path; others may still be asked for.
        """


def prune(tree: TokenTree, grammars: Mapping[int, TokenGrammar]) -> TokenTree:
    """Return the tree without nodes that a row's grammar does not allow, nor their subtrees.

    `grammars` are by row; a row without one that binds drafts keeps its nodes. If a grammar fails,
    the tree ends there.
    """
    binding = {row for row, grammar in grammars.items() if grammar.binds_drafts}
    restrained = [index for index, row in enumerate(tree.rows.tolist()) if row in binding]
    if not restrained or not tree.tokens.shape[1]:
        return tree
    kept: Bools = tree.real
    paths = tree.paths()
    for index in restrained:
        grammar = grammars[int(tree.rows[index])]
        depths = tree.depths[index, : tree.sizes[index]].tolist()
        parents = tree.parents[index].tolist()
        texts = [tuple(paths[index, node, :depth].tolist()) for node, depth in enumerate(depths)]
        for node in sorted(range(len(texts)), key=texts.__getitem__):
            stands = parents[node] == ROOT or kept[index, parents[node]]
            kept[index, node] = stands and is_legal(grammar, texts[node])
    return tree.keep(kept)


def allows(mask: Bits, token: int) -> bool:
    return bool(mask[token // 8] >> (token % 8) & 1)


def exclude_others(scores: Tensor, masks: Tensor) -> None:
    """Set all ids that a mask does not allow to -inf; NaN stays NaN.

    Args:
        scores: [n, V], changed in place.
        masks: [n, ceil(V / 8)] uint8, see `Bits`.
    """
    shifts = torch.arange(8, dtype=torch.uint8, device=masks.device)
    allowed = (masks.unsqueeze(2) >> shifts).bitwise_and_(1).flatten(1)[:, : scores.shape[1]]
    scores.copy_(torch.where(allowed.bool(), scores, scores - torch.inf))


def is_legal(grammar: TokenGrammar, text: Path) -> bool:
    try:
        before = grammar.mask(text[:-1])
    except Exception:  # a verifier that gets here meets it too, and reports it
        return False
    return before is not None and allows(before, text[-1])
