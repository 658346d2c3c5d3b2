"""A pack is one forward: of each row what its state lacks, then the nodes of its tree."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from processors.pack import PackPlan, run_pack
from processors.token_tree import ROOT, TokenTree
from tests.processors.tiny import Bench, FailingModel
from tests.processors.trees import Node, Nodes, build, path

NOBODY = TokenTree.empty(np.zeros(0, dtype=np.int64))
TREES: dict[int, Nodes] = {0: [Node(ROOT, 5), Node(ROOT, 6), Node(1, 7)], 2: [Node(ROOT, 9)]}


def plan(
    committed: dict[int, int], wanted: list[bool], earlier: list[int] | None = None
) -> PackPlan:
    rows, counts = (np.array(list(part)) for part in (committed, committed.values()))
    asked = None if earlier is None else np.array(earlier)
    return PackPlan(rows, counts, np.array(wanted), asked)


def test_logits_come_after_roots_and_nodes_row_after_row() -> None:
    bench = Bench([4, 6, 3])
    result = run_pack(bench.active, plan({0: 4, 1: 2, 2: 3}, [True, False, True]), build(TREES))
    places = [(row, node) for row, nodes in TREES.items() for node in range(ROOT, len(nodes))]
    assert len(result.logits) == len(places)
    for logits, (row, node) in zip(result.logits, places, strict=True):
        wanted = bench.logits_after(row, path(TREES[row], node))
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-10)
    assert bench.state.lengths(np.arange(3)).tolist() == [4 + 2, 2, 3 + 1]  # to the deepest nodes


def test_logits_of_earlier_tokens_are_handed_out_apart_from_the_wanted_ones() -> None:
    bench = Bench([5, 6, 4])
    given = plan({0: 5, 1: 3, 2: 4}, [True, False, False], earlier=[2, 1, 0])
    result = run_pack(bench.active, given, NOBODY)
    whole = {row: bench.logits(bench.prompts[row]) for row in (0, 1)}
    torch.testing.assert_close(result.logits, whole[0][4:5], rtol=0, atol=1e-10)
    wanted = torch.cat((whole[0][2:4], whole[1][2:3]))
    torch.testing.assert_close(result.earlier, wanted, rtol=0, atol=1e-10)


def test_a_pack_that_fails_leaves_the_state_as_before() -> None:
    bench = Bench([4, 6, 3])
    bench.feed(1, 2)
    before, bench.model = bench.snapshot(), FailingModel(bench.model, 1)
    with pytest.raises(RuntimeError, match="out of memory"):
        run_pack(bench.active, plan({0: 4, 1: 2, 2: 3}, [True] * 3), build(TREES))
    assert bench.snapshot() == before


def test_hidden_states_of_a_pack_stand_beside_its_logits_where_a_drafter_reads_them() -> None:
    bench, layers = Bench([4, 6, 3]), (0, 2)
    given, tree = plan({0: 4, 1: 2, 2: 3}, [True, False, True]), build(TREES)
    run_pack(bench.active, given, tree)
    assert not bench.active.state.hidden._passes
    bench = Bench([4, 6, 3])
    run_pack(replace(bench.active, hidden=layers), given, tree)
    [(_, _, hidden)] = bench.active.state.hidden._passes
    texts = [(row, bench.prompts[row][:count]) for row, count in ((0, 4), (1, 2), (2, 3))]
    wanted = []
    for row, prompt in texts:
        wanted.append(bench.hidden(prompt, layers))
        paths = [path(TREES[row], node) for node in range(len(TREES.get(row, ())))]
        wanted += [bench.hidden([*prompt, *each], layers)[-1:] for each in paths]
    torch.testing.assert_close(hidden, torch.cat(wanted), rtol=0, atol=1e-10)
