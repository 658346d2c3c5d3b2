"""A pack is one forward: of each row what its state lacks, then the nodes of its tree."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from processors.pack import NO_SLOT, PackPlan, run_pack, tree_contexts
from processors.rollback import RollbackProcessor
from processors.token_tree import ROOT, TokenTree
from tests.processors.tiny import GREEDY, PENALIZED, Bench, FailingModel
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


def test_the_fed_tree_tells_where_each_node_is() -> None:
    bench = Bench([4, 6, 3])
    tree = build(TREES, spare=1)
    fed = run_pack(bench.active, plan({0: 4, 2: 3}, [True, True]), tree).fed
    assert (fed.flat_slots[~tree.real] == NO_SLOT).all()
    slots = fed.flat_slots[tree.real]
    assert bench.state.cache_tokens.reshape(-1)[slots].tolist() == tree.tokens[tree.real].tolist()
    roots = bench.manager.counts[tree.rows] - 1
    positions = (roots[:, None] + tree.depths)[tree.real]
    assert bench.state.positions.reshape(-1)[slots].tolist() == positions.tolist()


def test_a_pack_that_fails_leaves_the_state_as_before() -> None:
    bench = Bench([4, 6, 3])
    bench.feed(1, 2)
    before, bench.model = bench.snapshot(), FailingModel(bench.model, 1)
    with pytest.raises(RuntimeError, match="out of memory"):
        run_pack(bench.active, plan({0: 4, 1: 2, 2: 3}, [True] * 3), build(TREES))
    assert bench.snapshot() == before


def test_contexts_stand_after_roots_and_nodes() -> None:
    bench = Bench([4, 6, 3], PENALIZED)  # whose penalties look at paths
    tree = build(TREES)
    found = tree_contexts(bench.sampler, tree, np.array([10, 20]), torch.device("cpu"))
    assert found.rows.tolist() == [0, 0, 0, 0, 2, 2]
    assert found.depths.tolist() == [0, 1, 1, 2, 0, 1]
    assert found.positions.tolist() == [10, 11, 11, 12, 20, 21]
    assert found.paths is not None
    paths = [p[:d].tolist() for p, d in zip(found.paths, found.depths.tolist(), strict=True)]
    assert paths == [[], [5], [6], [6, 7], [], [9]]


def test_paths_are_left_out_where_nobody_looks_at_them() -> None:
    bench = Bench([4, 6, 3], GREEDY)
    found = tree_contexts(bench.sampler, build(TREES), np.array([1, 2]), torch.device("cpu"))
    assert found.paths is None
    assert found.masks is None


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


def test_hidden_states_of_committed_tokens_are_told() -> None:
    """Those of a path of the tree, moved into the order of positions, among them."""
    bench, layers, row = Bench([4]), (1, 2), np.array([0])
    active = replace(bench.active, hidden=layers)
    fed = run_pack(active, plan({0: 4}, [True]), build({0: TREES[0]})).fed
    bases = bench.manager.counts[row]
    bench.commit(0, [6, 7, 8])
    rollback = RollbackProcessor()
    kept = rollback.kept(bench.manager, row, bases, [fed])
    rollback.rollback(bench.state, bench.manager, row, bases, kept)
    wanted = bench.hidden([*bench.prompts[0], 6, 7], layers)
    ((_, positions, states),) = bench.state.hidden.take_committed()
    torch.testing.assert_close(states, wanted[positions], rtol=0, atol=1e-10)
    assert positions[-1] == len(wanted) - 1
