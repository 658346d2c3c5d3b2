"""Grammars: which ids may follow a row's text, and token trees under them.

Contract: a grammar's mask depends on the text alone, and not on who drafted it, so that tokens
stay a function of logits, seed and structure. Drafts are free; `prune` takes out of them what no
verifier could choose, in one pass on the host. Verifiers alone are masked (`Sampler.masks`).
A grammar that does not bind drafts masks the target alone and prunes nothing: drafts are as good
and cost as much as if the target had said the text by itself.
Not here: what a grammar is compiled from (`specrouter.request.grammar`).
"""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from processors.token_tree import ROOT, Bools, TokenTree

Bits = NDArray[np.uint8]  # id v is bit v % 8, from the lowest on, of byte v // 8
Path = tuple[int, ...]


class GrammarError(RuntimeError):
    """A grammar has no way on, or takes more than it may to find one."""


class TokenGrammar(Protocol):
    """Where one row's text stands in its grammar.

    `binds_drafts`: drafts are pruned by it and intermediate models go by it; else the target alone.
    """

    @property
    def binds_drafts(self) -> bool: ...

    def advance(self, tokens: list[int]) -> None:
        """Output tokens were committed. Those behind an end-of-text id count for nothing."""

    def mask(self, path: Path) -> Bits | None:
        """The ids [ceil(V / 8)] that may follow the committed text and a path behind it.

        None where no text gets to: behind an id that is not allowed, or behind the text's end.
        Paths that share a beginning cost least one after the other, depth first.

        Raises:
            GrammarError: of this path. Others may still be asked about.
        """


def prune(tree: TokenTree, grammars: Mapping[int, TokenGrammar]) -> TokenTree:
    """The tree without the nodes that a row's grammar does not allow, and what stands on them.

    `grammars`: by row; a row without one that binds drafts keeps its nodes. Where a grammar fails,
    the tree ends.
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
    """-inf for all ids that a mask does not allow; NaN stays NaN.

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
    except Exception:  # a verifier that comes here meets it too, and says so
        return False
    return before is not None and allows(before, text[-1])
