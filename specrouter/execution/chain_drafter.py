"""ChainDrafter: runs the chains of a cycle up to their target, and returns what they offer it.

The first member drafts; each intermediate verifies what it is given and hands its own draft on.
A member that fails is passed over: what the others have drafted is still good. A group whose
drafting fails decodes with the target alone.

Not here: which of the drafted nodes the target verifies (`leave_selected`), and the verification.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from processors import (
    ActiveModel,
    DraftRequest,
    DraftResult,
    FedTree,
    NonFiniteLogits,
    VerifyProcessor,
    VerifyRequest,
    VerifyResult,
)
from processors.grammar import prune
from processors.pack import NO_SLOT
from specrouter.cycle import ChainGroup, CyclePlan, CycleResult, ModelFailure
from specrouter.execution.acceptance_feedback import AcceptanceFeedback
from specrouter.execution.drafter import EvictedError, check_read
from specrouter.execution.drafter_prefill import DrafterPrefill
from specrouter.execution.group_draft import GroupDraft, leave_selected
from specrouter.execution.model_comparison import ModelComparison
from specrouter.execution.model_states import StageError, put_down_to
from specrouter.execution.quotations import Quotations
from specrouter.execution.runtime import Runtime
from specrouter.request.params import MAX_TREE_TOKENS

_FEW = 0.125  # of a group's rows near their ends: a cycle is as long as was predicted


class ChainDrafter:
    def __init__(
        self, runtime: Runtime, feedback: AcceptanceFeedback, comparison: ModelComparison
    ) -> None:
        self._runtime = runtime
        self._manager = runtime.manager
        self._states = runtime.states
        self._rows = runtime.rows
        self._sampler = runtime.sampler
        self._faults = runtime.faults
        self._feedback = feedback
        self._prefill = DrafterPrefill(runtime, comparison)
        self._verify = VerifyProcessor(runtime.sampler)
        self._quotations = Quotations(runtime)

    def forget(self, row: int) -> None:
        """The row's request has ended."""
        self._quotations.forget(row)

    def offered(self, plan: CyclePlan, result: CycleResult) -> list[GroupDraft]:
        """The drafts of all groups, with the nodes that the plan's selector leaves."""
        for group in plan.groups:  # KV memory for its largest trees, or as much as there is
            if len(group.chain) > 1:
                slots = self._manager.counts[group.rows] + _most_nodes(group)
                self._manager.grow(group.rows, slots, partly=True)
        self._prefill.begin(plan.groups)
        drafts = list[GroupDraft]()
        for group in plan.groups:
            try:
                drafts += self.draft(group)
            except Exception as error:
                self._faults.note("drafting", error)
                result.failures.extend(ModelFailure(name, error) for name in group.chain[:-1])
                result.is_regular = False
        _note(drafts, result)
        drafts = self._selected(plan, drafts, result)
        for draft in drafts:
            chain = (*draft.used, self._runtime.pool.target)
            result.chains.update(dict.fromkeys(draft.rows.tolist(), chain))
        return drafts

    def _selected(
        self, plan: CyclePlan, drafts: list[GroupDraft], result: CycleResult
    ) -> list[GroupDraft]:
        """Where the selector fails, the groups that it was for decode with the target alone."""
        try:
            leave_selected(drafts, plan.selector, self._feedback.accept_prob)
        except Exception as error:
            self._faults.note("selection", error)
            result.selection_failed, result.is_regular = True, False
            return [draft for draft in drafts if not draft.group.leaves_choice]
        return drafts

    def draft(self, group: ChainGroup) -> list[GroupDraft]:
        """What a group offers the target: one draft, or two where some rows quote."""
        quoted, rest = self._quotations.instead(group)
        return [*quoted, *([self._draft_group(rest)] if len(rest.rows) else [])]

    def _draft_group(self, group: ChainGroup) -> GroupDraft:
        """A model that fails is passed over, and rows that one has not read do not draft."""
        draft = self._begun(group, *self._prefill.read(group))
        failed = {failure.model for failure in draft.failures}
        names = [name for name in group.chain[:-1] if name not in failed]
        for name in names if len(draft.rows) else ():
            try:
                if draft.result is not None:
                    self._verify_with(name, draft, draft.result)
                else:
                    self._draft_with(name, draft)
                draft.used.append(name)
            except StageError as stage:
                draft.is_regular = False
                if not isinstance(stage.failure.error, EvictedError):
                    draft.failures.append(stage.failure)
        return draft

    def _begun(
        self, group: ChainGroup, readers: list[str], failures: list[ModelFailure]
    ) -> GroupDraft:
        """The rows that draft: whose tokens have been read. `readers`: models that have read."""
        room = self._manager.room(group.rows)
        limits = np.minimum(self._rows.remaining(group.rows) - 1, room)
        levels = np.minimum(limits, room // group.shape.width)  # that there is memory for
        failed = {failure.model for failure in failures}
        names = [name for name in group.chain[:-1] if name not in failed]
        is_read = self._prefill.has_read(names, group.rows)
        drafting = (levels > 0) & is_read  # a row's last token is the target's own
        rows = group.rows[drafting]
        depths = np.minimum(group.shape.depth, levels[drafting])
        positions = self._rows.output_positions(rows)
        width, form = group.shape.width, group.branching
        request = DraftRequest(
            rows=rows,
            output_positions=positions,
            depths=depths,
            width=width,
            branching=form,
        )
        cut = group.rows[levels < group.shape.depth]
        behind = group.rows[(limits > 0) & ~is_read]
        sampled = self._rows.sampled(rows)
        draft = GroupDraft(
            group=group,
            request=request,
            sampled=sampled,
            cut_rows=cut,
            behind_rows=behind,
        )
        draft.failures += failures
        draft.caught_up = bool(readers)
        draft.is_regular = len(cut) <= _FEW * len(group.rows) and not failures
        return draft

    def _draft_with(self, name: str, draft: GroupDraft) -> None:
        drafter = self._runtime.drafters[name]
        with put_down_to(name):
            if not drafter.is_open:
                drafter.prepare()
            result = drafter.draft(draft)
        self._hand_on(draft, result)

    def _verify_with(self, name: str, draft: GroupDraft, before: DraftResult) -> None:
        """An intermediate verifies the draft, and its result is the draft from here on."""
        group, rows = draft.group, draft.rows
        request = VerifyRequest(
            tree=before.tree,
            output_positions=draft.request.output_positions,
            rescore=True,
        )
        with self._states.stage(name, rows) as active:
            check_read(active, draft)
            started = time.perf_counter()
            result = self._verify.verify(active, request)
            self._runtime.record_stage("verify", int((result.places >= 0).sum()), started)
            if result.broken_rows.any():
                raise NonFiniteLogits(name, rows[result.broken_rows])
            self._states.touch(active.state, rows, _scrubbed(active, result))
        self._feedback.learn_from_intermediate(draft, before, name, result)
        draft.given.append(before.tree)
        after = result.draft(is_path=group.shape.width == 1)
        nodes = np.minimum(self._manager.room(rows), _most_nodes(group))
        tree = after.tree.select(nodes, self._rows.remaining(rows) - 1)
        self._hand_on(draft, replace(after, tree=tree))

    def _hand_on(self, draft: GroupDraft, result: DraftResult) -> None:
        tree = prune(result.tree, self._sampler.grammars)  # no verifier could choose the others
        draft.result = result if tree is result.tree else replace(result, tree=tree)


def _note(drafts: Sequence[GroupDraft], result: CycleResult) -> None:
    """What drafts of a cycle tell of it."""
    result.failures += [failure for draft in drafts for failure in draft.failures]
    result.is_regular &= all(draft.is_regular for draft in drafts)
    result.caught_up |= any(draft.caught_up for draft in drafts)
    result.cut_rows |= {row for draft in drafts for row in draft.cut_rows.tolist()}
    result.behind_rows |= {row for draft in drafts for row in draft.behind_rows.tolist()}
    result.quoted_rows |= {row for one in drafts if one.is_quoted for row in one.rows.tolist()}


def _most_nodes(group: ChainGroup) -> int:
    """Of a row's tree, at any model of a chain that quotes nothing."""
    return min(MAX_TREE_TOKENS, group.shape.depth * group.shape.width + len(group.chain))


def _scrubbed(active: ActiveModel, result: VerifyResult) -> FedTree:
    """What an intermediate's state holds once nodes with NaN off its walk are gone.

    The target may commit them, or what is below them: such a tree is read anew.
    """
    poisoned, fed = result.poisoned, result.fed
    if not poisoned.any():
        return fed
    active.state.scrub(fed.flat_slots[poisoned])
    is_odd = poisoned.any(axis=1, keepdims=True)
    return FedTree(fed.tree, np.where(is_odd, NO_SLOT, fed.flat_slots))
