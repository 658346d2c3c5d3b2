"""Statistics of acceptance: recorded from verifications, and used to predict acceptance.

The profiler keeps them. A prediction is the probability that the target accepts a node.
"""

import numpy as np

from processors import DraftResult, TokenTree, VerifyResult
from specrouter.cycle import Bools, Floats
from specrouter.execution.group_draft import GroupDraft
from specrouter.execution.model_comparison import ModelComparison
from specrouter.execution.runtime import Runtime
from specrouter.profile.acceptance import JudgedTrees
from specrouter.request.params import Chain


class AcceptanceFeedback:
    def __init__(self, runtime: Runtime, comparison: ModelComparison) -> None:
        self._target = runtime.pool.target
        self._profiler = runtime.profiler
        self._comparison = comparison

    def learn_from_target(self, draft: GroupDraft, result: VerifyResult) -> None:
        """Record the target's acceptance of a group's nodes, from its pass over all groups."""
        left, tree = draft.result, draft.candidates
        if left is None or tree is None or draft.selected is None:
            return
        target, used = self._target, tuple(draft.used)
        if draft.group.branching is None:  # trees of a fixed form say nothing about beams
            index = np.searchsorted(result.tree.rows, left.tree.rows)
            on_walk = result.accepted[index][:, : left.tree.tokens.shape[1]]
            accepted = np.zeros(tree.tokens.shape, dtype=np.bool_)
            accepted[draft.selected] = on_walk[left.tree.real]
            seen, sound = draft.selected, result.sound[index]
            if draft.is_quoted:  # first tokens are recorded already, see `Quotations`
                seen = seen & (tree.depths > 1)
            if seen.any():
                self._record((used, target), draft, tree, seen, accepted, sound)
        self._comparison.compare(left, used[-1], target, result)

    def learn_from_intermediate(
        self, draft: GroupDraft, before: DraftResult, name: str, result: VerifyResult
    ) -> None:
        """Record an intermediate's acceptance of `before`, the draft that it was given."""
        tree, used = before.tree, draft.used
        drafters = tuple(used[: used.index(name)] if name in used else used)
        if draft.group.branching is None:
            accepted = result.accepted[:, : tree.tokens.shape[1]]
            self._record((drafters, name), draft, tree, tree.real, accepted, result.sound)
        self._comparison.compare(before, drafters[-1], name, result)

    def accept_prob(self, draft: GroupDraft, tree: TokenTree) -> Floats:
        """Return [B, W]: the probability that the target accepts each node, from statistics."""
        probable = np.zeros(tree.tokens.shape)
        log_probs = np.where(tree.real, tree.log_probs, -np.inf)
        for mode in (True, False):
            which = draft.sampled == mode
            if which.any():
                key = (tuple(draft.used), self._target, mode)
                probable[which] = self._profiler.worth(
                    key, tree.parents[which], tree.depths[which], log_probs[which]
                )
        return np.where(np.isfinite(tree.log_probs) & tree.real, probable, 0.0)

    def _record(
        self,
        pair: tuple[Chain, str],
        draft: GroupDraft,
        tree: TokenTree,
        seen: Bools,
        accepted: Bools,
        counts: Bools,
    ) -> None:
        """Record acceptance, separately for sampled and greedy rows.

        Args:
            pair: the models that drafted, and the verifier.
            draft: the group's draft.
            tree: its nodes.
            seen: [B, W] True for nodes of `tree` that were verified.
            accepted: [B, W] True for those that were accepted.
            counts: [B] rows to record: those without NaN.
        """
        for mode in (True, False):
            which = counts & (draft.sampled == mode)
            if not which.any():
                continue
            trees = JudgedTrees(
                parents=tree.parents[which],
                depths=tree.depths[which],
                log_probs=np.where(tree.real, tree.log_probs, -np.inf)[which],
                judged=seen[which],
                accepted=accepted[which],
                is_usual=not draft.is_quoted,
            )
            self._profiler.record_trees((*pair, mode), trees)
