"""GroupDraft: what a group's chain offers, level after level, and what of it the target verifies.

The chain's draft is whole until `leave_selected` has asked the cycle's selector, which looks at all
groups at once. The whole tree is kept beside what is left of it: what was selected tells how good
the draft was.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from processors import DraftRequest, DraftResult, TokenTree
from specrouter.cycle import Candidates, ChainGroup, ModelFailure, TreeSelector

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(eq=False)
class GroupDraft:
    """How far a group's chain has come: what it offers the next level, and who took part.

    Attributes:
        request: of the rows of the group that draft at all.
        sampled: [B] rows that are not greedy.
        cut_rows: of the group, those near their ends: their trees are less deep, or they have none.
        behind_rows: of the group, those that do not draft since a model of the chain lags.
        result: the draft for the next level.
        used: the models that took part.
        candidates: the draft's tree before the target's selection.
        selected: [B, W] what of it was selected.
        is_quoted: drafted in the place of the group's chain, for rows for which this promised more.
        caught_up, is_regular: see `CycleResult`.
    """

    group: ChainGroup
    request: DraftRequest
    sampled: Bools
    cut_rows: Ints
    behind_rows: Ints
    result: DraftResult | None = None
    used: list[str] = field(default_factory=list)
    candidates: TokenTree | None = None
    selected: Bools | None = None
    failures: list[ModelFailure] = field(default_factory=list)
    is_quoted: bool = False
    caught_up: bool = False
    is_regular: bool = True

    @property
    def rows(self) -> Ints:
        """[B] that draft."""
        return self.request.rows


def leave_selected(
    drafts: Sequence[GroupDraft],
    selector: TreeSelector | None,
    accept_prob: Callable[[GroupDraft, TokenTree], Floats],
) -> None:
    """Leaves the nodes to the target that the selector picks, of all requests.

    Args:
        selector: None: every node is left.
        accept_prob: [B, W] the probability of each node of a draft's tree to be accepted.

    Raises:
        ValueError: the probabilities are no numbers, or what the selector picked are no trees.
    """
    drafted = [(draft, draft.result) for draft in drafts if draft.result is not None]
    for draft, result in drafted:
        draft.candidates, draft.selected = result.tree, result.tree.real
    free = [one for one in drafted if one[0].group.leaves_choice]
    if selector is None or not free:
        return
    trees = [result.tree for _, result in free]
    candidates, rows = _candidates(trees, [accept_prob(draft, r.tree) for draft, r in free])
    whole = [result.tree for draft, result in drafted if not draft.group.leaves_choice]
    chosen = selector(rows, candidates, sum(int(tree.sizes.sum()) for tree in whole))
    start = 0
    for draft, result in free:
        tree = result.tree
        own = chosen[start : start + len(tree.rows), : tree.tokens.shape[1]]
        start += len(tree.rows)
        if not tree.holds_parents(own):
            raise ValueError("the selection has nodes without their parents")
        draft.selected = own
        draft.result = replace(result, tree=tree.keep(own))


def _candidates(
    trees: Sequence[TokenTree], accept_probs: Sequence[Floats]
) -> tuple[Candidates, Ints]:
    """Trees one after the other, as wide as the widest, and their rows."""
    width = max(tree.tokens.shape[1] for tree in trees)

    def stacked(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([np.pad(p, ((0, 0), (0, width - p.shape[1]))) for p in parts])

    rows, worth = np.concatenate([tree.rows for tree in trees]), stacked(accept_probs)
    if not np.isfinite(worth).all():
        raise ValueError("how likely nodes are accepted is no number")
    return Candidates(worth, stacked([tree.depths for tree in trees])), rows
