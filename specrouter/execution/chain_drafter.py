"""The part of a cycle before the target's pass: all chains draft, level after level.

The first model drafts; each intermediate verifies the draft and passes on an extended one. A model
that fails is skipped, and the draft of the others is used. A group whose drafting fails decodes
with the target alone.

Not here: the selection of nodes for the target (`leave_selected`), and its verification.
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

_FEW = 0.125  # largest share of rows with smaller trees at which a cycle counts as regular


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
        """Forget a row whose request has ended."""
        self._quotations.forget(row)

    def offered(self, plan: CyclePlan, result: CycleResult) -> list[GroupDraft]:
        """Return the drafts of all groups, with the nodes that the plan's selector picks."""
        for group in plan.groups:  # KV memory for the largest trees, or all that is free
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
        """Apply the plan's selector; if it fails, return only drafts that need no selection.

        The other groups then decode with the target alone.
        """
        try:
            leave_selected(drafts, plan.selector, self._feedback.accept_prob)
        except Exception as error:
            self._faults.note("selection", error)
            result.selection_failed, result.is_regular = True, False
            return [draft for draft in drafts if not draft.group.leaves_choice]
        return drafts

    def draft(self, group: ChainGroup) -> list[GroupDraft]:
        """Return a group's drafts: the chain's, and that of rows with a text drafter's draft."""
        quoted, rest = self._quotations.instead(group)
        return [*quoted, *([self._draft_group(rest)] if len(rest.rows) else [])]

    def _draft_group(self, group: ChainGroup) -> GroupDraft:
        """Run the chain for a group; failed models are skipped, and rows that lag do not draft."""
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
        """Return an empty draft of the rows that can draft: read by the chain, and with room.

        `readers`: models that have read tokens for the group in this cycle.
        """
        room = self._manager.room(group.rows)
        limits = np.minimum(self._rows.remaining(group.rows) - 1, room)
        levels = np.minimum(limits, room // group.shape.width)  # as far as memory goes
        failed = {failure.model for failure in failures}
        names = [name for name in group.chain[:-1] if name not in failed]
        is_read = self._prefill.has_read(names, group.rows)
        drafting = (levels > 0) & is_read  # the last token of a text is always the target's
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
        """Let an intermediate verify the draft; its result replaces the draft."""
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
        tree = prune(result.tree, self._sampler.grammars)  # illegal nodes are never accepted
        draft.result = result if tree is result.tree else replace(result, tree=tree)


def _note(drafts: Sequence[GroupDraft], result: CycleResult) -> None:
    """Add failures and special rows of a cycle's drafts to its result."""
    result.failures += [failure for draft in drafts for failure in draft.failures]
    result.is_regular &= all(draft.is_regular for draft in drafts)
    result.caught_up |= any(draft.caught_up for draft in drafts)
    result.cut_rows |= {row for draft in drafts for row in draft.cut_rows.tolist()}
    result.behind_rows |= {row for draft in drafts for row in draft.behind_rows.tolist()}
    result.quoted_rows |= {row for one in drafts if one.is_quoted for row in one.rows.tolist()}


def _most_nodes(group: ChainGroup) -> int:
    """Return the most nodes that a row's tree has, at any model of the group's chain."""
    return min(MAX_TREE_TOKENS, group.shape.depth * group.shape.width + len(group.chain))


def _scrubbed(active: ActiveModel, result: VerifyResult) -> FedTree:
    """Free the slots of an intermediate's nodes with NaN, and return what its state keeps.

    These nodes are off its walk, but the target may commit them or their descendants: a row with
    such nodes keeps no node, and is read again.
    """
    poisoned, fed = result.poisoned, result.fed
    if not poisoned.any():
        return fed
    active.state.scrub(fed.flat_slots[poisoned])
    is_odd = poisoned.any(axis=1, keepdims=True)
    return FedTree(fed.tree, np.where(is_odd, NO_SLOT, fed.flat_slots))
