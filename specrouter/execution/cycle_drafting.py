"""CycleDrafting: what the groups of a cycle offer the target.

Contract: a group whose drafting fails decodes with the target alone. By default all groups draft,
and the target verifies them. With `overlap_drafting` a cycle takes two turns where its chains
compute on other devices than the target: a thread of its own drafts for the rows of the second one
while the target verifies the first.

What the two threads share. Rows: those of a turn are in no other, in every state, ring of noise and
table. States: the thread works on those of the models before the target, which are open by then,
the engine's thread on the target's; committed tokens and the layout of rows stay as they are until
both are done. The thread's choices draw from the same noise, whose rings have a lock, as has the
profiler; each thread has times of forwards of its own. Callers' own processors are run by one
thread only: a cycle with such a row takes one turn.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from specrouter.cycle import ChainGroup, CyclePlan, CycleResult, ModelFailure
from specrouter.execution.acceptance_feedback import AcceptanceFeedback
from specrouter.execution.chain_drafter import ChainDrafter
from specrouter.execution.drafting_thread import DraftingThread
from specrouter.execution.group_draft import GroupDraft, leave_selected
from specrouter.execution.halves import halves, may_overlap
from specrouter.execution.model_comparison import ModelComparison
from specrouter.execution.runtime import Runtime
from specrouter.request.params import Chain

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Drafted:
    """`failures`: of models whose groups have no draft; `is_whole`: all other groups have one."""

    drafts: list[GroupDraft] = field(default_factory=list)
    failures: list[ModelFailure] = field(default_factory=list)
    is_whole: bool = False


@dataclass(frozen=True, eq=False)
class Turn:
    """What the target verifies in one pass. `drafted`: drafts, or waits until that is done."""

    plan: CyclePlan
    drafted: Callable[[], Drafted] = Drafted


class CycleDrafting:
    def __init__(
        self, runtime: Runtime, feedback: AcceptanceFeedback, comparison: ModelComparison
    ) -> None:
        self._runtime = runtime
        self._pool = runtime.pool
        self._states = runtime.states
        self._drafters = runtime.drafters
        self._faults = runtime.faults
        self._feedback = feedback
        self._drafter = ChainDrafter(runtime, feedback, comparison)
        self._thread: DraftingThread | None = None
        self._jobs: list[Future[Drafted]] = []  # that nobody has taken the results of

    def turns(self, plan: CyclePlan) -> list[Turn]:
        """A cycle begins to draft. Each turn is asked for its drafts, whatever becomes of others:
        nobody drafts any more then."""
        self._drafter.begin(plan.groups)
        parts = self._halves(plan)
        if parts is None:
            return [Turn(plan, partial(self._draft, plan.groups))]
        if self._thread is None:
            self._thread = DraftingThread(self._runtime.settings.guard)
        turns = []
        for part in parts:
            job = self._thread.submit(partial(self._draft, part.groups))
            self._jobs.append(job)
            turns.append(Turn(part, partial(self._taken, job)))
        return turns

    def offered(self, turn: Turn, result: CycleResult) -> list[GroupDraft]:
        """The drafts of a turn, with the nodes that the plan's selector leaves."""
        drafted = turn.drafted()
        result.failures += drafted.failures
        result.is_regular &= drafted.is_whole
        _note(drafted.drafts, result)
        drafts = self._selected(turn.plan, drafted.drafts, result)
        for draft in drafts:
            chain = (*draft.used, self._pool.target)
            result.chains.update(dict.fromkeys(draft.rows.tolist(), chain))
        return drafts

    def _draft(self, groups: Sequence[ChainGroup]) -> Drafted:
        drafts, failures, is_whole = list[GroupDraft](), list[ModelFailure](), True
        for group in groups:
            try:
                drafts += self._drafter.draft(group)
            except Exception as error:
                self._faults.note("drafting", error)
                failures.extend(ModelFailure(name, error) for name in group.chain[:-1])
                is_whole = False
        return Drafted(drafts, failures, is_whole)

    def _selected(
        self, plan: CyclePlan, drafts: list[GroupDraft], result: CycleResult
    ) -> list[GroupDraft]:
        """Where the selector fails, the groups that it was for decode with the target alone."""
        selector = None if self._runtime.rule.verifies_whole_drafts else plan.selector
        try:
            leave_selected(drafts, selector, self._feedback.accept_prob)
        except Exception as error:
            self._faults.note("selection", error)
            result.selection_failed, result.is_regular = True, False
            return [draft for draft in drafts if not draft.group.leaves_choice]
        return drafts

    # In two turns

    def _halves(self, plan: CyclePlan) -> tuple[CyclePlan, CyclePlan] | None:
        """None where the cycle takes one turn."""
        if not self._runtime.settings.overlap_drafting or not plan.groups:
            return None
        rows = np.concatenate([group.rows for group in plan.groups])
        if self._runtime.rows.has_processors(rows):
            return None
        return halves(plan, self._is_apart)

    def _is_apart(self, chain: Chain) -> bool:
        """Models that are not open are loaded and timed first, which one thread does."""
        are_open = all(self._drafters[name].is_open for name in chain[:-1])
        return are_open and self._states.is_open(chain[-1]) and may_overlap(chain, self._devices)

    def _devices(self, name: str) -> Collection[str]:
        drafter = self._drafters.get(name)
        return self._pool.placement(name).devices if drafter is None else drafter.devices

    def _taken(self, job: "Future[Drafted]") -> Drafted:
        """What the thread has drafted; nothing if it hangs."""
        hung = None
        if not job.cancelled():
            assert self._thread is not None, "a job has a thread"
            hung = self._thread.hung(job)
        self._jobs.remove(job)
        if hung is not None:
            return self._left_behind(hung)
        return Drafted() if job.cancelled() else job.result()

    def _left_behind(self, hung: str) -> Drafted:
        """Goes on without the thread, which hangs in a forward of a model, and all that it was to
        do."""
        logger.warning("a forward of %s hangs; going on without it", hung)
        self._thread = None
        for job in self._jobs:
            job.cancel()
        self._states.give_up(hung)
        guard = self._runtime.settings.guard
        assert guard is not None, "who gives a forward up knows how long it may take"
        error = TimeoutError(f"a forward took more than {guard.limit_s:g} s")
        return Drafted(failures=[ModelFailure(hung, error)])


def _note(drafts: Sequence[GroupDraft], result: CycleResult) -> None:
    """What drafts of a cycle tell of it."""
    result.failures += [failure for draft in drafts for failure in draft.failures]
    result.is_regular &= all(draft.is_regular for draft in drafts)
    result.caught_up |= any(draft.caught_up for draft in drafts)
    result.cut_rows |= {row for draft in drafts for row in draft.cut_rows.tolist()}
    result.behind_rows |= {row for draft in drafts for row in draft.behind_rows.tolist()}
    result.quoted_rows |= {row for one in drafts if one.is_quoted for row in one.rows.tolist()}
