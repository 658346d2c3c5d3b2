"""The executor, which runs the plan of a decoding cycle on the committed tokens of all rows.

Contract: `run` drafts with each group's chain, verifies all groups' trees and the prefill chunks in
one pass of the target, commits what it chose, and rolls every model back to the committed tokens.
If a drafter or intermediate fails, or the code around it, the group decodes this cycle without its
draft. If the target fails, `TargetError` is raised and nothing is committed. A failure for one row
is noted in `CycleResult.errors`, and does not affect other rows.

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
        self.rows = runtime.manager.rows  # number of rows
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
        """KV slots that new requests can have; None if every row has room for the longest."""
        return self._manager.free_slots if self._manager.is_bounded else None

    def needed_tokens(self, committed: int, most: int) -> int:
        """Return the KV slots that a request with `committed` tokens, of `most`, needs to begin."""
        return self._manager.slots_to_begin(committed, most)

    def held_tokens(self, row: int) -> int:
        """Return the KV slots that are free for others when a row's request ends."""
        return self._manager.released_by(row)

    def allocate(self, request: RequestSpec) -> int | None:
        """Return a row for a request, or None if no row or not enough memory is free now."""
        use = CacheUse()
        with self._faults.part("prefixes"):
            asked = self.prefixes.use(request)
            assert isinstance(asked, CacheUse), f"{asked} says nothing"
            use = asked
        return self._manager.allocate(request.committed, request.total_tokens, use)

    def open(self, row: int, request: RequestSpec) -> None:
        """Prepare a row that the state manager has allocated for a request."""
        self._decoding.open(row, request, self._pool.get(self._target).device)

    def prepare(self, row: int, request: RequestSpec) -> None:
        """Open a row in the drafters, and import the keys and values that came with its request.

        A failure here affects only speed.
        """
        opens = (*self._opens, self.hand_over.take)
        self._faults.each("prefixes", *(partial(each, row, request) for each in opens))

    def close(self, row: int, keep: bool = False) -> None:
        """Free a row; `keep`: other requests may use the tokens that it has read."""
        forgets = self._comparison.forget, self._drafting.forget
        closes = (self._decoding.close, *forgets, *self._closes)
        self._faults.each("rows", *(partial(close, row) for close in closes))
        self._manager.free(row, keep)

    def lacking(self, plan: CyclePlan, order: Sequence[int]) -> Ints:
        """Take the memory that a plan's rows need without drafts, in `order`.

        If it is short, rows first give back blocks without committed tokens. Returns the rows that
        still lack memory.
        """
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
        """Run one cycle; raise `TargetError`, with nothing committed, if the target fails."""
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
        # Drafts use the memory that is left; a lack of it is no failure of the model.
        result.failures = [
            one for one in result.failures if not isinstance(one.error, NoFreeBlocksError)
        ]
        return result

    # For views

    def unread(self, rows: Iterable[int]) -> dict[int, int]:
        """Return, by row, the tokens before its last one that the target has not read."""
        every = list(rows)
        left = self.states.lag(self._target, np.array(every, dtype=np.int64))
        return dict(zip(every, np.maximum(left, 0).tolist(), strict=True))

    def repeatable(self, rows: Ints) -> Ints:
        """Return [R]: the output tokens of each row whose choice can be repeated."""
        return self._evaluator.repeatable(rows)

    def is_open(self, model: str) -> bool:
        """Return whether a model can draft at once."""
        drafter = self._drafters.get(model)
        return self.states.is_open(model) if drafter is None else drafter.is_open

    def prepare_model(self, name: str) -> None:
        """Load and time a drafter; raise `StageError` if that fails."""
        with put_down_to(name):
            self._drafters[name].prepare()

    # A cycle

    def _offered(self, plan: CyclePlan, result: CycleResult) -> list[GroupDraft]:
        """Return the drafts of all groups, or none if drafting fails as a whole."""
        with self._faults.part("drafting"):
            self._feed(result)
            if plan.shadow_evaluation is not None:
                self._evaluate(plan.shadow_evaluation, result)
            return self._drafting.offered(plan, result)
        result.is_regular = False
        return []

    def _feed(self, result: CycleResult) -> None:
        """Feed drafters the target's hidden states of tokens committed since the last call."""
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
        result.is_regular = False  # it takes additional time
        try:
            self._evaluator.run(evaluation)
        except StageError as stage:
            result.failures.append(stage.failure)
        except Exception as error:  # noted as a failure, so that it is not repeated at once
            self._faults.note("evaluation", error)
            result.failures.append(ModelFailure(evaluation.model, error))


class CachedPrefixes:
    """Tokens that requests need not read, because other rows have read them, or do so now."""

    def __init__(self, runtime: Runtime) -> None:
        self._manager = runtime.manager
        self._target = runtime.pool.target
        self._is_on = runtime.settings.prefix_cache

    @property
    def are_kept(self) -> bool:
        """True if any cached prefix is in use by no row."""
        return self._manager.cached_slots > 0

    def use(self, request: RequestSpec) -> CacheUse:
        """Return the use of the cache by a request: no prefix if it asks for prompt logprobs."""
        params = request.params
        if not (self._is_on and params.prefix_cache):
            return CacheUse()
        return CacheUse(params.cache_salt or "", reads=params.prompt_logprobs is None)

    def cached(self, request: RequestSpec, text: TokenChain) -> dict[str, int]:
        """Return, by model, the cached tokens of a waiting request."""
        return self._manager.cached(text, self.use(request))

    def inherited(self, row: int) -> int:
        """Return the tokens of a row that the target did not have to read."""
        return self._manager.inherited(row, self._target)

    def follow(self) -> list[int]:
        """Let rows take over what others have read of a shared prompt; return rows that did."""
        return self._manager.follow()

    def waits(self, left: Mapping[int, int]) -> dict[int, int]:
        """Return, for each row that should wait, the row that reads half or more of what it lacks.

        `left`: by row, tokens before its last one that the target has not read.
        """
        found = {}
        for row, (leader, expected) in self._manager.leaders().items():
            unread = left.get(row, 0)
            gain = expected - (int(self._manager.counts[row]) - 1 - unread)
            if left.get(leader, 0) and unread and 2 * gain >= unread:
                found[row] = leader
        return found
