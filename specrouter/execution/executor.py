"""Executor: runs one decoding cycle with the processors, over the committed tokens of all rows.

Contract: `run` drafts with each group's chain, verifies all groups' trees and the prefill chunks in
one pass of the target, commits what it chose, and rolls every model back to the committed tokens.
A drafter or intermediate that fails costs its group the speculation of this cycle, nothing else.
A target that fails raises `TargetError`; nothing is committed then.

Not here: requests, stop conditions, which chain is used (`ChainRouter`, `ModelChainScheduler`); how
a chain drafts (`ChainDrafter`); which models hold which state (`ModelStates`).
"""

import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from modelpool import ModelPool
from processors import TokenTree, Verdict, VerifyProcessor, join
from processors.grammar import GrammarError
from processors.pack import lag
from processors.token_tree import ROOT
from processors.verify import rejection_purpose
from specrouter.cycle import Commit, CyclePlan, CycleResult, ShadowEvaluation, TargetError
from specrouter.execution.chain_drafter import ChainDrafter
from specrouter.execution.decoding_rows import DecodingRows
from specrouter.execution.forward_clock import ForwardClock
from specrouter.execution.group_draft import GroupDraft, leave_selected
from specrouter.execution.hang_guard import Abandoned, HangGuard
from specrouter.execution.lessons import PROMPT_POSITIONS, Teacher
from specrouter.execution.logprobs import AskedLogprobs, token_logprobs
from specrouter.execution.model_states import ModelStates, StageError
from specrouter.execution.shadow_evaluator import ShadowEvaluator
from specrouter.profile.model_times import ModelTimes
from specrouter.profile.profiler import PerformanceProfiler
from specrouter.request.output import TokenLogprobs
from specrouter.request.params import Chain
from specrouter.request.spec import RequestSpec
from statemgr import ModelState, StateManager

Ints = NDArray[np.int64]


