"""CycleDrafting: what the groups of a cycle offer the target.

Contract: a group whose drafting fails decodes with the target alone.
"""

from collections.abc import Sequence

from specrouter.cycle import CyclePlan, CycleResult, ModelFailure
from specrouter.execution.acceptance_feedback import AcceptanceFeedback
from specrouter.execution.chain_drafter import ChainDrafter
from specrouter.execution.group_draft import GroupDraft, leave_selected
from specrouter.execution.model_comparison import ModelComparison
from specrouter.execution.runtime import Runtime


class CycleDrafting:
    def __init__(
        self, runtime: Runtime, feedback: AcceptanceFeedback, comparison: ModelComparison
    ) -> None:
        self._pool = runtime.pool
        self._rule = runtime.rule
        self._faults = runtime.faults
        self._feedback = feedback
        self._drafter = ChainDrafter(runtime, feedback, comparison)

    def offered(self, plan: CyclePlan, result: CycleResult) -> list[GroupDraft]:
        """The drafts of all groups, with the nodes that the plan's selector leaves."""
        self._drafter.begin(plan.groups)
        drafts = list[GroupDraft]()
        for group in plan.groups:
            try:
                drafts += self._drafter.draft(group)
            except Exception as error:
                self._faults.note("drafting", error)
                result.failures.extend(ModelFailure(name, error) for name in group.chain[:-1])
                result.is_regular = False
        _note(drafts, result)
        drafts = self._selected(plan, drafts, result)
        for draft in drafts:
            chain = (*draft.used, self._pool.target)
            result.chains.update(dict.fromkeys(draft.rows.tolist(), chain))
        return drafts

    def _selected(
        self, plan: CyclePlan, drafts: list[GroupDraft], result: CycleResult
    ) -> list[GroupDraft]:
        """Where the selector fails, the groups that it was for decode with the target alone."""
        selector = None if self._rule.verifies_whole_drafts else plan.selector
        try:
            leave_selected(drafts, selector, self._feedback.accept_prob)
        except Exception as error:
            self._faults.note("selection", error)
            result.selection_failed, result.is_regular = True, False
            return [draft for draft in drafts if not draft.group.leaves_choice]
        return drafts


def _note(drafts: Sequence[GroupDraft], result: CycleResult) -> None:
    """What drafts of a cycle tell of it."""
    result.failures += [failure for draft in drafts for failure in draft.failures]
    result.is_regular &= all(draft.is_regular for draft in drafts)
    result.caught_up |= any(draft.caught_up for draft in drafts)
    result.cut_rows |= {row for draft in drafts for row in draft.cut_rows.tolist()}
    result.behind_rows |= {row for draft in drafts for row in draft.behind_rows.tolist()}
    result.quoted_rows |= {row for one in drafts if one.is_quoted for row in one.rows.tolist()}
