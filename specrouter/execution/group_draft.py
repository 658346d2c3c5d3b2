"""GroupDraft: what a group's chain offers, level after level, and what of it the target verifies.

The chain's draft is whole until `leave_selected` has asked the cycle's selector, which looks at all
groups at once. The whole tree is kept beside what is left of it: what was selected tells how good
the draft was.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from processors import DraftRequest, DraftResult, TokenTree
from specrouter.cycle import (
    Bools,
    Candidates,
    ChainGroup,
    Floats,
    Ints,
    ModelFailure,
    TreeSelector,
    select_nodes,
)


@dataclass(eq=False, kw_only=True)
class GroupDraft:
    """How far a group's chain has come: what it offers the next level, and who took part.

    Attributes:
        request: of the rows of the group that draft at all.
        sampled: [B] rows that are not greedy.
        cut_rows: of the group, those near their ends: their trees are less deep, or they have none.
        behind_rows: of the group, those that do not draft since a model of the chain lags.
        result: the draft for the next level.
        used: the models that took part.
        worth: [B, W] how probably the target accepts each node of `result`, where that was asked.
        candidates: the draft's tree before the target's selection.
        selected: [B, W] what of it was selected.
        given: the tree that each used model but the first was given.
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
    given: list[TokenTree] = field(default_factory=list)
    worth: Floats | None = None
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
    parts = [
        _candidates(
            result.tree,
            accept_prob(draft, result.tree) if draft.worth is None else draft.worth,
        )
        for draft, result in free
    ]
    whole = [result.tree for draft, result in drafted if not draft.group.leaves_choice]
    aside = sum(int(tree.sizes.sum()) for tree in whole)
    rows = [result.tree.rows for _, result in free]
    for (draft, result), own in zip(free, select_nodes(selector, rows, parts, aside), strict=True):
        if not result.tree.holds_parents(own):
            raise ValueError("the selection has nodes without their parents")
        draft.selected = own
        draft.result = replace(result, tree=result.tree.keep(own))


def _candidates(tree: TokenTree, accept_prob: Floats) -> Candidates:
    if not np.isfinite(accept_prob).all():
        raise ValueError("how likely nodes are accepted is no number")
    return Candidates(accept_prob, tree.depths)
