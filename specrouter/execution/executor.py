"""Executor: runs one decoding cycle with the processors, over the committed tokens of all rows.

Contract: `run` drafts with each group's chain, verifies all groups' trees and the prefill chunks in
one pass of the target, commits what it chose, and rolls every model back to the committed tokens.
A drafter or intermediate that fails costs its group the speculation of this cycle, nothing else;
so does anything around it. A target that fails raises `TargetError`; nothing is committed then.
What fails for one row is told in `CycleResult.errors`, and other rows go on.

Not here: requests, stop conditions, which chain is used (`ChainRouter`, `ModelChainScheduler`); how
a chain drafts (`ChainDrafter`) and the target verifies (`TargetStage`); which models hold which
state (`ModelStates`).
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from processors import VerifyResult
from specrouter.cycle import (
    CyclePlan,
    CycleResult,
    Ints,
    ModelFailure,
    ShadowEvaluation,
    TargetError,
)
from specrouter.execution.acceptance_feedback import AcceptanceFeedback
from specrouter.execution.chain_drafter import ChainDrafter
from specrouter.execution.commit_stage import CommitStage
from specrouter.execution.group_draft import GroupDraft
from specrouter.execution.kv_hand_over import KVHandOver
from specrouter.execution.model_comparison import ModelComparison
from specrouter.execution.model_states import StageError, put_down_to
from specrouter.execution.runtime import Runtime
from specrouter.execution.shadow_evaluator import ShadowEvaluator
from specrouter.execution.target_stage import TargetStage
from specrouter.request.spec import RequestSpec
from statemgr import CacheUse, NoFreeBlocksError, TokenChain


class Executor:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._pool = runtime.pool
        self._target = runtime.pool.target
        self._manager = runtime.manager
        self.rows = runtime.manager.rows  # that requests may have
        self._decoding = runtime.rows
        self._faults = runtime.faults
        self._drafters = runtime.drafters
        self._opens = [drafter.open for drafter in runtime.drafters.values()]
        self._closes = [drafter.close for drafter in runtime.drafters.values()]
        self.states = runtime.states
        self._comparison = ModelComparison(runtime)
        self._feedback = AcceptanceFeedback(runtime, self._comparison)
        self._drafting = ChainDrafter(runtime, self._feedback, self._comparison)
        self._evaluator = ShadowEvaluator(runtime)
        self._stage = TargetStage(runtime)
        self._commits = CommitStage(runtime)
        self.prefixes = CachedPrefixes(runtime)
        fingerprint = runtime.settings.fingerprint
        self.hand_over = KVHandOver(self._pool, self._manager, fingerprint)

    @property
    def free_tokens(self) -> int | None:
        """KV slots that requests which begin may count on; None: without bound."""
        return self._manager.free_slots if self._manager.is_bounded else None

    def needed_tokens(self, committed: int, most: int) -> int:
        """What `free_tokens` falls by when a request begins with so many tokens of `most`."""
        return self._manager.slots_to_begin(committed, most)

    def held_tokens(self, row: int) -> int:
        """What `free_tokens` rises by when a row's request ends."""
        return self._manager.released_by(row)

    def allocate(self, request: RequestSpec) -> int | None:
        """A row for a request; None where there is no row or memory now."""
        use = CacheUse()
        with self._faults.part("prefixes"):
            asked = self.prefixes.use(request)
            assert isinstance(asked, CacheUse), f"{asked} says nothing"
            use = asked
        return self._manager.allocate(request.committed, request.total_tokens, use)

    def open(self, row: int, request: RequestSpec) -> None:
        """Prepares a row that the state manager has allocated for a request."""
        self._decoding.open(row, request, self._pool.get(self._target).device)

    def prepare(self, row: int, request: RequestSpec) -> None:
        """What only the speed of an open row depends on: keys and values that came with its
        request, and what drafters know of it."""
        opens = (*self._opens, self.hand_over.take)
        self._faults.each("prefixes", *(partial(each, row, request) for each in opens))

    def close(self, row: int, keep: bool = False) -> None:
        """`keep`: what the row's request has read is good for others."""
        forgets = self._comparison.forget, self._drafting.forget
        closes = (self._decoding.close, *forgets, *self._closes)
        self._faults.each("rows", *(partial(close, row) for close in closes))
        self._manager.free(row, keep)

    def lacking(self, plan: CyclePlan, order: Sequence[int]) -> Ints:
        """Takes the memory that a plan's rows need without drafts, those first that are first in
        `order`. Returns the rows that find none, though others gave back what their trees had."""
        manager, state = self._manager, self._manager.state(self._target)
        ends, reading, planned = manager.counts.copy(), plan.prefill_rows, set(plan.rows)
        unread = self.states.lag(self._target, reading)
        ends[reading] += plan.prefill_counts - unread - 1
        rows = np.array([row for row in order if row in planned], dtype=np.int64)
        claim = manager.grow if state is None else state.claim
        lacking = claim(rows, ends[rows])
        if len(lacking):
            manager.shrink()
            lacking = claim(rows, ends[rows])
        return lacking

    def run(self, plan: CyclePlan) -> CycleResult:
        """One cycle. Raises `TargetError`, after which nothing is committed."""
        with torch.inference_mode(), self.states.cycle():
            result = CycleResult()
            drafts, started_s = self._offered(plan, result), time.perf_counter()
            try:
                verified = self._stage.verify(plan, drafts, result)
            except StageError as stage:
                error = stage.failure.error
                reason = f"{self._target} failed: {type(error).__name__}: {error}"
                raise TargetError(reason, result.failures) from error
            if verified is not None:
                with self._faults.part("feedback"):
                    self._learn(verified, drafts, started_s)
                self._commits.commit(verified, drafts, result)
        self.states.forget_evicted()
        # Who drafts takes the memory that is left, and it is nobody's fault that there is none.
        result.failures = [
            one for one in result.failures if not isinstance(one.error, NoFreeBlocksError)
        ]
        return result

    # What views tell of the rows

    def unread(self, rows: Iterable[int]) -> dict[int, int]:
        """By row: tokens before its last one that the target has not read."""
        every = list(rows)
        left = self.states.lag(self._target, np.array(every, dtype=np.int64))
        return dict(zip(every, np.maximum(left, 0).tolist(), strict=True))

    def repeatable(self, rows: Ints) -> Ints:
        """[R] output tokens of each row whose choice could be made again."""
        return self._evaluator.repeatable(rows)

    def is_open(self, model: str) -> bool:
        """Whether a model could draft at once."""
        drafter = self._drafters.get(model)
        return self.states.is_open(model) if drafter is None else drafter.is_open

    def prepare_model(self, name: str) -> None:
        """Loads and times a drafter. Raises `StageError` where that fails."""
        with put_down_to(name):
            self._drafters[name].prepare()

    # A cycle

    def _offered(self, plan: CyclePlan, result: CycleResult) -> list[GroupDraft]:
        """Nothing where that fails."""
        with self._faults.part("drafting"):
            self._feed(result)
            if plan.shadow_evaluation is not None:
                self._evaluate(plan.shadow_evaluation, result)
            return self._drafting.offered(plan, result)
        result.is_regular = False
        return []

    def _feed(self, result: CycleResult) -> None:
        """Drafters hear of what the target has read and was committed since they last did."""
        state = self._manager.state(self._target)
        for rows, positions, hidden in () if state is None else state.hidden.take_committed():
            tokens = self._manager.tokens[rows, positions]
            for drafter in self._drafters.values():
                if drafter.hidden:
                    columns = [self.states.hidden.index(layer) for layer in drafter.hidden]
                    try:
                        drafter.feed(rows, tokens, positions, hidden[:, columns])
                    except Exception as error:
                        result.failures.append(ModelFailure(drafter.name, error))

    def _learn(
        self, verified: VerifyResult, drafts: Sequence[GroupDraft], started_s: float
    ) -> None:
        self._runtime.record_stage("verify", int((verified.places >= 0).sum()), started_s)
        self._comparison.keep_prompt_ends(verified)
        for draft in drafts:
            self._feedback.learn_from_target(draft, verified)

    def _evaluate(self, evaluation: ShadowEvaluation, result: CycleResult) -> None:
        result.is_regular = False  # it takes time beside the planned
        try:
            self._evaluator.run(evaluation)
        except StageError as stage:
            result.failures.append(stage.failure)
        except Exception as error:  # nothing was learned: it must not be tried all the time
            self._faults.note("evaluation", error)
            result.failures.append(ModelFailure(evaluation.model, error))