class Executor:
    """See the module. `states`: of the models that have run here.

    Args:
        window: the most output positions of a row that a cycle may look at.
        rejection: verify by Leviathan's rule instead of the shared noise.
        guard: told of every forward of a model other than the target.
    """

    def __init__(
        self,
        pool: ModelPool,
        manager: StateManager,
        profiler: PerformanceProfiler,
        prefill_chunk: int,
        window: int,
        rejection: bool = False,
        guard: HangGuard | None = None,
    ) -> None:
        self._pool = pool
        self._target = pool.target
        self._manager = manager
        self._profiler = profiler
        self._rejection = rejection
        self._clock = ForwardClock(profiler.record_forward)
        self._rows = DecodingRows(manager, pool.vocab_size, pool.eos_token_ids, window)
        self._teacher = Teacher(pool, manager, self._rows.ngrams, profiler)
        self._verify = VerifyProcessor()
        self.states = ModelStates(pool, manager, ModelTimes(pool, profiler), self._clock, guard)
        self._drafter = ChainDrafter(
            pool,
            manager,
            self.states,
            self._rows,
            self._teacher,
            profiler,
            self._clock,
            prefill_chunk,
            rejection,
        )

        self._evaluator = ShadowEvaluator(
            pool,
            manager,
            self.states,
            self._rows,
            profiler,
            self._clock,
            prefill_chunk,
            rejection,
        )

    def open(self, row: int, request: RequestSpec) -> None:
        """Prepares a row that the state manager has allocated for a request."""
        purpose = rejection_purpose(1) if self._rejection else 0
        self._rows.open(row, request, (self._pool.get(self._target).device, purpose))

    def close(self, row: int) -> None:
        self._rows.close(row)
        self._teacher.forget(row)
        self._manager.free(row)

    @torch.inference_mode()
    def run(self, plan: CyclePlan) -> CycleResult:
        """One cycle. Raises `TargetError`, after which nothing is committed."""
        self.states.begin()
        try:
            result = self._cycle(plan)
        except Abandoned:  # another thread has settled it
            raise
        except BaseException:
            self.states.settle()
            raise
        self.states.settle()
        return result

    # What a planner asks of the rows

    def lags(self, rows: Ints) -> dict[str, float]:
        return self.states.lags(rows)

    def slots_read(self, rows: Ints) -> int:
        return self.states.slots_read(rows)

    def slots_of(self, rows: Ints) -> Ints:
        return self.states.slots_of(rows)

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

    def _cycle(self, plan: CyclePlan) -> CycleResult:
        result = CycleResult()
        if plan.shadow_evaluation is not None:
            self._evaluate(plan.shadow_evaluation, result)
        self._drafter.begin(plan.groups)
        drafts = [self._drafter.draft(group) for group in plan.groups]
        result.failures += [failure for draft in drafts for failure in draft.failures]
        result.is_regular &= all(draft.is_regular for draft in drafts)
        result.caught_up = any(draft.caught_up for draft in drafts)
        result.cut_rows = {row for draft in drafts for row in draft.cut_rows.tolist()}
        result.behind_rows = {row for draft in drafts for row in draft.behind_rows.tolist()}
        selector = None if self._rejection else plan.selector
        leave_selected(drafts, selector, self._teacher.worth)
        if not plan.groups and not len(plan.prefill_rows):
            return result
        try:
            verdict = self._verify_with_target(plan, drafts)
        except StageError as stage:
            error = stage.failure.error
            reason = f"{self._target} failed: {type(error).__name__}: {error}"
            raise TargetError(reason, result.failures) from error
        for draft in drafts:
            self._teacher.learn_from_target(draft, verdict)
        self._commit(verdict, drafts, result)
        return result

    def _evaluate(self, evaluation: ShadowEvaluation, result: CycleResult) -> None:
        result.is_regular = False  # it takes time beside the planned
        try:
            self._evaluator.run(evaluation)
        except StageError as stage:
            result.failures.append(stage.failure)

    def _verify_with_target(self, plan: CyclePlan, drafts: Sequence[GroupDraft]) -> Verdict:
        """Raises `StageError` where the target fails."""
        proposals = [draft.proposal for draft in drafts if draft.proposal is not None]
        proposed = [proposal.tree.rows for proposal in proposals]
        rows = np.concatenate([plan.prefill_rows[:0], *(group.rows for group in plan.groups)])
        others = np.setdiff1d(rows, np.concatenate([plan.prefill_rows[:0], *proposed]))
        tree = join([*(proposal.tree for proposal in proposals), TokenTree.empty(others)])
        positions = self._rows.output_positions(tree.rows)
        prefill = (plan.prefill_rows, plan.prefill_counts)
        sampler = self._rows.sampler
        sampler.take_errors()  # those of drafters concern their proposals only
        with self.states.stage(self._target, tree.rows) as (model, state):
            started = time.perf_counter()
            self._clock.take_ms()
            arguments = (model, state, self._manager, sampler, tree, positions)
            earlier = self._earlier(state, tree.rows), self._whole_chunks(*prefill)
            if self._rejection:
                level = max(len(group.chain) for group in plan.groups) - 1 if plan.groups else 1
                verdict = self._verify.verify_by_rejection(
                    *arguments, proposals, max(1, level), prefill, *earlier
                )
            else:
                verdict = self._verify.verify(*arguments, prefill, *earlier)
                self._teacher.keep_prompt_ends(verdict)
            for row, logits in verdict.earlier.items():
                self._rows.prompt_logprobs.note(row, logits)
            places = int((verdict.places >= 0).sum())
            self._profiler.record_stage("verify", places, self._clock.own_ms(started))
            self.states.touch(state, tree.rows, verdict.fed)
            if verdict.poisoned.any():
                state.scrub(verdict.fed.flat_slots[verdict.poisoned])
        return verdict

    def _earlier(self, state: ModelState, rows: Ints) -> Ints:
        """[B] places before the roots whose logits are of use: a prompt's end, which drafters will
        be compared with when they read it, or all of it."""
        behind = lag(state, self._manager, rows)
        wanted = 0 if self._rejection else PROMPT_POSITIONS
        asked = self._rows.prompt_logprobs.asked(rows)
        return np.where(asked, behind, np.minimum(behind, wanted))

    def _whole_chunks(self, rows: Ints, counts: Ints) -> Ints:
        """[P] the same within chunks of prompts."""
        return np.where(self._rows.prompt_logprobs.asked(rows), counts, 0)

    def _commit(self, verdict: Verdict, drafts: Sequence[GroupDraft], result: CycleResult) -> None:
        chains: dict[int, Chain] = {}
        for draft in drafts:
            chains.update(dict.fromkeys(draft.group.rows.tolist(), (self._target,)))
            chains.update(dict.fromkeys(draft.rows.tolist(), (*draft.used, self._target)))
        paths = self._sound_paths(verdict, result)
        logprobs = self._logprobs(verdict, paths)
        for index, path in paths.items():
            row = int(verdict.tree.rows[index])
            self._rows.extend(row, path)
            of_prompt = self._rows.prompt_logprobs.take(row)
            drafted = int(verdict.tree.sizes[index])
            result.commits.append(
                Commit(row, path.tolist(), chains[row], logprobs.get(index), of_prompt, drafted)
            )

    def _sound_paths(self, verdict: Verdict, result: CycleResult) -> dict[int, Ints]:
        """By index: what each row gains, as far as tokens could be chosen."""
        paths = {}
        remaining = self._rows.remaining(verdict.tree.rows)
        failed = self._rows.sampler.take_errors()
        for index, row in enumerate(verdict.tree.rows.tolist()):
            path = verdict.path(index)
            if not verdict.sound[index]:  # what comes before is good, and may end the text
                result.errors[row] = self._reason(row, failed, verdict.broken[index].any())
                path = path[: verdict.sound_length(index)]
            assert len(path) <= remaining[index], "a tree was deeper than the request may go"
            if len(path):
                paths[index] = path
        return paths

    def _reason(self, row: int, failed: Mapping[int, Exception], is_broken: bool) -> str:
        """Why no token could be chosen for a row."""
        if row in failed:
            error = failed[row]
            if isinstance(error, GrammarError):
                return f"the structure cannot go on: {error}"
            return f"a logits processor failed: {type(error).__name__}: {error}"
        if is_broken:
            return f"{self._target} gave logits that are not numbers"
        return "the sampling parameters leave no token to choose"

    def _logprobs(
        self, verdict: Verdict, paths: Mapping[int, Ints]
    ) -> dict[int, list[TokenLogprobs]]:
        """By index: of the paths' tokens, where the request asked for them."""
        asked = {}
        for index, path in paths.items():
            count = self._rows.logprobs(int(verdict.tree.rows[index]))
            if count is not None:
                after = np.append(ROOT, verdict.walk(index))[: len(path)]
                asked[index] = AskedLogprobs(verdict.places[index, after + 1], path, count)
        if not asked:
            return {}
        found = token_logprobs(verdict.logits, list(asked.values()))
        return dict(zip(asked, found, strict=True))
