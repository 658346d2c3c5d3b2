"""Executor: runs one decoding cycle with the processors. The only part of this package that
touches tensors.

Contract: `run` drafts with each group's chain, verifies all groups' trees and the prefill chunks in
one pass of the target, commits what it chose, and rolls every model back to the committed tokens.
A drafter or intermediate that fails costs its group the speculation of this cycle, nothing else.
A target that fails raises `TargetError`; nothing is committed then.

Not here: requests, stop conditions, which chain is used (`ChainRouter`, `ModelChainScheduler`).
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelpool import ModelPool
from modelpool.packed_model import PackedModel
from processors import (
    DraftProcessor,
    DraftResult,
    PrefillProcessor,
    RollbackProcessor,
    Sampler,
    SamplingSettings,
    TokenTree,
    VerifyProcessor,
    VerifyResult,
    join,
)
from processors.pack import lag
from specrouter.profiler import PerformanceProfiler
from specrouter.scheduler import Chain
from statemgr import ModelState, StateManager

logger = logging.getLogger(__name__)

Ints = NDArray[np.int64]

_CATCH_UP_TOKENS = 8  # a drafter that lags by more catches up in chunks of its own first
_SIMILARITY_NODES = 4  # of a verified tree, whose distributions are compared


class TargetError(RuntimeError):
    """The target failed; the requests that were in its pack cannot go on.

    `failures`: of other models, before it in the same cycle.
    """

    def __init__(self, reason: str, failures: "Sequence[ModelFailure]") -> None:
        super().__init__(reason)
        self.failures = tuple(failures)


@dataclass(frozen=True, eq=False)
class ChainGroup:
    """Requests that decode through one chain."""

    chain: Chain
    depth: int
    rows: Ints  # ascending
    hard_rejection: bool = False


@dataclass(frozen=True, eq=False)
class CyclePlan:
    groups: Sequence[ChainGroup]
    prefill_rows: Ints  # ascending, none of them in a group
    prefill_counts: Ints  # tokens of each chunk; all end before the last committed token


@dataclass(frozen=True, eq=False)
class Commit:
    """What a row gained in a cycle."""

    row: int
    tokens: list[int]
    chain: Chain  # as it was used, shorter than planned after a failure


@dataclass(frozen=True)
class ModelFailure:
    model: str
    error: Exception


@dataclass
class CycleResult:
    commits: list[Commit] = field(default_factory=list)
    failures: list[ModelFailure] = field(default_factory=list)


@dataclass(frozen=True)
class _RowFacts:
    prompt_tokens: int
    max_new_tokens: int


class _StageError(Exception):
    def __init__(self, model: str, error: Exception) -> None:
        super().__init__(model)
        self.failure = ModelFailure(model, error)


class Executor:
    def __init__(
        self,
        pool: ModelPool,
        manager: StateManager,
        profiler: PerformanceProfiler,
        prefill_chunk: int,
        window: int,
    ) -> None:
        """Args: `window`: the most output positions of a row that a cycle may look at."""
        self._pool = pool
        self._manager = manager
        self._profiler = profiler
        self._sampler = Sampler(pool.vocab_size, window)
        self._prefill = PrefillProcessor(prefill_chunk)
        self._draft = DraftProcessor()
        self._verify = VerifyProcessor()
        self._rollback = RollbackProcessor()
        self._rows: dict[int, _RowFacts] = {}
        self._loaded: dict[str, PackedModel] = {}  # the models that the states belong to

    def open(
        self, row: int, prompt_tokens: int, max_new_tokens: int, settings: SamplingSettings
    ) -> None:
        self._rows[row] = _RowFacts(prompt_tokens, max_new_tokens)
        self._sampler.open(row, settings)

    def close(self, row: int) -> None:
        del self._rows[row]
        self._sampler.close(row)
        self._manager.free(row)

    def target_lag(self, rows: Ints) -> Ints:
        """Committed tokens that the target has not read, the last one not counted, [R]."""
        state = self._manager.state(self._pool.target)
        return self._manager.counts[rows] - 1 if state is None else lag(state, self._manager, rows)

    @torch.inference_mode()
    def run(self, plan: CyclePlan) -> CycleResult:
        result = CycleResult()
        trees: list[TokenTree] = []
        chains: dict[int, Chain] = {}
        levels: list[_Level] = []
        for group in plan.groups:
            tree, level = self._speculate(group, result)
            trees.append(tree)
            chains.update(dict.fromkeys(group.rows.tolist(), group.chain[-1:]))
            if level is not None:
                levels.append(level)
                chains.update(dict.fromkeys(level.tree.rows.tolist(), group.chain))
        verified = self._verify_with_target(trees, plan, result)
        if verified is not None:
            for level in levels:
                self._compare(level, self._pool.target, verified)
            self._commit(verified, chains, result)
        self._roll_back(plan)
        return result

    def _speculate(
        self, group: ChainGroup, result: CycleResult
    ) -> "tuple[TokenTree, _Level | None]":
        """The tree that a group offers the target; none after a failure."""
        limits = self._remaining(group.rows) - 1
        drafting = limits > 0  # a row's last token is the target's own
        if len(group.chain) == 1 or not drafting.any():
            return TokenTree.empty(group.rows), None
        try:
            level = self._run_chain(group, group.rows[drafting], limits[drafting])
            return join([level.tree, TokenTree.empty(group.rows[~drafting])]), level
        except _StageError as stage:
            result.failures.append(stage.failure)
            return TokenTree.empty(group.rows), None

    def _run_chain(self, group: ChainGroup, rows: Ints, limits: Ints) -> "_Level":
        """The last level before the target; `limits` [B] nodes may be drafted at most."""
        positions = self._output_positions(rows)
        drafter, sizes = group.chain[0], np.minimum(group.depth, limits)
        with self._stage(drafter) as (model, state):
            self._prefill.catch_up(model, state, self._manager, rows, _CATCH_UP_TOKENS)
            started = time.perf_counter()
            drafted = self._draft.draft(
                model, state, self._manager, self._sampler, rows, positions, sizes
            )
            elapsed_ms = (time.perf_counter() - started) * 1000
            self._profiler.record_time(drafter, len(rows), elapsed_ms / int(sizes.max()))
        tree = drafted.tree
        level = _Level(drafter, tree, drafted=drafted)
        for name in group.chain[1:-1]:
            with self._stage(name) as (model, state):
                self._prefill.catch_up(model, state, self._manager, rows, _CATCH_UP_TOKENS)
                started = time.perf_counter()
                verified = self._verify.verify(
                    model, state, self._manager, self._sampler, tree, positions
                )
                elapsed_ms = (time.perf_counter() - started) * 1000
            self._profiler.record_time(name, verified.pack_tokens, elapsed_ms)
            self._compare(level, name, verified)
            tree = verified.next_tree(group.hard_rejection).capped(limits)
            level = _Level(name, tree, verified=verified)
        return level

    def _verify_with_target(
        self, trees: Sequence[TokenTree], plan: CyclePlan, result: CycleResult
    ) -> VerifyResult | None:
        if not trees and not len(plan.prefill_rows):
            return None
        tree = join(trees) if trees else TokenTree.empty(plan.prefill_rows[:0])
        name = self._pool.target
        try:
            with self._stage(name) as (model, state):
                started = time.perf_counter()
                verified = self._verify.verify(
                    model,
                    state,
                    self._manager,
                    self._sampler,
                    tree,
                    self._output_positions(tree.rows),
                    (plan.prefill_rows, plan.prefill_counts),
                )
                elapsed_ms = (time.perf_counter() - started) * 1000
        except _StageError as stage:
            self._roll_back(plan)
            error = stage.failure.error
            reason = f"{name} failed: {type(error).__name__}: {error}"
            raise TargetError(reason, result.failures) from error
        self._profiler.record_time(name, verified.pack_tokens, elapsed_ms)
        return verified

    def _compare(self, level: "_Level", verifier: str, verified: VerifyResult) -> None:
        """Learns from one verification: who proposed, and how the verifier judged it."""
        level.learn_tokens(verified, self._manager)
        pair = (level.model, verifier)
        index = np.searchsorted(verified.rows, level.tree.rows)
        accepted, offered = verified.accepted[index], verified.sizes[index]
        rejected = int((accepted < offered).sum())
        self._profiler.record_acceptance(pair, int(accepted.sum()), rejected)
        nodes = [
            (row, depth)
            for row in range(min(len(index), _SIMILARITY_NODES))
            for depth in range(min(int(accepted[row]) + 1, int(offered[row]), _SIMILARITY_NODES))
        ][:_SIMILARITY_NODES]
        if not nodes:
            return
        starts = np.cumsum(verified.sizes + 1) - (verified.sizes + 1)
        theirs = torch.stack([verified.logits[int(starts[index[r]]) + d] for r, d in nodes])
        ours = torch.stack([level.logits(row, depth) for row, depth in nodes])
        self._profiler.record_similarity(pair, total_variation(ours.to(theirs.device), theirs))

    def _commit(
        self, verified: VerifyResult, chains: dict[int, Chain], result: CycleResult
    ) -> None:
        remaining = self._remaining(verified.rows)
        for index, row in enumerate(verified.rows.tolist()):
            path = verified.path(index)
            assert len(path) <= remaining[index], "a tree was deeper than the request may go"
            self._manager.extend(row, path)
            result.commits.append(Commit(row, path.tolist(), chains[row]))

    def _roll_back(self, plan: CyclePlan) -> None:
        """Every model that took part, to the committed tokens."""
        for group in plan.groups:
            for name in group.chain[:-1]:
                self._roll_back_model(name, group.rows)
        rows = [group.rows for group in plan.groups]
        if rows:
            self._roll_back_model(self._pool.target, np.sort(np.concatenate(rows)))

    def _roll_back_model(self, name: str, rows: Ints) -> None:
        state = self._manager.state(name)
        if state is not None:
            self._rollback.rollback(state, self._manager, rows)

    def _output_positions(self, rows: Ints) -> Ints:
        prompts = [self._rows[row].prompt_tokens for row in rows.tolist()]
        return self._manager.counts[rows] - np.array(prompts, dtype=np.int64)

    def _remaining(self, rows: Ints) -> Ints:
        """Tokens that each row may still commit, [R]."""
        limits = [self._rows[row].max_new_tokens for row in rows.tolist()]
        return np.array(limits, dtype=np.int64) - self._output_positions(rows)

    @contextmanager
    def _stage(self, name: str) -> Iterator[tuple[PackedModel, ModelState]]:
        """A model in use, with its state; what goes wrong meanwhile is put down to it."""
        try:
            model = self._pool.acquire(name)
            try:
                yield model, self._state(name, model)
            finally:
                self._pool.release(name)
        except Exception as error:
            raise _StageError(name, error) from error

    def _state(self, name: str, model: PackedModel) -> ModelState:
        if self._loaded.get(name) is not model:  # evicted and loaded again, maybe elsewhere
            self._manager.drop_state(name)
            self._loaded[name] = model
        return self._manager.open_state(name, model.kv_layers, canonical=name == self._pool.target)

    def forget_evicted(self) -> None:
        """Frees the caches of models that the pool no longer holds."""
        for name in [name for name in self._loaded if not self._pool.is_loaded(name)]:
            del self._loaded[name]
            self._manager.drop_state(name)


@dataclass(frozen=True, eq=False)
class _Level:
    """A tree on its way up: who proposed it, and from which logits."""

    model: str
    tree: TokenTree
    drafted: DraftResult | None = None
    verified: VerifyResult | None = None

    def logits(self, row: int, depth: int) -> Tensor:
        """[V], from which the tree's node at `depth` of its `row`-th row was chosen."""
        if self.drafted is not None:
            return self.drafted.logits[depth][int(self.drafted.places[depth][row])]
        assert self.verified is not None
        start = int((self.verified.sizes[:row] + 1).sum())
        return self.verified.logits[start + depth]

    def learn_tokens(self, verified: VerifyResult, manager: StateManager) -> None:
        """The host knows the drafted tokens now: the drafter's state needs them for rollback."""
        if self.drafted is None:
            return
        state = manager.state(self.model)
        assert state is not None
        slots = self.drafted.flat_slots  # [B, depth - 1]
        index = np.searchsorted(verified.rows, self.tree.rows)
        known = np.arange(slots.shape[1]) < self.tree.sizes[:, None] - 1
        drafts = verified.drafts[index][:, : slots.shape[1]]
        known = known[:, : drafts.shape[1]]
        state.set_tokens(slots[:, : drafts.shape[1]][known], drafts[known])


def total_variation(p_logits: Tensor, q_logits: Tensor) -> float:
    """Mean of 1/2 sum |p - q| over rows. [n, V] each. SpecRouter, Equation 5."""
    p = torch.softmax(p_logits.float(), dim=-1)
    q = torch.softmax(q_logits.float(), dim=-1)
    return float((p - q).abs().sum(dim=-1).mean()) / 2
