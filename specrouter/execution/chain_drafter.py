"""ChainDrafter: runs a chain up to its target, and returns what it offers there.

The first member drafts; each intermediate verifies what was proposed and makes it its own proposal.
A member that fails is passed over: what the others have proposed is still good.

Not here: which of the drafted nodes the target verifies (`leave_selected`), and what it says.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from modelpool import ModelPool
from processors import (
    DraftProcessor,
    FedTree,
    NgramDraftProcessor,
    NonFiniteLogits,
    Proposal,
    Verdict,
    VerifyProcessor,
)
from processors.grammar import prune
from processors.pack import NO_SLOT, lag
from specrouter.cycle import CATCH_UP_TOKENS, ChainGroup
from specrouter.execution.decoding_rows import DecodingRows
from specrouter.execution.drafter_prefill import DrafterPrefill
from specrouter.execution.forward_clock import ForwardClock
from specrouter.execution.group_draft import GroupDraft
from specrouter.execution.lessons import Teacher
from specrouter.execution.model_states import ModelStates, StageError
from specrouter.profile.profiler import PerformanceProfiler
from specrouter.request.params import MAX_TREE_TOKENS
from statemgr import ModelState, StateManager

Ints = NDArray[np.int64]

_FEW = 0.125  # of a group's rows near their ends: a cycle is as long as was predicted


class ChainDrafter:
    """Args: `rejection`: draw drafts by noise of their own, and judge them by Leviathan's rule."""

    def __init__(
        self,
        pool: ModelPool,
        manager: StateManager,
        states: ModelStates,
        rows: DecodingRows,
        teacher: Teacher,
        profiler: PerformanceProfiler,
        clock: ForwardClock,
        prefill_chunk: int,
        rejection: bool,
    ) -> None:
        self._pool = pool
        self._manager = manager
        self._states = states
        self._rows = rows
        self._sampler = rows.sampler
        self._teacher = teacher
        self._profiler = profiler
        self._clock = clock
        self._rejection = rejection
        self._prefill = DrafterPrefill(pool, manager, states, rows, teacher, clock, prefill_chunk)
        self._draft = DraftProcessor()
        self._verify = VerifyProcessor()
        self._ngram = NgramDraftProcessor()

    def begin(self, groups: Sequence[ChainGroup]) -> None:
        """A cycle begins, in which these groups draft, in any order."""
        self._prefill.begin(groups)

    def draft(self, group: ChainGroup) -> GroupDraft:
        """What a group offers the target.

        A model that fails is passed over, and rows that one has not read do not draft.
        """
        draft = self._begun(group)
        failed = {failure.model for failure in draft.failures}
        names = [name for name in group.chain[:-1] if name not in failed]
        for name in names if len(draft.rows) else ():
            try:
                self._advance(draft, name)
                draft.used.append(name)
            except StageError as stage:
                draft.is_regular = False
                if not isinstance(stage.failure.error, _Forgotten):
                    draft.failures.append(stage.failure)
        return draft

    def _begun(self, group: ChainGroup) -> GroupDraft:
        """The rows that draft: whose texts have been read."""
        limits = self._rows.remaining(group.rows) - 1
        readers, failures = self._prefill.read(group)
        failed = {failure.model for failure in failures}
        names = [name for name in group.chain[:-1] if name not in failed]
        is_read = self._prefill.has_read(names, group.rows)
        drafting = (limits > 0) & is_read  # a row's last token is the target's own
        rows = group.rows[drafting]
        heights = np.minimum(group.depth, limits[drafting])
        positions = self._rows.output_positions(rows)
        cut = group.rows[limits < group.depth]
        behind = group.rows[(limits > 0) & ~is_read]
        draft = GroupDraft(group, rows, heights, positions, self._rows.sampled(rows), cut, behind)
        draft.failures += failures
        draft.caught_up = bool(readers)
        draft.is_regular = len(cut) <= _FEW * len(group.rows) and not failures
        return draft

    def _advance(self, draft: GroupDraft, name: str) -> None:
        """One more level of the chain."""
        if draft.proposal is None:
            self._offer(draft, self._propose(name, draft))
        else:
            self._judge(draft, name)

    def _offer(self, draft: GroupDraft, proposal: Proposal) -> None:
        """Hands a proposal on, without what grammars do not allow.

        Rejection sampling needs all that was drawn: its verifiers refuse it in their own way.
        """
        if self._sampler.grammars and not self._rejection:
            proposal = replace(proposal, tree=prune(proposal.tree, self._sampler.grammars))
        draft.proposal = proposal

    def _propose(self, name: str, draft: GroupDraft) -> Proposal:
        if self._pool.is_weightless(name):
            return self._propose_from_text(name, draft)
        group, rows = draft.group, draft.rows
        width = 1 if self._rejection else group.width
        with self._states.stage(name, rows) as (model, state):
            self._check_read(state, draft)
            started = time.perf_counter()
            proposal = self._draft.draft(
                model,
                state,
                self._manager,
                self._sampler,
                rows,
                draft.positions,
                draft.heights,
                width,
                purpose=1 if self._rejection else 0,
                branching=None if self._rejection else group.branching,
            )
            steps = int(draft.heights.max())
            own_ms = self._clock.own_ms(started)
            self._profiler.record_stage("draft", len(rows) * width, own_ms, steps)
            self._states.touch(state, rows, proposal.fed)
        # Places of the beam that hold no token are no nodes.
        tree = proposal.tree.select(draft.heights * group.width, draft.heights)
        return replace(proposal, tree=tree)

    def _propose_from_text(self, name: str, draft: GroupDraft) -> Proposal:
        group, rows = draft.group, draft.rows
        started = time.perf_counter()
        try:
            tree = self._ngram.draft(
                self._rows.ngrams,
                self._manager,
                _no_noise if self._rejection else self._sampler.noise_at,
                rows,
                draft.positions,
                draft.heights,
                1 if self._rejection else group.width,
            )
        except Exception as error:
            raise StageError(name, error) from error
        elapsed_ms = (time.perf_counter() - started) * 1000
        step_ms = elapsed_ms / group.depth
        self._profiler.record_forward(name, len(rows) * group.width, 0.0, step_ms, group.depth)
        return Proposal.without_logits(tree)

    def _judge(self, draft: GroupDraft, name: str) -> None:
        """An intermediate verifies what was proposed, and makes it its own proposal."""
        group, rows, before = draft.group, draft.rows, draft.proposal
        assert before is not None
        level = len(draft.used)
        with self._states.stage(name, rows) as (model, state):
            self._check_read(state, draft)
            started = time.perf_counter()
            arguments = (model, state, self._manager, self._sampler, before.tree, draft.positions)
            if self._rejection:
                verdict = self._verify.verify_by_rejection(*arguments, [before], level)
            else:
                verdict = self._verify.verify(*arguments, rescore=True)
            places = int((verdict.places >= 0).sum())
            self._profiler.record_stage("verify", places, self._clock.own_ms(started))
            if verdict.broken_rows.any():
                raise NonFiniteLogits(name, rows[verdict.broken_rows])
            self._states.touch(state, rows, _scrubbed(state, verdict))
        self._teacher.learn_from_judge(draft, before, name, verdict)
        is_path = self._rejection or group.width == 1
        after = verdict.proposal(group.hard_rejection and not self._rejection, is_path)
        size = group.depth * group.width + len(group.chain)
        nodes = np.full(len(rows), min(MAX_TREE_TOKENS, size))
        limits = self._rows.remaining(rows) - 1
        tree = after.tree.select(nodes, limits)
        self._offer(draft, replace(after, tree=tree))

    def _check_read(self, state: ModelState, draft: GroupDraft) -> None:
        """The last tokens are read with the draft. Raises `_Forgotten` where there are more."""
        behind = int(lag(state, self._manager, draft.rows).max(initial=0))
        if behind > CATCH_UP_TOKENS:
            raise _Forgotten
        draft.caught_up |= behind > 2
        self._clock.take_ms()


class _Forgotten(Exception):
    """A model was evicted in the midst of the cycle. That is no fault of its own."""


def _scrubbed(state: ModelState, verdict: Verdict) -> FedTree:
    """What an intermediate's state holds after odd nodes off its walk are gone.

    The target may take them, or what is below them, into the text: such a tree is read anew.
    """
    poisoned, fed = verdict.poisoned, verdict.fed
    if not poisoned.any():
        return fed
    state.scrub(fed.flat_slots[poisoned])
    is_odd = poisoned.any(axis=1, keepdims=True)
    return FedTree(fed.tree, np.where(is_odd, NO_SLOT, fed.flat_slots))


def _no_noise(row: int, position: int, ids: Ints) -> NDArray[np.float64]:
    """Of rejection sampling: what is drawn without chance is accepted by the verifier's alone."""
    return np.zeros(len(ids))
