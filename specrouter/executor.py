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
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from modelpool import ModelPool
from modelpool.packed_model import PackedModel
from processors import (
    DraftProcessor,
    FedTree,
    NgramDraftProcessor,
    NonFiniteLogits,
    PrefillProcessor,
    Proposal,
    RollbackProcessor,
    Sampler,
    SamplingSettings,
    TokenTree,
    Verdict,
    VerifyProcessor,
    join,
)
from processors.grammar import GrammarError, prune
from processors.pack import lag
from processors.token_tree import ROOT
from specrouter.forward_clock import ForwardClock
from specrouter.hang_guard import Abandoned, HangGuard
from specrouter.lessons import PROMPT_POSITIONS, Lesson, Teacher
from specrouter.logprobs import PromptLogprobs, token_logprobs
from specrouter.model_times import ModelTimes
from specrouter.output import TokenLogprobs
from specrouter.params import MAX_TREE_TOKENS
from specrouter.prediction import Chain
from specrouter.profiler import PerformanceProfiler
from specrouter.request import Prompt
from specrouter.tree_selection import Candidates, TreeSelector
from statemgr import ModelState, NgramTable, StateManager
from statemgr.forward_view import KV_QUANTUM

logger = logging.getLogger(__name__)

Ints = NDArray[np.int64]

_CATCH_UP_TOKENS = 8  # a drafter that lags by more catches up in chunks of its own first


class TargetError(RuntimeError):
    """The target failed; the requests that were in its pack cannot go on.

    `failures`: of other models, before it in the same cycle.
    """

    def __init__(self, reason: str, failures: "Sequence[ModelFailure]") -> None:
        super().__init__(reason)
        self.failures = tuple(failures)


@dataclass(frozen=True, eq=False)
class ChainGroup:
    """Requests that decode through one chain, with trees of `depth` levels of `width` nodes.

    `whole`: the target verifies all nodes; else those that the cycle's selector leaves.
    `inner_rounds`: how often the first intermediate judges a draft. `branching`: of trees of a
    fixed form, see `DraftProcessor.draft`.
    """

    chain: Chain
    depth: int
    rows: Ints  # ascending
    width: int = 1
    hard_rejection: bool = False
    whole: bool = True
    inner_rounds: int = 1
    branching: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class CyclePlan:
    groups: Sequence[ChainGroup]
    prefill_rows: Ints  # ascending, none of them in a group
    prefill_counts: Ints  # tokens of each chunk; all end before the last committed token
    selector: TreeSelector | None = None  # of groups that do not verify whole trees


@dataclass(frozen=True, eq=False)
class Commit:
    """What a row gained in a cycle. `drafted`: tokens that the target verified for it."""

    row: int
    tokens: list[int]
    chain: Chain  # as it was used, shorter than planned after a failure
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    drafted: int = 0


@dataclass(frozen=True)
class ModelFailure:
    model: str
    error: Exception


@dataclass
class CycleResult:
    """What a cycle brought.

    Attributes:
        errors: why rows cannot go on, whose requests alone are affected.
        is_regular: nothing but the planned drafting and verifying took time: no model caught up or
            failed, no tree was cut short by the end of its text.
    """

    commits: list[Commit] = field(default_factory=list)
    failures: list[ModelFailure] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    is_regular: bool = True


@dataclass(frozen=True)
class _RowFacts:
    prompt_tokens: int
    max_new_tokens: int
    logprobs: int | None
    sampled: bool


class _StageError(Exception):
    def __init__(self, model: str, error: Exception) -> None:
        super().__init__(model)
        self.failure = ModelFailure(model, error)


@dataclass(eq=False)
class _Speculation:
    """How far a group's chain has come: what it offers the next level, and who took part."""

    group: ChainGroup
    rows: Ints  # of the group, those that draft at all
    heights: Ints  # [B] how deep their trees may be
    positions: Ints  # [B] output positions after their roots
    proposal: Proposal | None = None
    used: list[str] = field(default_factory=list)
    inner_rounds: int = 1  # so far
    # Before the target's selection, and what of it was selected [B, W].
    candidates: TokenTree | None = None
    selected: NDArray[np.bool_] | None = None


