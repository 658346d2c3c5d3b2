"""GroupDraft: what a group's chain offers, level after level, and what of it the target verifies.

The chain's proposal is whole until `leave_selected` has asked the cycle's selector, which looks at
all groups at once. What the target refuses to verify still teaches how good the draft was, so the
tree from before is kept beside it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from processors import Proposal, TokenTree
from specrouter.cycle import Candidates, ChainGroup, ModelFailure, TreeSelector

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(eq=False)
class GroupDraft:
    """How far a group's chain has come: what it offers the next level, and who took part.

    Attributes:
        rows: of the group, those that draft at all.
        heights: [B] how deep their trees may be.
        positions: [B] output positions after their roots.
        sampled: [B] rows that are not greedy.
        candidates: the proposal's tree before the target's selection.
        selected: [B, W] what of it was selected.
        cut_rows: of the group, those near their ends: their trees are less deep, or they have none.
        behind_rows: of the group, those that do not draft since a model of the chain lags.
        caught_up, is_regular: see `CycleResult`.
    """

    group: ChainGroup
    rows: Ints
    heights: Ints
    positions: Ints
    sampled: Bools
    cut_rows: Ints
    behind_rows: Ints
    proposal: Proposal | None = None
    used: list[str] = field(default_factory=list)
    candidates: TokenTree | None = None
    selected: Bools | None = None
    failures: list[ModelFailure] = field(default_factory=list)
    caught_up: bool = False
    is_regular: bool = True


def leave_selected(
    drafts: Sequence[GroupDraft],
    selector: TreeSelector | None,
    worth: Callable[[GroupDraft], Floats],
) -> None:
    """Leaves the nodes to the target that the selector picks, of all requests.

    Args:
        selector: None: every node is left.
        worth: [B, W] the chance of each node of a draft's tree to be on the target's walk.
    """
    drafted = [draft for draft in drafts if draft.proposal is not None]
    for draft in drafted:
        assert draft.proposal is not None
        tree = draft.candidates = draft.proposal.tree
        draft.selected = tree.real
    choosy = [draft for draft in drafted if draft.group.leaves_choice]
    if selector is None or not choosy:
        return
    trees = [draft.proposal.tree for draft in choosy if draft.proposal is not None]
    candidates, rows = _candidates(trees, [worth(draft) for draft in choosy])
    whole = [draft.candidates for draft in drafted if not draft.group.leaves_choice]
    aside = sum(int(tree.sizes.sum()) for tree in whole if tree is not None)
    chosen = selector(rows, candidates, aside)
    start = 0
    for draft, tree in zip(choosy, trees, strict=True):
        assert draft.proposal is not None
        own = chosen[start : start + len(tree.rows), : tree.tokens.shape[1]]
        start += len(tree.rows)
        draft.selected = own
        draft.proposal = replace(draft.proposal, tree=tree.keep(own))


def _candidates(trees: Sequence[TokenTree], worth: Sequence[Floats]) -> tuple[Candidates, Ints]:
    """Trees one after the other, as wide as the widest, and their rows."""
    width = max(tree.tokens.shape[1] for tree in trees)

    def stacked(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([np.pad(p, ((0, 0), (0, width - p.shape[1]))) for p in parts])

    rows = np.concatenate([tree.rows for tree in trees])
    return Candidates(stacked(worth), stacked([tree.depths for tree in trees])), rows
