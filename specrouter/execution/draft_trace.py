"""Who proposed what of a request's draft, for a request that asks (`SamplingParams.return_drafts`).

A node keeps its place in the tree that its level of the chain was given (`TokenTree.origins`), so
who proposed it is found by going back level by level, and costs nothing where nobody asks.
"""

from collections.abc import Sequence

import numpy as np

from processors import VerifyResult
from specrouter.cycle import Ints
from specrouter.execution.group_draft import GroupDraft
from specrouter.request.output import CycleDraft


def traced(
    verified: VerifyResult, drafts: Sequence[GroupDraft], index: int, target: str
) -> CycleDraft | None:
    """Of the row at `index` of what was verified; None where nobody drafted for it."""
    tree, row = verified.tree, int(verified.tree.rows[index])
    count = int(tree.sizes[index])
    draft = next((one for one in drafts if one.result is not None and row in one.rows), None)
    if draft is None or not count:
        return None
    parents, log_probs = tree.parents[index, :count], tree.log_probs[index, :count]
    above = np.append(log_probs, 0.0)[parents]  # the root, -1, is the last
    return CycleDraft(
        chain=(*draft.used, target),
        tokens=tuple(tree.tokens[index, :count].tolist()),
        parents=tuple(parents.tolist()),
        proposers=tuple(_proposers(draft, row, tree.origins[index, :count]).tolist()),
        probabilities=tuple(np.exp(np.minimum(log_probs - above, 0.0)).round(4).tolist()),
        accepted=tuple(verified.walk(index).tolist()),
    )


def _proposers(draft: GroupDraft, row: int, origins: Ints) -> Ints:
    """[n] place in `draft.used` of who proposed each node."""
    found, places = np.zeros_like(origins), origins
    for level in range(len(draft.given), 0, -1):
        before = draft.given[level - 1]
        width = before.tokens.shape[1]
        own = (places >= width) & (found == 0)
        found = np.where(own, level, found)
        at = int(np.searchsorted(before.rows, row))
        places = before.origins[at, np.minimum(places, width - 1)] if width else places
    return found