@dataclass(frozen=True, eq=False)
class _Touched:
    """Rows of a state that a cycle has added to."""

    state: ModelState
    rows: Ints
    fed: FedTree | None  # None: nothing of it is of use


class Executor:
    """See the module.

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
        self._guard = guard
        self._manager = manager
        self._profiler = profiler
        self._rejection = rejection
        self._sampler = Sampler(pool.vocab_size, window)
        self._prefill = PrefillProcessor(prefill_chunk)
        self._draft = DraftProcessor()
        self._verify = VerifyProcessor()
        self._rollback = RollbackProcessor()
        self._ngram = NgramDraftProcessor()
        self._ngrams = NgramTable(pool.vocab_size)
        self._clock = ForwardClock(profiler.record_forward)
        self._rows: dict[int, _RowFacts] = {}
        self._times = ModelTimes(pool, profiler)
        self._loaded: dict[str, PackedModel] = {}  # the models that the states belong to
        self._touched: list[_Touched] = []  # in this cycle
        self._result = CycleResult()
        self._teacher = Teacher(pool, manager, self._ngrams, profiler)
        self._prompt_logprobs = PromptLogprobs()
        self._bases = manager.counts.copy()  # committed tokens before this cycle, by row

    def open(self, row: int, request: Prompt) -> None:
        """Prepares a row that the state manager has allocated for a request."""
        params = request.params
        self._rows[row] = _RowFacts(
            len(request.token_ids),
            params.max_new_tokens,
            params.logprobs,
            params.temperature > 0,
        )
        settings = sampling_settings(request, self._pool.eos_token_ids)
        self._sampler.open(row, settings, request.token_ids, request.generated)
        self._ngrams.open(row)
        self._prompt_logprobs.open(row, request.token_ids, params.prompt_logprobs)

    def close(self, row: int) -> None:
        del self._rows[row]
        self._teacher.forget(row)
        self._sampler.close(row)
        self._ngrams.close(row)
        self._prompt_logprobs.close(row)
        self._manager.free(row)

    def drop_states(self) -> None:
        """Gives back all KV memory. Nothing can run here afterwards."""
        self._touched = []
        for name in self._pool.names:
            self._manager.drop_state(name)

    def target_lag(self, rows: Ints) -> Ints:
        """Committed tokens that the target has not read, the last one not counted, [R]."""
        state = self._manager.state(self._pool.target)
        return self._manager.counts[rows] - 1 if state is None else lag(state, self._manager, rows)

    def prepare(self, name: str) -> None:
        """Loads a model and takes its times, or finds those that were kept of it."""
        with self._stage(name, np.zeros(0, dtype=np.int64)):
            pass

    def lags(self, rows: Ints) -> dict[str, float]:
        """By model: tokens that it has not read of these rows, the last two of each not counted."""
        found = {}
        for name in self._pool.names:
            if name == self._pool.target or self._pool.is_weightless(name):
                continue
            state = self._manager.state(name)
            behind = self._manager.counts[rows] - 1
            if state is not None:
                behind = lag(state, self._manager, rows)
            found[name] = float(np.maximum(behind - 1, 0).sum())
        return found

    def slots_read(self, rows: Ints) -> int:
        """KV slots that attention reads for each of the rows in the mean, padding included."""
        lengths = self._manager.counts[rows] + _CATCH_UP_TOKENS
        padded = -(-lengths // KV_QUANTUM) * KV_QUANTUM
        return round(float(padded.mean())) if len(rows) else KV_QUANTUM

    @torch.inference_mode()
    def run(self, plan: CyclePlan) -> CycleResult:
        """One cycle. Raises `TargetError`, after which nothing is committed."""
        result = self._result = CycleResult()
        self._bases = self._manager.counts.copy()
        self._touched = []
        try:
            self._cycle(plan, result)
        except Abandoned:  # another thread has settled it
            raise
        except BaseException:
            self._settle()
            raise
        self._settle()
        return result

    def abandon_cycle(self, model: str) -> None:
        """Takes over from a thread that hangs in a forward of `model`, whose cache is forgotten."""
        self._pool.release(model)
        self._manager.drop_state(model)
        self._loaded.pop(model, None)
        self._settle()

    def _cycle(self, plan: CyclePlan, result: CycleResult) -> None:
        speculations = [self._speculate(group, result) for group in plan.groups]
        self._select(plan, speculations)
        verdict = self._verify_with_target(plan, speculations, result)
        if verdict is None:
            return
        for speculation in speculations:
            self._learn(speculation, verdict)
        self._commit(verdict, speculations, result)

    def _settle(self) -> None:
        """Every model that took part keeps what was committed, and nothing else."""
        for touched in self._touched:
            fed = () if touched.fed is None else (touched.fed,)
            bases = self._bases[touched.rows]
            self._rollback.rollback(touched.state, self._manager, touched.rows, bases, fed)
        self._touched = []

    def _speculate(self, group: ChainGroup, result: CycleResult) -> _Speculation:
        """What a group offers the target. A model that fails is passed over."""
        limits = self._remaining(group.rows) - 1
        drafting = limits > 0  # a row's last token is the target's own
        rows = group.rows[drafting]
        heights = np.minimum(group.depth, limits[drafting])
        positions = self._output_positions(rows)
        speculation = _Speculation(group, rows, heights, positions)
        if bool((heights < group.depth).any()) or not drafting.all():
            result.is_regular = False
        for name in group.chain[:-1] if len(rows) else ():
            try:
                self._advance(speculation, name)
                speculation.used.append(name)
                if len(speculation.used) == 2 and not group.hard_rejection:
                    self._go_round(speculation)
            except _StageError as stage:
                result.failures.append(stage.failure)
                result.is_regular = False
        return speculation

    def _go_round(self, speculation: _Speculation) -> None:
        """Inner rounds after the first: the drafter goes on from the path that the intermediate
        accepted, which judges it anew with what was added."""
        group, rows = speculation.group, speculation.rows
        drafter, judge = speculation.used
        if self._rejection or self._pool.is_weightless(drafter):
            return
        while speculation.inner_rounds < group.inner_rounds:
            assert speculation.proposal is not None
            stem = speculation.proposal.tree
            heights = np.minimum(group.depth, self._remaining(rows) - 1 - stem.sizes)
            if (heights < 1).any() or not stem.sizes.all():
                return
            speculation.inner_rounds += 1
            for name in (drafter, judge):
                self._forget_speculation(name, rows)
            before = speculation.heights, speculation.proposal
            speculation.heights = heights
            try:
                self._offer(speculation, self._draft_with(drafter, speculation, _as_stem(stem)))
                self._judge(speculation, judge)
            except _StageError:  # what the earlier rounds accepted is still good
                speculation.heights, speculation.proposal = before
                speculation.inner_rounds -= 1
                raise
            speculation.heights = before[0]

    def _forget_speculation(self, name: str, rows: Ints) -> None:
        """A model's state is as it was before the cycle: only committed tokens."""
        state = self._manager.state(name)
        assert state is not None
        kept = self._manager.counts[rows] - 1
        state.rollback(rows, np.minimum(kept, state.lengths(rows)))
        same = [t for t in self._touched if t.state is state and np.array_equal(t.rows, rows)]
        self._touched = [touched for touched in self._touched if touched not in same]

    def _select(self, plan: CyclePlan, speculations: Sequence[_Speculation]) -> None:
        """Leaves the nodes to the target that the plan's selector picks, of all requests."""
        drafted = [speculation for speculation in speculations if speculation.proposal is not None]
        for speculation in drafted:
            assert speculation.proposal is not None
            tree = speculation.candidates = speculation.proposal.tree
            speculation.selected = tree.real
        choosy = [s for s in drafted if self._is_choosy(s.group)]
        if plan.selector is None or not choosy:
            return
        trees = [s.proposal.tree for s in choosy if s.proposal is not None]
        candidates, rows = _candidates(trees, [self._worth(s) for s in choosy])
        whole = [s.candidates for s in drafted if not self._is_choosy(s.group)]
        aside = sum(int(tree.sizes.sum()) for tree in whole if tree is not None)
        chosen = plan.selector(rows, candidates, aside)
        start = 0
        for speculation, tree in zip(choosy, trees, strict=True):
            assert speculation.proposal is not None
            own = chosen[start : start + len(tree.rows), : tree.tokens.shape[1]]
            start += len(tree.rows)
            speculation.selected = own
            speculation.proposal = replace(speculation.proposal, tree=tree.keep(own))

    def _is_choosy(self, group: ChainGroup) -> bool:
        return not (group.whole or group.hard_rejection or self._rejection)

    def _worth(self, speculation: _Speculation) -> NDArray[np.float64]:
        assert speculation.proposal is not None
        tree, used = speculation.proposal.tree, tuple(speculation.used)
        sampled = self._sampled(tree.rows)
        worth = self._teacher.worth(used, speculation.inner_rounds, tree, sampled)
        return np.where(np.isfinite(tree.log_probs) & tree.real, worth, 0.0)

    def _advance(self, speculation: _Speculation, name: str) -> None:
        """One more level of the chain."""
        if speculation.proposal is None:
            self._offer(speculation, self._draft_with(name, speculation))
        else:
            self._judge(speculation, name)

    def _offer(self, speculation: _Speculation, proposal: Proposal) -> None:
        """Hands a proposal on, without what grammars do not allow.

        Rejection sampling needs all that was drawn: its verifiers refuse it in their own way.
        """
        if self._sampler.grammars and not self._rejection:
            proposal = replace(proposal, tree=prune(proposal.tree, self._sampler.grammars))
        speculation.proposal = proposal

    def _judge(self, speculation: _Speculation, name: str) -> None:
        """An intermediate verifies what was proposed, and makes it its own proposal."""
        group, rows, before = speculation.group, speculation.rows, speculation.proposal
        assert before is not None
        level = len(speculation.used)
        with self._stage(name, rows) as (model, state):
            self._catch_up(model, state, rows)
            started = time.perf_counter()
            arguments = (model, state, self._manager, self._sampler, before.tree)
            if self._rejection:
                verdict = self._verify.verify_by_rejection(
                    *arguments, speculation.positions, [before], level
                )
            else:
                verdict = self._verify.verify(*arguments, speculation.positions, rescore=True)
            self._note_stage("verify", int((verdict.places >= 0).sum()), started)
            if verdict.broken.any():
                raise NonFiniteLogits(f"{name} gave logits that are not numbers")
            self._touched.append(_Touched(state, rows, verdict.fed))
        self._learn_from_judge(speculation, before, name, verdict)
        is_path = (
            self._rejection or group.width == 1 or speculation.inner_rounds < group.inner_rounds
        )
        after = verdict.proposal(group.hard_rejection and not self._rejection, is_path)
        size = group.depth * group.width * speculation.inner_rounds
        nodes = np.full(len(rows), min(MAX_TREE_TOKENS, size + len(group.chain)))
        limits = self._remaining(rows) - 1
        tree = after.tree.select(nodes, limits)
        if self._rejection:  # from where no token is allowed, nothing can be drawn
            tree = tree.keep(tree.real & verdict.sound[:, None])
        self._offer(speculation, replace(after, tree=tree))

    def _catch_up(self, model: PackedModel, state: ModelState, rows: Ints) -> None:
        """A drafter reads what it has missed, prompts included, but for the last tokens."""
        behind = int(lag(state, self._manager, rows).max(initial=0))
        self._result.is_regular &= behind <= 2
        self._compare_at_prompts(model, state, rows)
        self._prefill.catch_up(model, state, self._manager, rows, _CATCH_UP_TOKENS)
        self._clock.take_ms()

    def _compare_at_prompts(self, model: PackedModel, state: ModelState, rows: Ints) -> None:
        """Of prompts that the model reads only now: how alike it is to the target at their ends."""
        known, lengths, counts = self._teacher.prompt_ends(rows[state.lengths(rows) == 0])
        if len(known):
            logits = self._prefill.read(model, state, self._manager, known, lengths, counts)
            self._teacher.compare_prompt_ends(model.name, known, logits)

    def _note_stage(self, stage: str, places: int, started: float, times: int = 1) -> None:
        """The time since `started` that was not spent in forwards."""
        elapsed_ms = (time.perf_counter() - started) * 1000
        own = max(elapsed_ms - self._clock.take_ms(), 1e-3)
        self._profiler.record_stage(stage, places, own, times)

    def _draft_with(
        self, name: str, speculation: _Speculation, stem: TokenTree | None = None
    ) -> Proposal:
        if self._pool.is_weightless(name):
            return self._draft_from_text(name, speculation)
        group, rows = speculation.group, speculation.rows
        width = 1 if self._rejection else group.width
        with self._stage(name, rows) as (model, state):
            self._catch_up(model, state, rows)
            started = time.perf_counter()
            proposal = self._draft.draft(
                model,
                state,
                self._manager,
                self._sampler,
                rows,
                speculation.positions,
                speculation.heights,
                width,
                purpose=1 if self._rejection else 0,
                stem=stem,
                branching=None if self._rejection else group.branching,
            )
            steps = int(speculation.heights.max())
            self._note_stage("draft", len(rows) * width, started, steps)
            self._touched.append(_Touched(state, rows, proposal.fed))
        if stem is not None:
            return proposal
        nodes = speculation.heights * group.width
        return replace(proposal, tree=proposal.tree.select(nodes, speculation.heights))

    def _draft_from_text(self, name: str, speculation: _Speculation) -> Proposal:
        group, rows = speculation.group, speculation.rows
        started = time.perf_counter()
        try:
            tree = self._ngram.draft(
                self._ngrams,
                self._manager,
                _no_noise if self._rejection else self._sampler.noise_at,
                rows,
                speculation.positions,
                speculation.heights,
                1 if self._rejection else group.width,
            )
        except Exception as error:
            raise _StageError(name, error) from error
        elapsed_ms = (time.perf_counter() - started) * 1000
        step_ms = elapsed_ms / group.depth
        self._profiler.record_forward(name, len(rows) * group.width, 0.0, step_ms, group.depth)
        return Proposal.without_logits(tree)

    def _verify_with_target(
        self, plan: CyclePlan, speculations: Sequence[_Speculation], result: CycleResult
    ) -> Verdict | None:
        if not plan.groups and not len(plan.prefill_rows):
            return None
        proposals = [s.proposal for s in speculations if s.proposal is not None]
        proposed = [proposal.tree.rows for proposal in proposals]
        rows = np.concatenate([plan.prefill_rows[:0], *(group.rows for group in plan.groups)])
        others = np.setdiff1d(rows, np.concatenate([plan.prefill_rows[:0], *proposed]))
        tree = join([*(proposal.tree for proposal in proposals), TokenTree.empty(others)])
        positions = self._output_positions(tree.rows)
        prefill = (plan.prefill_rows, plan.prefill_counts)
        name = self._pool.target
        self._sampler.take_errors()  # those of drafters concern their proposals only
        try:
            with self._stage(name, tree.rows) as (model, state):
                started = time.perf_counter()
                self._clock.take_ms()
                arguments = (model, state, self._manager, self._sampler, tree, positions)
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
                    self._prompt_logprobs.note(row, logits)
                self._note_stage("verify", int((verdict.places >= 0).sum()), started)
                self._touched.append(_Touched(state, tree.rows, verdict.fed))
                # A masked NaN would poison the row's next cycle.
                poisoned = verdict.broken[:, 1:] & ~verdict.accepted & tree.real
                if poisoned.any():
                    state.scrub(verdict.fed.flat_slots[poisoned])
        except _StageError as stage:
            error = stage.failure.error
            reason = f"{name} failed: {type(error).__name__}: {error}"
            raise TargetError(reason, result.failures) from error
        return verdict

    def _earlier(self, state: ModelState, rows: Ints) -> Ints:
        """[B] places before the roots whose logits are of use: a prompt's end, which drafters will
        be compared with when they read it, or all of it."""
        behind = lag(state, self._manager, rows)
        wanted = 0 if self._rejection else PROMPT_POSITIONS
        return np.where(self._prompt_logprobs.asked(rows), behind, np.minimum(behind, wanted))

    def _whole_chunks(self, rows: Ints, counts: Ints) -> Ints:
        """[P] the same within chunks of prompts."""
        return np.where(self._prompt_logprobs.asked(rows), counts, 0)

    def _learn(self, speculation: _Speculation, verdict: Verdict) -> None:
        """What the target said of a group's trees."""
        proposal, tree = speculation.proposal, speculation.candidates
        if proposal is None or tree is None or speculation.selected is None:
            return
        target, used = self._pool.target, tuple(speculation.used)
        index = np.searchsorted(verdict.tree.rows, proposal.tree.rows)
        on_walk = verdict.accepted[index][:, : proposal.tree.tokens.shape[1]]
        accepted = np.zeros(tree.tokens.shape, dtype=np.bool_)
        accepted[speculation.selected] = on_walk[proposal.tree.real]
        sound = verdict.sound[index]
        lesson = self._lesson(speculation, used, target, tree, accepted, sound)
        if speculation.group.branching is None:  # a fixed form says nothing of beams
            self._teacher.teach(replace(lesson, judged=speculation.selected))
        self._teacher.compare(proposal, used[-1], target, verdict)

    def _learn_from_judge(
        self, speculation: _Speculation, proposal: Proposal, judge: str, verdict: Verdict
    ) -> None:
        """What an intermediate said of the trees that it was offered."""
        tree, used = proposal.tree, speculation.used
        proposers = tuple(used[: used.index(judge)] if judge in used else used)
        if speculation.inner_rounds == 1 and speculation.group.branching is None:
            accepted = verdict.accepted[:, : tree.tokens.shape[1]]
            lesson = self._lesson(speculation, proposers, judge, tree, accepted, verdict.sound)
            self._teacher.teach(lesson)
        self._teacher.compare(proposal, proposers[-1], judge, verdict)

    def _lesson(
        self,
        speculation: _Speculation,
        proposers: Chain,
        verifier: str,
        tree: TokenTree,
        accepted: NDArray[np.bool_],
        sound: NDArray[np.bool_],
    ) -> Lesson:
        return Lesson(
            proposers,
            speculation.inner_rounds,
            verifier,
            speculation.group.depth,
            speculation.group.width,
            speculation.heights,
            tree,
            tree.real,
            accepted,
            sound,
            self._sampled(tree.rows),
        )

    def _commit(
        self, verdict: Verdict, speculations: Sequence[_Speculation], result: CycleResult
    ) -> None:
        chains: dict[int, Chain] = {}
        for speculation in speculations:
            alone = (self._pool.target,)
            chains.update(dict.fromkeys(speculation.group.rows.tolist(), alone))
            used = (*speculation.used, self._pool.target)
            chains.update(dict.fromkeys(speculation.rows.tolist(), used))
        rows = verdict.tree.rows
        remaining = self._remaining(rows)
        failed = self._sampler.take_errors()
        for index, row in enumerate(rows.tolist()):
            if not verdict.sound[index]:
                result.errors[row] = self._reason(row, failed, verdict.broken[index].any())
                continue
            path = verdict.path(index)
            assert len(path) <= remaining[index], "a tree was deeper than the request may go"
            self._manager.extend(row, path)
            self._sampler.extend(row, path.tolist())
            logprobs = self._logprobs(verdict, index, path)
            of_prompt = self._prompt_logprobs.take(row)
            drafted = int(verdict.tree.sizes[index])
            result.commits.append(
                Commit(row, path.tolist(), chains[row], logprobs, of_prompt, drafted)
            )

    def _reason(self, row: int, failed: Mapping[int, Exception], is_broken: bool) -> str:
        """Why no token could be chosen for a row."""
        if row in failed:
            error = failed[row]
            if isinstance(error, GrammarError):
                return f"the structure cannot go on: {error}"
            return f"a logits processor failed: {type(error).__name__}: {error}"
        if is_broken:
            return f"{self._pool.target} gave logits that are not numbers"
        return "the sampling parameters leave no token to choose"

    def _logprobs(self, verdict: Verdict, index: int, path: Ints) -> list[TokenLogprobs] | None:
        """Of the path's tokens, where the request asked for them."""
        count = self._rows[int(verdict.tree.rows[index])].logprobs
        if count is None:
            return None
        places = verdict.places[index, np.append(ROOT, verdict.walk(index)) + 1]
        at = torch.from_numpy(places).to(verdict.logits.device)
        return token_logprobs(verdict.logits.index_select(0, at), path, count)

    def _output_positions(self, rows: Ints) -> Ints:
        prompts = [self._rows[row].prompt_tokens for row in rows.tolist()]
        return self._manager.counts[rows] - np.array(prompts, dtype=np.int64)

    def _sampled(self, rows: Ints) -> NDArray[np.bool_]:
        """[R] rows that are not greedy."""
        return np.array([self._rows[row].sampled for row in rows.tolist()], dtype=np.bool_)

    def _remaining(self, rows: Ints) -> Ints:
        """Tokens that each row may still commit, [R]."""
        limits = [self._rows[row].max_new_tokens for row in rows.tolist()]
        return np.array(limits, dtype=np.int64) - self._output_positions(rows)

    @contextmanager
    def _stage(self, name: str, rows: Ints) -> Iterator[tuple[PackedModel, ModelState]]:
        """A model in use for `rows`, with its state; what goes wrong is put down to it."""
        state: ModelState | None = None
        try:
            model = self._pool.acquire(name)
            try:
                state = self._state(name, model)
                yield model, state
            except Abandoned:  # whoever took over has released it
                raise
            except BaseException:
                self._pool.release(name)
                raise
            else:
                self._pool.release(name)
        except Exception as error:
            if state is not None and isinstance(error, NonFiniteLogits):
                for row in rows.tolist():  # its keys and values may be no numbers either
                    state.free(row)
            elif state is not None:
                self._touched.append(_Touched(state, rows, None))
            raise _StageError(name, error) from error

    def _state(self, name: str, model: PackedModel) -> ModelState:
        if self._loaded.get(name) is not model:  # evicted and loaded again, maybe elsewhere
            self._manager.drop_state(name)
            guarded = self._guard is not None and name != self._pool.target
            around = partial(self._guard.inside, name) if guarded and self._guard else nullcontext
            model.watch = lambda _tokens, _attended: around()  # its profile may hang, too
            self._times.learn(name, model)
            model.watch = self._clock.watch(name, model.device, around)
            self._loaded[name] = model
        return self._manager.open_state(name, model.kv_layers, canonical=name == self._pool.target)

    def forget_evicted(self) -> None:
        """Frees the caches of models that the pool no longer holds."""
        for name in [name for name in self._loaded if not self._pool.is_loaded(name)]:
            del self._loaded[name]
            self._manager.drop_state(name)


