"""The profiler is told what verifiers accepted of whose trees, and nothing else."""

from typing import Any

import numpy as np
import pytest

from modelpool import ModelPool
from specrouter.execution.acceptance_feedback import AcceptanceFeedback
from specrouter.execution.group_draft import GroupDraft
from specrouter.profile.acceptance import JudgedTrees
from specrouter.profile.profiler import PerformanceProfiler
from specrouter.request.params import Chain, SamplingParams
from tests.specrouter.execution.test_executor import PAIR, TRIPLE, Bench

SAMPLED = SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=0.8)
Record = tuple[Any, JudgedTrees]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Record]:
    records: list[Record] = []

    def record(profiler: PerformanceProfiler, key: Any, trees: JudgedTrees) -> None:
        records.append((key, trees))

    monkeypatch.setattr(PerformanceProfiler, "record_trees", record)
    return records


@pytest.mark.parametrize("width", [1, 3])
def test_what_the_target_accepted_is_what_was_committed(
    width: int, pool: ModelPool, told: list[Record]
) -> None:
    result = Bench(pool).cycle(PAIR, depth=3, width=width)
    [(key, trees)] = told
    assert key == (("small",), "target", False)
    accepted = trees.accepted.sum(axis=1).tolist()
    assert accepted == [len(commit.tokens) - 1 for commit in result.commits]
    assert trees.judged.sum(axis=1).tolist() == [3 * width] * 3


def test_each_verifier_of_a_chain_is_told_of_with_its_drafters(
    pool: ModelPool, told: list[Record]
) -> None:
    Bench(pool, params=SAMPLED).cycle(TRIPLE)
    keys = [key for key, _ in told]
    assert keys == [(("small",), "middle", True), (("small", "middle"), "target", True)]


def test_nodes_that_were_not_verified_are_no_refusals(pool: ModelPool, told: list[Record]) -> None:
    Bench(pool).cycle(PAIR, depth=3, width=3, nodes=2)
    [(_, trees)] = told
    assert int(trees.judged.sum()) == 2 * 3
    assert not (trees.accepted & ~trees.judged).any()
    assert np.isfinite(trees.log_probs).sum() == 9 * 3  # the whole trees are known


@pytest.mark.parametrize("chain", [PAIR, TRIPLE], ids=">".join)
def test_probabilities_of_acceptance_fall_along_every_path(
    chain: Chain, pool: ModelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, Any]] = []
    real = AcceptanceFeedback.accept_prob

    def noting(feedback: AcceptanceFeedback, draft: GroupDraft, tree: Any) -> Any:
        found = real(feedback, draft, tree)
        seen.append((tree, found))
        return found

    monkeypatch.setattr(AcceptanceFeedback, "accept_prob", noting)
    bench = Bench(pool, params=SAMPLED)
    for _ in range(3):
        bench.cycle(chain, depth=4, width=3, nodes=4)
    assert len(seen) == 3
    for tree, found in seen:
        above = np.concatenate((found, np.ones((len(found), 1))), axis=1)  # the last: the root
        parent = np.take_along_axis(above, tree.parents, axis=1)
        assert (found[tree.real] > 0).all()
        assert (found <= parent + 1e-12)[tree.real].all()
        assert not found[~tree.real].any()
