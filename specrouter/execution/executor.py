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
from processors.grammar import GrammarError
from processors.token_tree import ROOT
from specrouter.cycle import Commit, CyclePlan, CycleResult, ShadowEvaluation, TargetError
from specrouter.execution.acceptance_feedback import AcceptanceFeedback
from specrouter.execution.chain_drafter import ChainDrafter
from specrouter.execution.group_draft import GroupDraft, leave_selected
from specrouter.execution.logprobs import AskedLogprobs, token_logprobs
from specrouter.execution.model_comparison import ModelComparison
from specrouter.execution.model_states import StageError
from specrouter.execution.runtime import Runtime
from specrouter.execution.shadow_evaluator import ShadowEvaluator
from specrouter.request.output import STRUCTURE_FAILED, TokenLogprobs
from specrouter.request.params import Chain
from specrouter.request.spec import RequestSpec

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
        self.states = runtime.states
        self._comparison = ModelComparison(runtime)
        self._feedback = AcceptanceFeedback(runtime, self._comparison)
        self._drafter = ChainDrafter(runtime, self._feedback, self._comparison)
        self._evaluator = ShadowEvaluator(runtime)
        self._verify = VerifyProcessor(runtime.sampler, runtime.rule)

    def open(self, row: int, request: RequestSpec) -> None:
        """Prepares a row that the state manager has allocated for a request."""
        purpose = self._rule.noise_purpose(1)
        self._rows.open(row, request, (self._pool.get(self._target).device, purpose))

    def close(self, row: int) -> None:
        self._rows.close(row)
        self._comparison.forget(row)
        self._manager.free(row)

    def run(self, plan: CyclePlan) -> CycleResult:
        """One cycle. Raises `TargetError`, after which nothing is committed."""
        with torch.inference_mode(), self.states.cycle():
            result = CycleResult()
            if plan.shadow_evaluation is not None:
                self._evaluate(plan.shadow_evaluation, result)
            self._drafter.begin(plan.groups)
            drafts = [self._drafter.draft(group) for group in plan.groups]
            _note(drafts, result)
            selector = None if self._rule.verifies_whole_drafts else plan.selector
            leave_selected(drafts, selector, self._feedback.accept_prob)
            if not plan.groups and not len(plan.prefill_rows):
                return result
            try:
                verified = self._verify_with_target(plan, drafts)
            except StageError as stage:
                error = stage.failure.error
                reason = f"{self._target} failed: {type(error).__name__}: {error}"
                raise TargetError(reason, result.failures) from error
            for draft in drafts:
                self._feedback.learn_from_target(draft, verified)
            self._commit(verified, drafts, result)
            return result

    # What views tell of the rows

    def slots_of(self, rows: Ints) -> Ints:
        return self.states.slots_of(rows)

    def slots_for(self, tokens: int) -> int:
        """Of a row with so many tokens."""
        return self.states.slots_for(tokens)

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

    def _verify_with_target(self, plan: CyclePlan, drafts: Sequence[GroupDraft]) -> VerifyResult:
        """Raises `StageError` where the target fails."""
        results = [draft.result for draft in drafts if draft.result is not None]
        drafted = [result.tree.rows for result in results]
        rows = np.concatenate([plan.prefill_rows[:0], *(group.rows for group in plan.groups)])
        undrafted = np.setdiff1d(rows, np.concatenate([plan.prefill_rows[:0], *drafted]))
        tree = join([*(result.tree for result in results), TokenTree.empty(undrafted)])
        runtime = self._runtime
        runtime.sampler.take_errors()  # those of drafters concern their drafts only
        with self.states.stage(self._target, tree.rows) as active:
            started = time.perf_counter()
            runtime.clock.take_ms()
            verified = self._verify.verify(active, self._request(active, plan, tree, results))
            self._comparison.keep_prompt_ends(verified)
            for row, logits in verified.earlier.items():
                self._rows.prompt_logprobs.note(row, logits)
            places = int((verified.places >= 0).sum())
            runtime.profiler.record_stage("verify", places, runtime.clock.own_ms(started))
            self.states.touch(active.state, tree.rows, verified.fed)
            if verified.poisoned.any():
                active.state.scrub(verified.fed.flat_slots[verified.poisoned])
        return verified

    def _request(
        self,
        active: ActiveModel,
        plan: CyclePlan,
        tree: TokenTree,
        drafts: Sequence[DraftResult],
    ) -> VerifyRequest:
        rows, counts = plan.prefill_rows, plan.prefill_counts
        level = max((len(group.chain) - 1 for group in plan.groups), default=1)
        return VerifyRequest(
            tree,
            self._rows.output_positions(tree.rows),
            drafts,
            max(1, level),
            earlier=self._earlier(active, tree.rows),
            chunks=PrefillChunks(rows, counts, self._whole_chunks(rows, counts)),
        )

    def _earlier(self, active: ActiveModel, rows: Ints) -> Ints:
        """[B] places before the roots whose logits are of use: a prompt's end, which drafters will
        be compared with when they read it, or all of it."""
        behind = active.lag(rows)
        asked = self._rows.prompt_logprobs.asked(rows)
        return np.where(asked, behind, np.minimum(behind, self._comparison.prompt_positions))

    def _whole_chunks(self, rows: Ints, counts: Ints) -> Ints:
        """[P] the same within chunks of prompts."""
        return np.where(self._rows.prompt_logprobs.asked(rows), counts, 0)

    def _commit(
        self, verified: VerifyResult, drafts: Sequence[GroupDraft], result: CycleResult
    ) -> None:
        chains: dict[int, Chain] = {}
        for draft in drafts:
            chains.update(dict.fromkeys(draft.group.rows.tolist(), (self._target,)))
            chains.update(dict.fromkeys(draft.rows.tolist(), (*draft.used, self._target)))
        paths = self._sound_paths(verified, result)
        logprobs = self._logprobs(verified, paths)
        for index, path in paths.items():
            row = int(verified.tree.rows[index])
            self._rows.extend(row, path)
            of_prompt = self._rows.prompt_logprobs.take(row)
            drafted = int(verified.tree.sizes[index])
            result.commits.append(
                Commit(row, path.tolist(), chains[row], logprobs.get(index), of_prompt, drafted)
            )

    def _sound_paths(self, verified: VerifyResult, result: CycleResult) -> dict[int, Ints]:
        """By index: what each row gains, as far as tokens could be chosen."""
        paths = {}
        remaining = self._rows.remaining(verified.tree.rows)
        failed = self._rows.sampler.take_errors()
        for index, row in enumerate(verified.tree.rows.tolist()):
            path = verified.path(index)
            if not verified.sound[index]:  # what comes before is good, and may end the text
                result.errors[row] = self._reason(row, failed, verified.broken[index].any())
                path = path[: verified.sound_length(index)]
            assert len(path) <= remaining[index], "a tree was deeper than the request may go"
            if len(path):
                paths[index] = path
        return paths

    def _reason(self, row: int, failed: Mapping[int, Exception], is_broken: bool) -> str:
        """Why no token could be chosen for a row."""
        if row in failed:
            error = failed[row]
            if isinstance(error, GrammarError):
                return f"{STRUCTURE_FAILED}: {error}"
            return f"a logits processor failed: {type(error).__name__}: {error}"
        if is_broken:
            return f"{self._target} gave logits that are not numbers"
        return "the sampling parameters leave no token to choose"

    def _logprobs(
        self, verified: VerifyResult, paths: Mapping[int, Ints]
    ) -> dict[int, list[TokenLogprobs]]:
        """By index: of the paths' tokens, where the request asked for them."""
        asked = {}
        for index, path in paths.items():
            count = self._rows.logprobs(int(verified.tree.rows[index]))
            if count is not None:
                after = np.append(ROOT, verified.walk(index))[: len(path)]
                asked[index] = AskedLogprobs(verified.places[index, after + 1], path, count)
        if not asked:
            return {}
        found = token_logprobs(verified.logits, list(asked.values()))
        return dict(zip(asked, found, strict=True))


def _note(drafts: Sequence[GroupDraft], result: CycleResult) -> None:
    """What the drafts of a cycle tell of it."""
    result.failures += [failure for draft in drafts for failure in draft.failures]
    result.is_regular &= all(draft.is_regular for draft in drafts)
    result.caught_up = any(draft.caught_up for draft in drafts)
    result.cut_rows = {row for draft in drafts for row in draft.cut_rows.tolist()}
    result.behind_rows = {row for draft in drafts for row in draft.behind_rows.tolist()}