def _as_stem(tree: TokenTree) -> TokenTree:
    return TokenTree.path(tree.rows, tree.tokens, tree.sizes)


def _candidates(
    trees: Sequence[TokenTree], worth: Sequence[NDArray[np.float64]]
) -> tuple[Candidates, Ints]:
    """Trees one after the other, as wide as the widest, and their rows."""
    width = max(tree.tokens.shape[1] for tree in trees)

    def stacked(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([np.pad(p, ((0, 0), (0, width - p.shape[1]))) for p in parts])

    rows = np.concatenate([tree.rows for tree in trees])
    return Candidates(stacked(worth), stacked([tree.depths for tree in trees])), rows


def _no_noise(row: int, position: int, ids: Ints) -> NDArray[np.float64]:
    """Of rejection sampling: what is drawn without chance is accepted by the verifier's alone."""
    return np.zeros(len(ids))


def sampling_settings(request: Prompt, eos_token_ids: Collection[int]) -> SamplingSettings:
    params = request.params
    ends = set(params.stop_token_ids) | (set() if params.goes_on_after_eos else set(eos_token_ids))
    return SamplingSettings(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=request.seed,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple(params.logit_bias),
        min_tokens=params.min_tokens,
        end_token_ids=tuple(sorted(ends)),
        bad_words_ids=request.bad_words_ids,
        logits_processors=params.logits_processors,
        stream=request.sample,
        grammar=None if request.grammar is None else request.grammar.start(),
    )
