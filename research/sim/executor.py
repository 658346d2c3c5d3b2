"""SimulatedExecutor: runs plans on a simulated machine, whose time passes on a simulated clock.

Contract: see `RowExecutor`. What a plan says is done, packed as the engine packs it: drafters read
what they lack, in chunks; each drafts step by step, intermediates and the target verify in one pass
each, over all rows together with the chunks of prompts. A forward takes what the machine's curve
says for its tokens; drafts and what is accepted of them are drawn (`research.sim.text`). Tokens
have no value here, only a number.

Where a machine's batches were published instead of its forwards (`Machine.batch`), a cycle takes
what these say for the target's tokens and the steps of the longest draft.

Not simulated: failures, loading, shadow evaluations, and the engine's own work beyond `stages`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from modelpool.attention.backend import READING_QUERIES
from research.sim.machine import Machine
from research.sim.request import NO_TOKEN, SimulatedClock
from research.sim.rows import SimulatedRows
from research.sim.text import DrawnTrees, SimulatedTexts
from specrouter.cycle import (
    CATCH_UP_TOKENS,
    LEAST_CHUNK,
    ChainGroup,
    Commit,
    CyclePlan,
    CycleResult,
    select_nodes,
    share_shortest_first,
)
from specrouter.profile.acceptance import JudgedTrees
from specrouter.profile.profiler import PerformanceProfiler
from specrouter.request.params import Chain
from specrouter.request.spec import RequestSpec
from statemgr import GROWTH_TOKENS, RowKV, TokenChain

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_FEW = 0.125  # of a group's rows near their ends: a cycle is as long as was predicted
_NONE: Ints = np.zeros(0, dtype=np.int64)


class NoPrefixes:
    """Every request reads its own prompt."""

    are_kept = False

    def cached(self, request: RequestSpec, text: TokenChain) -> Mapping[str, int]:
        return {}

    def inherited(self, row: int) -> int:
        return 0

    def follow(self) -> Iterable[int]:
        return ()

    def waits(self, left: Mapping[int, int]) -> Mapping[int, int]:
        return {}


class SimulatedHandOver:
    def expected(self, request: RequestSpec) -> int:
        return 0 if request.kv is None else request.kv.tokens

    def read_since(self, row: int, start: int) -> RowKV | None:
        return None


@dataclass(eq=False)
class _Draft:
    """What a group offers the target.

    Attributes:
        rows: [B] that draft.
        trees: of these; None: nobody does.
        chosen: [B, W] the nodes that the target verifies.
        kept: [B] levels that each of the models holds keys and values of, if they are accepted.
    """

    group: ChainGroup
    rows: Ints = field(default_factory=lambda: _NONE)
    trees: DrawnTrees | None = None
    chosen: Bools = field(default_factory=lambda: np.zeros((0, 0), dtype=np.bool_))
    kept: dict[str, Ints] = field(default_factory=dict)


@dataclass(eq=False, kw_only=True)
class SimulatedExecutor:
    machine: Machine
    texts: SimulatedTexts
    states: SimulatedRows
    profiler: PerformanceProfiler
    draws: np.random.Generator
    clock: SimulatedClock
    _ms: float = 0.0  # of the cycle so far
    _target_tokens: int = 0  # of its pass

    # Rows

    @property
    def prefixes(self) -> "NoPrefixes":
        return NoPrefixes()

    @property
    def hand_over(self) -> "SimulatedHandOver":
        return SimulatedHandOver()

    @property
    def rows(self) -> int:
        return self.machine.max_requests

    @property
    def free_tokens(self) -> int | None:
        budget = self.machine.kv_tokens
        return None if budget is None else max(0, budget - int(self.states.held.sum()))

    def needed_tokens(self, committed: int, most: int) -> int:
        return min(committed + GROWTH_TOKENS, most)

    def held_tokens(self, row: int) -> int:
        return int(self.states.held[row])

    def allocate(self, request: RequestSpec) -> int | None:
        free, committed = self.free_tokens, len(request.committed)
        needed = self.needed_tokens(committed, request.total_tokens)
        if not self.states.free or (free is not None and needed > free):
            return None
        return self.states.open(committed, request.total_tokens, needed)

    def open(self, row: int, request: RequestSpec) -> None:
        pass  # since it was allocated

    def prepare(self, row: int, request: RequestSpec) -> None:
        """A row that is taken back loses what came with its request."""
        self.states.read[self.machine.target][row] = self.hand_over.expected(request)
        if request.kv is not None:
            request.kv.take()

    def close(self, row: int, keep: bool = False) -> None:
        self.states.close(row)

    def unread(self, rows: Iterable[int]) -> dict[int, int]:
        every = list(rows)
        left = self.states.lag(self.machine.target, np.array(every, dtype=np.int64))
        return dict(zip(every, left.tolist(), strict=True))

    def repeatable(self, rows: Ints) -> Ints:
        return np.zeros_like(rows)

    def is_open(self, model: str) -> bool:
        return True

    # A cycle

    def lacking(self, plan: CyclePlan, order: Sequence[int]) -> Ints:
        """The last in `order` that what there is does not suffice for."""
        rows, budget = np.array(order, dtype=np.int64), self.machine.kv_tokens
        return _NONE if budget is None else rows[np.cumsum(self.states.held[rows]) > budget]

    def run(self, plan: CyclePlan) -> CycleResult:
        self._ms = 0.0
        result = CycleResult()
        self._catch_up(plan.groups, result)
        drafts = [self._draft(group, result) for group in plan.groups]
        _select(plan, drafts)
        self._verify(plan, drafts)
        for draft in drafts:
            self._commit(draft, result)
        self.states.read[self.machine.target][plan.prefill_rows] += plan.prefill_counts
        if self.machine.batch is not None:
            steps = max((len(one.trees.levels) for one in drafts if one.trees), default=0)
            self._ms = self.machine.batch.ms(self._target_tokens, steps)
        self._ms += self._rest_ms(plan)
        self.clock.now_s += self._ms / 1000
        return result

    def _forward(self, model: str, tokens: int, rows: Ints, times: int = 1) -> None:
        """`times` forwards over so many tokens of these rows."""
        attended = (tokens / len(rows) + READING_QUERIES) * float(self.states.slots_of(rows).sum())
        ms = self._forward_ms(model, tokens, attended)
        self._ms += times * ms
        self.profiler.record_forward(model, tokens, attended, ms, times)

    def _forward_ms(self, model: str, tokens: int, attended: float) -> float:
        return float(self.machine.times[model].at(tokens, attended))

    def _rest_ms(self, plan: CyclePlan) -> float:
        """Of a cycle beside its forwards and stages."""
        return 0.0

    def _rates(self, rows: Ints) -> Floats | None:
        """[B] acceptances of these rows' own; None: all texts are alike."""
        return None

    def _work(self, stage: str, places: int, times: int = 1) -> None:
        """The engine's own around a forward."""
        curve = self.machine.stages.get(stage)
        if curve is not None:
            self._ms += times * curve.at(places)

    def _catch_up(self, groups: Sequence[ChainGroup], result: CycleResult) -> None:
        """Drafters and intermediates read what they lack, a chunk each."""
        chunk = max(self.machine.prefill_chunk, LEAST_CHUNK)
        for name in self.machine.drafters:
            parts = [group.rows for group in groups if name in group.chain[:-1]]
            if not parts:
                continue
            rows = np.concatenate(parts)
            lags = self.states.lag(name, rows)
            lags[(lags <= CATCH_UP_TOKENS) | (self.states.remaining(rows) <= 1)] = 0
            if lags.any():
                shares = share_shortest_first(lags, chunk)
                self._forward(name, int(shares.sum()), rows[shares > 0])
                self.states.read[name][rows] += shares
                result.caught_up = True

    def _draft(self, group: ChainGroup, result: CycleResult) -> _Draft:
        """Rows that a model has not read do not draft, nor those that end with the next token."""
        names = group.chain[:-1]
        if not names:
            return _Draft(group)
        limits = self.states.remaining(group.rows) - 1
        is_read = np.ones(len(limits), dtype=np.bool_)
        for name in names:
            is_read &= self.states.lag(name, group.rows) <= CATCH_UP_TOKENS
        cut = group.rows[limits < group.shape.depth]
        result.cut_rows |= set(cut.tolist())
        result.behind_rows |= set(group.rows[(limits > 0) & ~is_read].tolist())
        result.is_regular &= len(cut) <= _FEW * len(group.rows)
        rows = group.rows[(limits > 0) & is_read]
        if not len(rows):
            return _Draft(group)
        return self._drawn(group, rows, limits[(limits > 0) & is_read])

    def _drawn(self, group: ChainGroup, rows: Ints, limits: Ints) -> _Draft:
        """`limits`: [B] levels that the texts have room for."""
        shape, batch, first = group.shape, len(rows), group.chain[0]
        depth = min(shape.depth, int(limits.max()))
        widths = (group.branching or (shape.width,) * depth)[:depth]
        trees = self.texts.of(*group.chain[:2]).draw(
            batch, widths, self.draws, beam=group.branching is None, rates=self._rates(rows)
        )
        self._forward(first, int(self.states.lag(first, rows).sum()) + batch, rows)
        for width in trees.levels[:-1]:
            self._forward(first, batch * width, rows)
        self._work("draft", batch * shape.width, depth)
        kept = {first: np.full(batch, depth - 1)}
        for proposer, verifier in pairwise(group.chain[1:]):
            trees, kept = self._rescored(group, rows, trees, kept, (proposer, verifier))
        trees = trees.within(limits)
        return _Draft(group, rows, trees, trees.worth > 0.0, kept)

    def _rescored(
        self,
        group: ChainGroup,
        rows: Ints,
        trees: DrawnTrees,
        kept: dict[str, Ints],
        pair: tuple[str, str],
    ) -> tuple[DrawnTrees, dict[str, Ints]]:
        """An intermediate verifies, and proposes to the next model: of paths what it accepted and
        its own next token, of wider trees all nodes, by its own judgement."""
        name, batch = pair[0], len(rows)
        offered = trees.worth > 0.0
        lag = int(self.states.lag(name, rows).sum())
        self._forward(name, lag + batch + int(offered.sum()), rows)
        self._work("verify", batch + int(offered.sum()))
        text, levels = self.texts.of(*pair), trees.levels
        if max(levels) > 1:
            after = text.draw(batch, levels, self.draws, beam=group.branching is None)
            return after, {**kept, name: np.full(batch, len(levels))}
        accepted = trees.walk(offered, self.draws).sum(axis=1)
        after = text.draw(batch, (*levels, 1), self.draws).within(accepted + 1)
        kept = {one: np.minimum(depth, accepted) for one, depth in kept.items()}
        return after, {**kept, name: accepted}

    def _verify(self, plan: CyclePlan, drafts: Sequence[_Draft]) -> None:
        """The target's pass over all roots, drafts and chunks of prompts."""
        target, rows = self.machine.target, [plan.prefill_rows]
        tokens, places = int(plan.prefill_counts.sum()), 0
        for draft in drafts:
            group = draft.group.rows
            rows.append(group)
            places += len(group) + int(draft.chosen.sum())
            tokens += int(self.states.lag(target, group).sum())
        self._target_tokens = tokens + places
        self._forward(target, self._target_tokens, np.concatenate(rows))
        self._work("verify", places)
        is_drafted = any(len(draft.group.chain) > 1 for draft in drafts)
        self._work("drafting" if is_drafted else "cycle", sum(map(len, rows[1:])))

    def _commit(self, draft: _Draft, result: CycleResult) -> None:
        """What was accepted of the drafts, and one more token of each row."""
        group, rows = draft.group, self.states
        gained = dict.fromkeys(group.rows.tolist(), 1)
        drafted = dict.fromkeys(gained, 0)
        before = rows.committed[draft.rows].copy()
        if draft.trees is not None:
            walked = draft.trees.walk(draft.chosen, self.draws)
            accepted = walked.sum(axis=1)
            if self.profiler.is_learning:
                self._teach(draft, walked)
            gained.update(zip(draft.rows.tolist(), (1 + accepted).tolist(), strict=True))
            sizes = draft.chosen.sum(axis=1).tolist()
            drafted.update(zip(draft.rows.tolist(), sizes, strict=True))
            for name, levels in draft.kept.items():
                rows.read[name][draft.rows] = before + np.minimum(levels, accepted)
        rows.committed[group.rows] += np.fromiter(gained.values(), dtype=np.int64)
        rows.read[self.machine.target][group.rows] = rows.committed[group.rows] - 1
        alone: Chain = (self.machine.target,)
        result.commits += [
            Commit(
                row=row,
                tokens=[NO_TOKEN] * count,
                chain=group.chain if drafted[row] else alone,
                drafted=drafted[row],
            )
            for row, count in gained.items()
        ]

    def _teach(self, draft: _Draft, walked: Bools) -> None:
        """What the verifier said of the drafts."""
        trees, chain = draft.trees, draft.group.chain
        assert trees is not None, "there was a draft"
        sampled = draft.group.predicted is None or draft.group.predicted.sampled
        with np.errstate(divide="ignore"):
            log_probs = np.log(trees.worth)
        depths = trees.candidates.depths
        judged = JudgedTrees(
            parents=trees.parents,
            depths=depths,
            log_probs=log_probs,
            judged=draft.chosen,
            accepted=walked,
        )
        self.profiler.record_trees((chain[:-1], chain[-1], sampled), judged)


def _select(plan: CyclePlan, drafts: Sequence[_Draft]) -> None:
    """Leaves the nodes to the target that the plan's selector picks, of all requests."""
    drafted = [one for one in drafts if one.trees is not None]
    free = [one for one in drafted if one.group.leaves_choice]
    if plan.selector is None or not free:
        return
    aside = sum(int(one.chosen.sum()) for one in drafted if not one.group.leaves_choice)
    candidates = [one.trees.candidates for one in free if one.trees is not None]
    chosen = select_nodes(plan.selector, [one.rows for one in free], candidates, aside)
    for one, own in zip(free, chosen, strict=True):
        one.chosen = own
