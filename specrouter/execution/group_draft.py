"""The draft of a group, level after level of its chain, and the selection for the target.

A draft is whole until `leave_selected` applies the cycle's selector, which needs all groups at
once. The whole tree is kept beside the selected nodes, for the statistics of acceptance.
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
    """A group's draft so far, and the models that took part.

    Attributes:
        group: the group of the plan.
        request: the draft request for the group's rows that draft.
        sampled: [B] True for rows that are not greedy.
        cut_rows: rows of the group with less deep trees, or none, near the end of text or memory.
        behind_rows: rows of the group that do not draft, because a model of the chain lags.
        result: the draft for the next level.
        used: the models that took part.
        given: the tree that each used model but the first was given.
        worth: [B, W] probability that the target accepts each node of `result`, if known already.
        candidates: the draft's tree before the selection.
        selected: [B, W] True for nodes of it that were selected.
        failures: models that failed.
        is_quoted: a text drafter's draft, used instead of the chain's because it promised more.
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
        """The rows that draft, [B]."""
        return self.request.rows


def leave_selected(
    drafts: Sequence[GroupDraft],
    selector: TreeSelector | None,
    accept_prob: Callable[[GroupDraft, TokenTree], Floats],
) -> None:
    """Reduce the drafts to the nodes that the selector picks, over all requests.

    Args:
        drafts: of all groups.
        selector: picks the nodes; None: all nodes stay.
        accept_prob: returns [B, W] the probability that each node of a draft's tree is accepted.

    Raises:
        ValueError: a probability is not finite, or nodes were picked without their parents.
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