class CachedPrefixes:
    """What requests need not read, since others have read it, or read it now."""

    def __init__(self, runtime: Runtime) -> None:
        self._manager = runtime.manager
        self._target = runtime.pool.target
        self._is_on = runtime.settings.prefix_cache

    @property
    def are_kept(self) -> bool:
        """Whether anything is cached that nobody runs with."""
        return self._manager.cached_slots > 0

    def use(self, request: RequestSpec) -> CacheUse:
        """Who wants the log-probabilities of a prompt reads all of it."""
        params = request.params
        if not (self._is_on and params.prefix_cache):
            return CacheUse()
        return CacheUse(params.cache_salt or "", reads=params.prompt_logprobs is None)

    def cached(self, request: RequestSpec, text: TokenChain) -> dict[str, int]:
        """By model: tokens of a request that waits that it would not have to read."""
        return self._manager.cached(text, self.use(request))

    def inherited(self, row: int) -> int:
        """Tokens of a row that the target did not read for it."""
        return self._manager.inherited(row, self._target)

    def follow(self) -> list[int]:
        """Rows take over what others have read since. Returns those that did."""
        return self._manager.follow()

    def waits(self, left: Mapping[int, int]) -> dict[int, int]:
        """By row: another one that is to read, by itself, at least half of what the row has left.

        `left`: by row, tokens before its last one that the target has not read.
        """
        found = {}
        for row, (leader, expected) in self._manager.leaders().items():
            unread = left.get(row, 0)
            gain = expected - (int(self._manager.counts[row]) - 1 - unread)
            if left.get(leader, 0) and unread and 2 * gain >= unread:
                found[row] = leader
        return found
