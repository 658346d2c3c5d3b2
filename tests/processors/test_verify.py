"""Verification accepts what the verifier would have said, and says what comes after it."""

import numpy as np
import pytest
import torch

from processors.sampling_row import SamplingSettings
from processors.token_tree import ROOT
from test_support.factories import VOCAB_SIZE
from tests.processors.tiny import GREEDY, PENALIZED, WARM, Bench, FailingModel, SpeechlessModel
from tests.processors.trees import (
    Node,
    Nodes,
    build,
    by_path,
    grown,
    line,
    nodes_of,
    path,
    walk,
)
from tests.processors.verification import assert_logits, forget, verify, verify_path

SETTINGS = pytest.mark.parametrize(
    "settings", [GREEDY, WARM, PENALIZED], ids=["greedy", "sampled", "penalized"]
)


def random_trees(bench: Bench, sizes: dict[int, int], seed: int) -> dict[int, Nodes]:
    random = np.random.default_rng(seed)
    return {
        row: grown(random, size, lambda text, row=row: bench.says(row, text), VOCAB_SIZE)  # type: ignore[misc]
        for row, size in sizes.items()
    }


def naive_path(bench: Bench, row: int, nodes: Nodes) -> list[int]:
    return list(walk(nodes, lambda text: bench.says(row, text)))


def test_the_next_level_verifies_the_choice_too() -> None:
    bench = Bench([6, 4])
    says = [bench.continuation(row, 3) for row in range(2)]
    result = verify_path(bench, {0: says[0][:1], 1: [(says[1][0] + 1) % 320]})
    soft = result.draft(is_path=True)
    walks = nodes_of(soft.tree)
    assert [node.token for node in walks[0]] == says[0][:2]
    assert [node.token for node in walks[1]] == says[1][:1]
    assert soft.tree.is_path
    for place, wanted in ((ROOT, 0), (0, 1), (1, -1)):  # nothing after its own choice
        assert soft.place(0, place) == wanted
    assert soft.place(1, ROOT) == 2
    assert soft.place(1, 0) == -1


def test_a_failed_verification_leaves_the_state_as_before() -> None:
    bench = Bench([6, 4, 9])
    result = verify_path(bench, {0: [3, 4]})
    forget(bench, [0], bench.manager.counts, result.fed)
    before = bench.snapshot()
    good, bench.model = bench.model, FailingModel(bench.model, 1)
    tree = build({0: [Node(ROOT, 5), Node(ROOT, 6), Node(0, 7)], 1: line(6, 7)})
    with pytest.raises(RuntimeError, match="out of memory"):
        verify(bench, tree, prefill={2: 4})
    assert bench.snapshot() == before
    bench.model = good
    assert verify_path(bench, {0: [], 1: []}).path(1).tolist() == bench.continuation(1, 1)


@SETTINGS
@pytest.mark.parametrize("seed", range(5))
def test_random_trees_are_judged_as_by_ordinary_forwards(
    settings: SamplingSettings, seed: int
) -> None:
    bench = Bench([30, 12, 40, 9, 1], settings)
    bench.feed(1, 11)
    bench.feed(2, 7)
    bench.feed(3, 5)  # row 4 has nothing cached
    rows = random_trees(bench, {1: 12, 3: 4 * seed, 4: 9}, seed)
    result = verify(bench, build(rows, spare=seed % 2), prefill={0: 20, 2: 30})
    assert_logits(bench, result)
    fed = 20 + 30 + 1 + 4 + 1 + sum(map(len, rows.values()))
    assert bench.state.cache_mask.sum() == 11 + 7 + 5 + fed
    for index, row in enumerate(rows):
        wanted = naive_path(bench, row, rows[row])
        assert result.path(index).tolist() == wanted
        assert result.accepted[index].sum() == len(wanted) - 1
        says = [bench.says(row, path(rows[row], p)) for p in range(-1, len(rows[row]))]
        assert result.choices[index, : len(says)].tolist() == says
    assert result.sound.all()
    assert bench.state.lengths(np.array([0, 2])).tolist() == [20, 37]


@SETTINGS
@pytest.mark.parametrize("seed", range(4))
def test_the_next_level_gets_the_tree_as_the_verifier_judges_it(
    settings: SamplingSettings, seed: int
) -> None:
    bench = Bench([12, 9, 1], settings)
    rows = random_trees(bench, {0: 10, 1: 0, 2: 5 * seed}, seed)
    result = verify(bench, build(rows, spare=seed % 2), rescore=True)
    drafted = result.draft(is_path=False)
    extended = nodes_of(drafted.tree)  # which asserts that no siblings are equal
    for index, (row, nodes) in enumerate(rows.items()):
        own = by_path(nodes)
        chosen = {(*text, bench.says(row, text)) for text in ((), *own)}
        assert by_path(extended[row]).keys() == own.keys() | chosen
        for place, node in enumerate(extended[row]):
            text = path(extended[row], place)
            assert node.log_prob == pytest.approx(bench.path_log_prob(row, text), abs=1e-9)
            at = drafted.place(index, place)
            assert (at >= 0) == (text in own), "nothing is known after a choice"
            if at >= 0:
                wanted = bench.logits_after(row, text)
                torch.testing.assert_close(drafted.logits[at], wanted, rtol=0, atol=1e-9)
    assert drafted.fed is result.fed
    for limit in range(12):
        chosen_few = nodes_of(drafted.tree.select(np.full(3, limit), np.full(3, 5)))
        for row, few in chosen_few.items():
            known = by_path(extended[row])
            assert len(few) <= limit
            for text, node in by_path(few).items():
                assert (node.log_prob, node.origin) == (known[text].log_prob, known[text].origin)


@pytest.mark.parametrize("settings", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_logits_that_are_not_numbers_spoil_their_own_row_only(settings: SamplingSettings) -> None:
    bench, good = Bench([6, 4], settings), Bench([6, 4], settings)
    tree = build(random_trees(bench, {0: 3, 1: 3}, 1))
    wanted = verify(good, tree)
    bench.model = SpeechlessModel(bench.model)
    result = verify(bench, tree)
    assert result.sound.tolist() == [False, True]
    assert result.path(1).tolist() == wanted.path(1).tolist()
