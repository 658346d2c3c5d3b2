"""AcceptanceFeedback: what verification tells the profiler about who accepts what.

And the other way round: how probable it is, by what was seen so far, that the target accepts a
drafted node.
"""

from dataclasses import dataclass

import numpy as np

from processors import DraftResult, TokenTree, VerifyResult
from specrouter.cycle import Bools, Floats
from specrouter.execution.group_draft import GroupDraft
from specrouter.execution.model_comparison import ModelComparison
from specrouter.execution.runtime import Runtime
from specrouter.profile.acceptance import JudgedTrees
from specrouter.request.params import Chain


@dataclass(frozen=True, eq=False, kw_only=True)
class _Verified:
    """Trees of one group, [B, W], and what a verifier accepted of the nodes that it saw."""

    drafters: Chain
    verifier: str
    tree: TokenTree
    seen: Bools
    accepted: Bools
    counts: Bools  # [B] rows whose choices are all finite


class AcceptanceFeedback:
    def __init__(self, runtime: Runtime, comparison: ModelComparison) -> None:
        self._target = runtime.pool.target
        self._drafters = runtime.drafters
        self._shares_noise = runtime.rule.shares_noise
        self._profiler = runtime.profiler
        self._comparison = comparison

    def learn_from_target(self, draft: GroupDraft, result: VerifyResult) -> None:
        """What the target accepted of a group's trees, in its verification of all groups."""
        left, tree = draft.result, draft.candidates
        if left is None or tree is None or draft.selected is None:
            return
        target, used = self._target, tuple(draft.used)
        if draft.group.branching is None:  # a fixed form says nothing of beams
            index = np.searchsorted(result.tree.rows, left.tree.rows)
            on_walk = result.accepted[index][:, : left.tree.tokens.shape[1]]
            accepted = np.zeros(tree.tokens.shape, dtype=np.bool_)
            accepted[draft.selected] = on_walk[left.tree.real]
            seen, sound = draft.selected, result.sound[index]
            if self._drafters[used[0]].first_is_judged and self._shares_noise:
                first = tree.real & (tree.depths == 1)
                seen = seen | first
                accepted |= first & (tree.tokens == result.choices[index, :1])
            self._record(
                draft,
                _Verified(
                    drafters=used,
                    verifier=target,
                    tree=tree,
                    seen=seen,
                    accepted=accepted,
                    counts=sound,
                ),
            )
        self._comparison.compare(left, used[-1], target, result)

    def learn_from_intermediate(
        self, draft: GroupDraft, before: DraftResult, name: str, result: VerifyResult
    ) -> None:
        """What an intermediate accepted of the draft that it was given, `before`."""
        tree, used = before.tree, draft.used
        drafters = tuple(used[: used.index(name)] if name in used else used)
        if draft.group.branching is None:
            accepted = result.accepted[:, : tree.tokens.shape[1]]
            verified = _Verified(
                drafters=drafters,
                verifier=name,
                tree=tree,
                seen=tree.real,
                accepted=accepted,
                counts=result.sound,
            )
            self._record(draft, verified)
        self._comparison.compare(before, drafters[-1], name, result)

    def accept_prob(self, draft: GroupDraft, tree: TokenTree) -> Floats:
        """[B, W] how probably each node is on the target's walk, by what was seen so far."""
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

    def _record(self, draft: GroupDraft, verified: _Verified) -> None:
        """Sampled and greedy rows apart."""
        drafters, tree = verified.drafters, verified.tree
        for mode in (True, False):
            which = verified.counts & (draft.sampled == mode)
            if not which.any():
                continue
            trees = JudgedTrees(
                parents=tree.parents[which],
                depths=tree.depths[which],
                log_probs=np.where(tree.real, tree.log_probs, -np.inf)[which],
                judged=verified.seen[which],
                accepted=verified.accepted[which],
                is_usual=not draft.is_quoted,
            )
            self._profiler.record_trees((drafters, verified.verifier, mode), trees)
