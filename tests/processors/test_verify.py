"""Verification accepts what the verifier would have said, and says what comes after it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from processors.rollback import RollbackProcessor
from processors.sampler import SamplingSettings
from processors.token_tree import TokenTree
from processors.verify import VerifyProcessor, VerifyResult, accepted_lengths
from tests.processors.tiny import GREEDY, WARM, Bench, FailingModel

_small = st.integers(0, 2)


@st.composite
def _rows(draw: st.DrawFn) -> list[tuple[list[int], list[int], int]]:
    """Nodes, choices (one more) and size of each row; all rows are padded to one width."""
    width = draw(st.integers(0, 5))
    row = st.tuples(
        st.lists(_small, min_size=width, max_size=width),
        st.lists(_small, min_size=width + 1, max_size=width + 1),
        st.integers(0, width),
    )
    return draw(st.lists(row, min_size=1, max_size=4))


@settings(max_examples=300, deadline=None, database=None)
@given(_rows())
def test_accepted_is_the_common_prefix_of_nodes_and_choices(
    rows: list[tuple[list[int], list[int], int]],
) -> None:
    drafts = np.array([row[0] for row in rows], dtype=np.int64).reshape(len(rows), -1)
    choices = np.array([row[1] for row in rows], dtype=np.int64)
    sizes = np.array([row[2] for row in rows], dtype=np.int64)
    for (nodes, chosen, size), accepted in zip(
        rows, accepted_lengths(drafts, choices, sizes).tolist(), strict=True
    ):
        assert 0 <= accepted <= size
        assert nodes[:accepted] == chosen[:accepted]
        assert accepted == size or nodes[accepted] != chosen[accepted]


def tree_of(nodes: dict[int, list[int]]) -> TokenTree:
    rows = sorted(nodes)
    width = max(len(part) for part in nodes.values())
    tokens = torch.tensor([nodes[row] + [0] * (width - len(nodes[row])) for row in rows])
    sizes = np.array([len(nodes[row]) for row in rows])
    return TokenTree(np.array(rows), tokens.long().reshape(len(rows), width), sizes)


def verify(
    bench: Bench, nodes: dict[int, list[int]], prefill: dict[int, int] | None = None
) -> VerifyResult:
    tree = tree_of(nodes)
    chunks = prefill or {}
    return VerifyProcessor().verify(
        bench.model,
        bench.state,
        bench.manager,
        bench.sampler,
        tree,
        bench.output_positions(tree.rows),
        (np.array(list(chunks), dtype=np.int64), np.array(list(chunks.values()), dtype=np.int64)),
    )


@pytest.mark.parametrize("settings", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_a_path_is_the_models_own_continuation(settings: SamplingSettings) -> None:
    bench = Bench([6, 11, 4, 1], settings)
    says = [bench.continuation(row, 5) for row in range(4)]
    wrong = (says[1][2] + 1) % 320
    nodes = {0: says[0][:4], 1: [*says[1][:2], wrong, 5], 2: [], 3: [(says[3][0] + 1) % 320]}
    result = verify(bench, nodes)
    assert result.accepted.tolist() == [4, 2, 0, 0]
    for row in range(4):
        path = result.path(row).tolist()
        assert path == says[row][: len(path)]
    assert result.pack_tokens == (6 + 4) + (11 + 4) + 4 + (1 + 1)


def test_verified_logits_are_those_of_the_ordinary_forward() -> None:
    bench = Bench([6, 3])
    nodes = {0: [5, 6], 1: [7]}
    result = verify(bench, nodes)
    parts = [bench.logits(bench.prompts[row] + nodes[row])[-len(nodes[row]) - 1 :] for row in nodes]
    torch.testing.assert_close(result.logits, torch.cat(parts), rtol=0, atol=1e-10)


def test_prefill_chunks_travel_along_and_change_no_choice() -> None:
    bench, alone = Bench([30, 6, 25, 9]), Bench([30, 6, 25, 9])
    wanted = verify(alone, {1: [5, 6], 3: [7]})
    result = verify(bench, {1: [5, 6], 3: [7]}, prefill={0: 20, 2: 24})
    assert np.array_equal(result.choices, wanted.choices)
    torch.testing.assert_close(result.logits, wanted.logits, rtol=0, atol=1e-12)
    assert bench.state.lengths(np.array([0, 2])).tolist() == [20, 24]
    RollbackProcessor().rollback(bench.state, bench.manager, np.array([1, 3]))
    bench.manager.check_integrity()
    says = bench.continuation(0, 1)
    assert verify(bench, {0: []}).path(0).tolist() == says


def test_accepted_nodes_stay_cached_and_the_rest_is_forgotten() -> None:
    bench = Bench([6])
    says = bench.continuation(0, 6)
    result = verify(bench, {0: [*says[:2], (says[2] + 1) % 320]})
    bench.manager.extend(0, result.path(0))
    RollbackProcessor().rollback(bench.state, bench.manager, np.array([0]))
    bench.manager.check_integrity()
    assert bench.state.lengths(np.array([0])).tolist() == [6 + 2]
    assert verify(bench, {0: []}).path(0).tolist() == says[3:4]


def test_the_next_level_verifies_the_choice_unless_rejection_is_hard() -> None:
    bench = Bench([6, 4])
    says = [bench.continuation(row, 3) for row in range(2)]
    result = verify(bench, {0: says[0][:1], 1: [(says[1][0] + 1) % 320]})
    soft, hard = result.next_tree(hard_rejection=False), result.next_tree(hard_rejection=True)
    assert soft.flat(torch.device("cpu")).tolist() == [*says[0][:2], says[1][0]]
    assert hard.flat(torch.device("cpu")).tolist() == says[0][:1]
    assert hard.sizes.tolist() == [1, 0]


def test_a_failed_verification_leaves_the_state_as_before() -> None:
    bench = Bench([6, 4, 9])
    verify(bench, {0: [3, 4]})
    RollbackProcessor().rollback(bench.state, bench.manager, np.array([0]))
    before = bench.snapshot()
    good, bench.model = bench.model, FailingModel(bench.model, 1)
    with pytest.raises(RuntimeError, match="out of memory"):
        verify(bench, {0: [5], 1: [6, 7]}, prefill={2: 4})
    assert bench.snapshot() == before
    assert bench.state.store.is_finite(np.arange(bench.manager.rows * bench.manager.slots))
    bench.model = good
    assert verify(bench, {0: [], 1: []}).path(1).tolist() == bench.continuation(1, 1)
