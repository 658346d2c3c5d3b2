"""Executor: runs one decoding cycle with the processors, over the committed tokens of all rows.

Contract: `run` drafts with each group's chain, verifies all groups' trees and the prefill chunks in
one pass of the target, commits what it chose, and rolls every model back to the committed tokens.
A drafter or intermediate that fails costs its group the speculation of this cycle, nothing else;
so does anything around it. A target that fails raises `TargetError`; nothing is committed then.
What fails for one row is told in `CycleResult.errors`, and other rows go on.

Not here: requests, stop conditions, which chain is used (`ChainRouter`, `ModelChainScheduler`); how
a chain drafts (`ChainDrafter`); which models hold which state (`ModelStates`).
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from processors import (
    ActiveModel,
    DraftResult,
    PrefillChunks,
    TokenTree,
    VerifyProcessor,
    VerifyRequest,
    VerifyResult,
    join,
)
from specrouter.cycle import (
    CyclePlan,
    CycleResult,
    ModelFailure,
    ShadowEvaluation,
    TargetError,
)
from specrouter.execution.acceptance_feedback import AcceptanceFeedback
from specrouter.execution.cached_prefixes import CachedPrefixes
from specrouter.execution.chain_drafter import ChainDrafter
from specrouter.execution.commit_stage import CommitStage
from specrouter.execution.fault_guard import RowGuard
from specrouter.execution.group_draft import GroupDraft, leave_selected
from specrouter.execution.model_comparison import ModelComparison
from specrouter.execution.model_states import StageError
from specrouter.execution.runtime import Runtime
from specrouter.execution.shadow_evaluator import ShadowEvaluator
from specrouter.request.spec import RequestSpec
from statemgr import CacheUse

Ints = NDArray[np.int64]


class Executor:
    """See the module."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._pool = runtime.pool
        self._target = runtime.pool.target
        self._manager = runtime.manager
        self._rule = runtime.rule
        self._rows = runtime.rows
        self._faults = runtime.faults
        self.states = runtime.states
        self._comparison = ModelComparison(runtime)
        self._feedback = AcceptanceFeedback(runtime, self._comparison)
        self._drafter = ChainDrafter(runtime, self._feedback, self._comparison)
        self._evaluator = ShadowEvaluator(runtime)
        self._verify = VerifyProcessor(runtime.sampler, runtime.rule)
        self._commits = CommitStage(runtime)
        self.prefixes = CachedPrefixes(runtime)

    def allocate(self, request: RequestSpec) -> int | None:
        """A row for a request; None where there is no row or memory now."""
        use = CacheUse()
        with self._faults.part("prefixes"):
            asked = self.prefixes.use(request)
            assert isinstance(asked, CacheUse), f"{asked} says nothing"
            use = asked
        return self._manager.allocate(request.committed, request.reserve_tokens, use)

    def open(self, row: int, request: RequestSpec) -> None:
        """Prepares a row that the state manager has allocated for a request."""
        purpose = self._rule.noise_purpose(1)
        self._rows.open(row, request, (self._pool.get(self._target).device, purpose))
        with self._faults.part("rows"):
            self._comparison.forget(row)

    def close(self, row: int, keep: bool = False) -> None:
        """`keep`: what the row's request has read is good for others."""
        with self._faults.part("rows"):
            self._rows.close(row)
        with self._faults.part("rows"):
            self._comparison.forget(row)
        self._manager.free(row, keep)

    def run(self, plan: CyclePlan) -> CycleResult:
        """One cycle. Raises `TargetError`, after which nothing is committed."""
        with torch.inference_mode(), self.states.cycle():
            result, drafts = CycleResult(), list[GroupDraft]()
            if plan.shadow_evaluation is not None:
                with self._faults.part("evaluation"):
                    self._evaluate(plan.shadow_evaluation, result)
            try:
                drafts = self._selected(plan, self._drafted(plan, result), result)
            except Exception as failure:  # around the groups' own guards
                self._faults.note("drafting", failure)
                result.is_regular = False
            rows, positions = self._positions(plan, result)
            if not len(rows) and not len(plan.prefill_rows):
                return result
            try:
                verified = self._verify_with_target(plan, drafts, rows, positions, result)
            except StageError as stage:
                error = stage.failure.error
                reason = f"{self._target} failed: {type(error).__name__}: {error}"
                raise TargetError(reason, result.failures) from error
            for draft in drafts:
                with self._faults.part("feedback"):
                    self._feedback.learn_from_target(draft, verified)
            self._commits.commit(verified, drafts, result)
            return result

    # What views tell of the rows

    def slots_of(self, rows: Ints) -> Ints:
        return self.states.slots_of(rows)

    def slots_for(self, tokens: int) -> int:
        """Of a row with so many tokens."""
        return self.states.slots_for(tokens)

    def unread(self, rows: Iterable[int]) -> dict[int, int]:
        """By row: tokens before its last one that the target has not read."""
        every = list(rows)
        left = self.states.lag(self._target, np.array(every, dtype=np.int64))
        return dict(zip(every, np.maximum(left, 0).tolist(), strict=True))

    def repeatable(self, rows: Ints) -> Ints:
        return self._evaluator.repeatable(rows)

    def missed(self, model: str, rows: Ints) -> Ints:
        if self._pool.is_weightless(model):
            return np.zeros_like(rows)
        return self.states.lag(model, rows)

    def evaluable(self, model: str, rows: Ints) -> Ints:
        return self._evaluator.evaluable(model, rows)

    def is_open(self, model: str) -> bool:
        """Whether a model could draft at once."""
        return self._pool.is_weightless(model) or self.states.is_open(model)

    # A cycle

    def _evaluate(self, evaluation: ShadowEvaluation, result: CycleResult) -> None:
        result.is_regular = False  # it takes time beside the planned
        try:
            self._evaluator.run(evaluation)
        except StageError as stage:
            result.failures.append(stage.failure)
        except Exception as error:  # nothing was learned: it must not be tried all the time
            self._faults.note("evaluation", error)
            result.failures.append(ModelFailure(evaluation.model, error))

    def _drafted(self, plan: CyclePlan, result: CycleResult) -> list[GroupDraft]:
        """What groups offer the target. One whose drafting fails decodes with the target alone."""
        drafts: list[GroupDraft] = []
        has_begun = False
        with self._faults.part("drafting"):
            self._drafter.begin(plan.groups)
            has_begun = True
        for group in plan.groups:
            try:
                if has_begun:
                    drafts.append(self._drafter.draft(group))
            except Exception as error:
                self._faults.note("drafting", error)
                result.failures += [ModelFailure(name, error) for name in group.chain[:-1]]
        result.is_regular &= len(drafts) == len(plan.groups)
        with self._faults.part("drafting"):
            _note(drafts, result)
        return drafts

    def _selected(
        self, plan: CyclePlan, drafts: list[GroupDraft], result: CycleResult
    ) -> list[GroupDraft]:
        """The drafts with the nodes that the plan's selector leaves. Where it fails, the groups
        that it was for decode with the target alone."""
        selector = None if self._rule.verifies_whole_drafts else plan.selector
        try:
            leave_selected(drafts, selector, self._feedback.accept_prob)
        except Exception as error:
            self._faults.note("selection", error)
            result.selection_failed, result.is_regular = True, False
        else:
            return drafts
        with self._faults.part("selection"):
            return [draft for draft in drafts if not draft.group.leaves_choice]
        return []

    def _positions(self, plan: CyclePlan, result: CycleResult) -> tuple[Ints, Ints]:
        """The rows that decode, ascending, and the positions of their next tokens among their
        output. Together, and one by one if that fails: a row that it fails for ends."""
        grouped = [group.rows for group in plan.groups]
        rows = np.sort(np.concatenate([plan.prefill_rows[:0], *grouped]))
        with self._faults.part("rows"):
            return rows, self._rows.output_positions(rows)
        sound, positions = [rows[:0]], [rows[:0]]
        for at, row in enumerate(rows.tolist()):
            with RowGuard(result.errors, row, "the place in its text"):
                positions.append(self._rows.output_positions(rows[at : at + 1]))
                sound.append(rows[at : at + 1])
        return np.concatenate(sound), np.concatenate(positions)

    def _verify_with_target(
        self,
        plan: CyclePlan,
        drafts: Sequence[GroupDraft],
        rows: Ints,
        positions: Ints,
        result: CycleResult,
    ) -> VerifyResult:
        """`rows`, `positions`: see `_positions`. Raises `StageError` where the target fails."""
        offered = [draft.result for draft in drafts if draft.result is not None]
        if result.errors:  # rows that have ended are in no pack
            offered = [own for one in offered if len((own := one.of_rows(rows)).tree.rows)]
        drafted = [rows[:0], *(one.tree.rows for one in offered)]
        undrafted = TokenTree.empty(np.setdiff1d(rows, np.concatenate(drafted)))
        tree = join([*(one.tree for one in offered), undrafted])
        with self._faults.part("rows"):  # those of drafters concern their drafts only
            self._rows.sampler.take_errors()
        started = time.perf_counter()
        with self.states.stage(self._target, tree.rows) as active:
            with self._faults.part("timing"):
                started = self._runtime.begin_stage()
            verified = self._verify.verify(
                active, self._request(active, plan, tree, positions, offered)
            )
            self.states.touch(active.state, tree.rows, verified.fed)
            if verified.poisoned.any():
                active.state.scrub(verified.fed.flat_slots[verified.poisoned])
        with self._faults.part("feedback"):
            self._comparison.keep_prompt_ends(verified)
        with self._faults.part("rows"):  # a request whose log-probabilities are forgotten ends
            for row, logits in verified.earlier.items():
                with RowGuard(result.errors, row, "log-probabilities of the prompt"):
                    self._rows.prompt_logprobs.note(row, logits)
        with self._faults.part("timing"):
            places = int((verified.places >= 0).sum())
            self._runtime.end_stage("verify", places, started)
        return verified

    def _request(
        self,
        active: ActiveModel,
        plan: CyclePlan,
        tree: TokenTree,
        positions: Ints,
        drafts: Sequence[DraftResult],
    ) -> VerifyRequest:
        level = max((len(group.chain) - 1 for group in plan.groups), default=1)
        chunks = PrefillChunks(plan.prefill_rows, plan.prefill_counts)
        request = VerifyRequest(tree, positions, drafts, max(1, level), chunks=chunks)
        with self._faults.part("rows"):  # as for those that are not noted
            asked = self._rows.prompt_logprobs.asked
            earlier = np.where(asked(chunks.rows), chunks.counts, 0)
            return replace(
                request,
                earlier=self._earlier(active.lag(tree.rows), asked(tree.rows)),
                chunks=replace(chunks, earlier=earlier),
            )
        return request

    def _earlier(self, behind: Ints, asked: NDArray[np.bool_]) -> Ints:
        """[B] places before the roots whose logits are of use: a prompt's end, which drafters will
        be compared with when they read it, or all of it.

        Args:
            behind: [B] tokens that are read before each root.
            asked: [B] whether the log-probabilities of the row's prompt are wanted.
        """
        return np.where(asked, behind, np.minimum(behind, self._comparison.prompt_positions))


def _note(drafts: Sequence[GroupDraft], result: CycleResult) -> None:
    """What the drafts of a cycle tell of it."""
    result.failures += [failure for draft in drafts for failure in draft.failures]
    result.is_regular &= all(draft.is_regular for draft in drafts)
    result.caught_up = any(draft.caught_up for draft in drafts)
    result.cut_rows = {row for draft in drafts for row in draft.cut_rows.tolist()}
    result.behind_rows = {row for draft in drafts for row in draft.behind_rows.tolist()}
