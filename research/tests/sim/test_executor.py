"""What a plan takes on a simulated machine, and what it leaves behind, in closed form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from research.sim.executor import SimulatedExecutor
from research.sim.knowledge import Known
from research.sim.machine import Machine
from research.sim.request import SimulatedClock
from research.sim.rows import SimulatedRows
from research.sim.text import SimulatedTexts
from specrouter.cycle import Bools, Candidates, ChainGroup, CyclePlan, CycleResult, DraftShape, Ints
from specrouter.profile.acceptance import JudgedTrees
from specrouter.profile.snapshot import TreeKey
from specrouter.profile.time_curve import TimeCurve
from specrouter.request.params import Chain

NOBODY: Ints = np.zeros(0, dtype=np.int64)
CHUNK = 64
TIMES = {"a": (1.0, 0.01), "b": (5.0, 0.05), "c": (50.0, 0.5)}  # ms of a forward, and of a token


def curve(base: float, each: float) -> TimeCurve:
    return TimeCurve(((1, base + each), (4097, base + 4097 * each)))


MACHINE = Machine(
    target="c",
    times={name: curve(*times) for name, times in TIMES.items()},
    parameters={"a": 1, "b": 10, "c": 100},
    prefill_chunk=CHUNK,
    max_requests=8,
    acceptance={("a", "b"): 0.9, ("b", "c"): 0.9},
)


def ms(model: str, *forwards: int) -> float:
    base, each = TIMES[model]
    return sum(base + each * tokens for tokens in forwards)


class Taught(Known):
    """Notes what it is told."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.is_learning = True
        self.trees: list[tuple[TreeKey, JudgedTrees]] = []

    def record_trees(self, key: TreeKey, trees: JudgedTrees) -> None:
        self.trees.append((key, trees))


@dataclass
class Bench:
    """Rows of 20 tokens that all models have read, with room for 40 more."""

    rows: int = 2
    room: int = 40
    acceptance: float = 0.7
    state: SimulatedRows = field(init=False)
    knowledge: Taught = field(init=False)
    executor: SimulatedExecutor = field(init=False)

    def __post_init__(self) -> None:
        texts = SimulatedTexts(self.acceptance, MACHINE.acceptance)
        self.state = SimulatedRows(MACHINE.max_requests, MACHINE.names)
        self.knowledge = Taught(MACHINE, texts)
        draws = np.random.default_rng(1)
        self.clock = SimulatedClock()
        self.executor = SimulatedExecutor(
            machine=MACHINE,
            texts=texts,
            states=self.state,
            profiler=self.knowledge,
            draws=draws,
            clock=self.clock,
        )
        for row in range(self.rows):
            assert self.state.open(20, 20 + self.room) == row
            for read in self.state.read.values():
                read[row] = 19

    @property
    def all_rows(self) -> Ints:
        return np.arange(self.rows)

    def group(self, chain: Chain, shape: DraftShape, **given: Any) -> ChainGroup:
        return ChainGroup(chain=chain, shape=shape, rows=self.all_rows, **given)

    def run(self, *groups: ChainGroup, **given: Any) -> tuple[CycleResult, float]:
        return self.run_plan(
            CyclePlan(groups=groups, prefill_rows=NOBODY, prefill_counts=NOBODY, **given)
        )

    def run_plan(self, plan: CyclePlan) -> tuple[CycleResult, float]:
        """What it brings, and its milliseconds."""
        began_s = self.clock()
        result = self.executor.run(plan)
        return result, (self.clock() - began_s) * 1000


def lengths(result: CycleResult) -> list[int]:
    return [len(commit.tokens) for commit in result.commits]


def test_the_target_alone_takes_one_pass_over_one_token_of_each_row() -> None:
    bench = Bench(rows=3)
    result, took = bench.run(bench.group(("c",), DraftShape(1)))
    assert took == pytest.approx(ms("c", 3))
    assert lengths(result) == [1, 1, 1]
    assert bench.state.committed[:3].tolist() == [21] * 3
    assert bench.state.lag("c", bench.all_rows).tolist() == [0] * 3
    assert bench.state.lag("a", bench.all_rows).tolist() == [1] * 3, "it has not seen the new one"


def test_a_pair_takes_a_step_for_each_level_and_a_pass_over_all_nodes() -> None:
    bench = Bench()
    result, took = bench.run(bench.group(("a", "c"), DraftShape(3, 2)))
    steps = ms("a", 2, 4, 4)  # both roots, then two nodes of each
    assert took == pytest.approx(steps + ms("c", 2 * (1 + 6)))
    assert all(commit.drafted == 6 for commit in result.commits)
    assert all(1 <= count <= 4 for count in lengths(result))
    accepted = np.array(lengths(result)) - 1
    lag = bench.state.lag("a", bench.all_rows)
    assert lag.tolist() == (accepted == 3).astype(int).tolist(), "the last level was never fed"


def test_a_selector_leaves_what_the_target_reads() -> None:
    bench = Bench()
    asked = []

    def first_nodes(rows: Ints, candidates: Candidates, aside: int) -> Bools:
        asked.append((rows.tolist(), candidates.worth.shape, aside))
        return candidates.best(np.array([1, 2]))

    group = bench.group(("a", "c"), DraftShape(3, 2), whole=False)
    result, took = bench.run(group, selector=first_nodes)
    assert asked == [([0, 1], (2, 6), 0)]
    assert [commit.drafted for commit in result.commits] == [1, 2]
    assert took == pytest.approx(ms("a", 2, 4, 4) + ms("c", 2 + 3))


