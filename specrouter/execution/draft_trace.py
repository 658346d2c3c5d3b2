"""The proposers of a draft's tokens, for requests that ask (`SamplingParams.return_drafts`).

A node keeps its index in the tree that its level of the chain was given (`TokenTree.origins`), so
its proposer is found by going back level by level, and other requests cost nothing.

Contract: nothing of other requests is revealed. Rejected nodes that were copied from their outputs,
and all nodes below them, have a place in the tree, but neither token nor probability.
"""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from processors import VerifyResult
from specrouter.cycle import Floats, Ints
from specrouter.execution.group_draft import GroupDraft
from specrouter.request.output import CycleDraft


def traced(
    verified: VerifyResult,
    drafts: Sequence[GroupDraft],
    index: int,
    target: str,
    quoters: Collection[str],
) -> CycleDraft | None:
    """Return the draft of the row at `index` of a verification, or None if it had none.

    `quoters`: drafters that propose from outputs of other requests.
    """
    tree, row = verified.tree, int(verified.tree.rows[index])
    count = int(tree.sizes[index])
    draft = next((one for one in drafts if one.result is not None and row in one.rows), None)
    if draft is None or not count:
        return None
    parents, log_probs = tree.parents[index, :count], tree.log_probs[index, :count]
    above = np.append(log_probs, 0.0)[parents]  # the root, -1, is the last
    proposers, accepted = _proposers(draft, row, tree.origins[index, :count]), verified.walk(index)
    hidden = np.zeros(count + 1, bool)
    hidden[:count] = np.isin(proposers, [at for at, one in enumerate(draft.used) if one in quoters])
    hidden[accepted] = False
    for node, parent in enumerate(parents.tolist()):  # parents come first; the root, -1, is shown
        hidden[node] |= hidden[parent]

    def listed(values: Ints | Floats) -> tuple[Any, ...]:
        return tuple(None if hidden[at] else one for at, one in enumerate(values.tolist()))

    return CycleDraft(
        chain=(*draft.used, target),
        tokens=listed(tree.tokens[index, :count]),
        parents=tuple(parents.tolist()),
        proposers=tuple(proposers.tolist()),
        probabilities=listed(np.exp(np.minimum(log_probs - above, 0.0)).round(4)),
        accepted=tuple(accepted.tolist()),
    )


def _proposers(draft: GroupDraft, row: int, origins: Ints) -> Ints:
    """Return [n]: the index in `draft.used` of each node's proposer."""
    found, places = np.zeros_like(origins), origins
    for level in range(len(draft.given), 0, -1):
        before = draft.given[level - 1]
        width = before.tokens.shape[1]
        own = (places >= width) & (found == 0)
        found = np.where(own, level, found)
        at = int(np.searchsorted(before.rows, row))
        places = before.origins[at, np.minimum(places, width - 1)] if width else places
    return found