def test_groups_share_the_target_s_pass_and_their_selections_one_selector() -> None:
    bench = Bench(rows=3)
    groups = [
        ChainGroup(chain=("a", "c"), shape=DraftShape(2, 1), rows=np.array([0]), whole=False),
        ChainGroup(chain=("a", "c"), shape=DraftShape(1, 2), rows=np.array([1]), whole=False),
        ChainGroup(chain=("a", "c"), shape=DraftShape(1, 1), rows=np.array([2])),
    ]
    seen = []

    def none(rows: Ints, candidates: Candidates, aside: int) -> Bools:
        seen.append((rows.tolist(), candidates.depths.tolist(), aside))
        return np.zeros(candidates.worth.shape, dtype=np.bool_)

    result, took = bench.run(*groups, selector=none)
    assert seen == [([0, 1], [[1, 2], [1, 1]], 1)]
    assert took == pytest.approx(ms("a", 1, 1) + ms("a", 1) * 2 + ms("c", 3 + 1))
    assert lengths(result)[:2] == [1, 1]


def test_chunks_of_prompts_are_read_in_the_same_pass() -> None:
    bench = Bench(rows=1)
    row = bench.state.open(30, 40)
    decoding = ChainGroup(chain=("c",), shape=DraftShape(1), rows=np.array([0]))
    _, took = bench.run_plan(
        CyclePlan(groups=[decoding], prefill_rows=np.array([row]), prefill_counts=np.array([25]))
    )
    assert took == pytest.approx(ms("c", 1 + 25))
    assert bench.state.lag("c", np.array([row])).tolist() == [4]
    ends = ChainGroup(chain=("c",), shape=DraftShape(1), rows=np.array([row]))
    result, took = bench.run(ends)  # the rest, and the first token
    assert took == pytest.approx(ms("c", 4 + 1))
    assert lengths(result) == [1]


def test_a_drafter_reads_a_prompt_before_it_drafts() -> None:
    bench = Bench(rows=1)
    bench.state.read["a"][0] = 0
    result, took = bench.run(bench.group(("a", "c"), DraftShape(2)))
    assert result.caught_up
    assert took == pytest.approx(ms("a", 19) + ms("a", 1, 1) + ms("c", 1 + 2))


def test_a_prompt_beyond_a_chunk_keeps_its_row_from_drafting() -> None:
    bench = Bench(rows=1)
    bench.state.committed[0], bench.state.ends[0] = 101, 200
    bench.state.read["c"][0], bench.state.read["a"][0] = 100, 0
    result, took = bench.run(bench.group(("a", "c"), DraftShape(2)))
    assert result.behind_rows == {0}
    assert took == pytest.approx(ms("a", CHUNK) + ms("c", 1))
    result, took = bench.run(bench.group(("a", "c"), DraftShape(2)))
    assert took == pytest.approx(ms("a", 101 - CHUNK) + ms("a", 1, 1) + ms("c", 1 + 2))
    assert not result.behind_rows


def test_nothing_is_drafted_beyond_a_text_s_end() -> None:
    bench = Bench(rows=40 // 8, room=2, acceptance=0.95)
    result, took = bench.run(bench.group(("a", "c"), DraftShape(5)))
    assert result.cut_rows == set(range(5))
    assert not result.is_regular
    assert max(lengths(result)) == 2
    assert took == pytest.approx(ms("a", 5) + ms("c", 5 * 2)), "one level, which has room"
    for row in range(5):
        bench.state.committed[row] = 21
        bench.state.read["c"][row] = 20
    result, took = bench.run(bench.group(("a", "c"), DraftShape(5)))
    assert lengths(result) == [1] * 5, "the last token is the target's own"
    assert took == pytest.approx(ms("c", 5))


def test_a_chain_of_three_has_paths_verified_twice() -> None:
    bench = Bench(rows=1)
    result, took = bench.run(bench.group(("a", "b", "c"), DraftShape(3)))
    offered = result.commits[0].drafted  # what the intermediate accepted, and its own token
    assert 1 <= offered <= 4
    assert took == pytest.approx(ms("a", 1, 1, 1) + ms("b", 1 + 3) + ms("c", 1 + offered))


def test_two_verifiers_bring_more_tokens_than_the_weak_drafter_alone() -> None:
    def mean(chain: Chain) -> float:
        bench = Bench(rows=8, room=4000, acceptance=0.4)
        found = [bench.run(bench.group(chain, DraftShape(4)))[0] for _ in range(120)]
        return float(np.mean([lengths(each) for each in found]))

    # a drafts 4 for c at 0.4; b accepts 0.9 of a's and c 0.9 of b's.
    assert mean(("a", "c")) == pytest.approx(sum(0.4**k for k in range(5)), rel=0.06)
    expected = 1 + sum(0.9**k * 0.9 ** (k - 1) for k in range(1, 6))
    assert mean(("a", "b", "c")) == pytest.approx(expected, rel=0.06)


def test_who_learns_is_told_what_was_verified_and_what_was_accepted() -> None:
    bench = Bench(rows=4)
    result, _ = bench.run(bench.group(("a", "c"), DraftShape(2, 2)))
    [(key, trees)] = bench.knowledge.trees
    assert key == (("a",), "c", True)
    assert trees.judged.all()
    assert trees.accepted.sum(axis=1).tolist() == [count - 1 for count in lengths(result)]
