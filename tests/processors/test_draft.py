"""Drafting proposes what stepwise ordinary forwards and the sampler would say."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from processors.drafts import DraftResult
from processors.errors import NonFiniteLogits
from processors.pack import NO_SLOT
from processors.sampling_row import SamplingSettings
from tests.processors.tiny import (
    GREEDY,
    PENALIZED,
    WARM,
    Bench,
    FailingModel,
    SpeechlessModel,
)
from tests.processors.trees import Path, by_path, nodes_of, path
from tests.processors.verification import draft, forget

NARROW = SamplingSettings(temperature=1.0, top_k=2, seed=4)  # fewer tokens than the beam is wide
SETTINGS = pytest.mark.parametrize(
    "settings", [GREEDY, WARM, PENALIZED, NARROW], ids=["greedy", "sampled", "penalized", "narrow"]
)


def naive_beam(bench: Bench, row: int, depth: int, width: int) -> dict[Path, float]:
    """Paths of all nodes and their log-probabilities, the impossible left out."""
    beam: dict[Path, float] = {(): 0.0}
    found: dict[Path, float] = {}
    for _ in range(depth):
        grown: dict[Path, float] = {}
        for text, so_far in beam.items():
            after = bench.log_probs_after(row, text)
            for token in after.topk(width).indices.tolist():
                grown[(*text, token)] = so_far + float(after[token])
        best = sorted(grown, key=lambda text: -grown[text])[:width]
        beam = {text: grown[text] for text in best if grown[text] > -np.inf}
        found.update(beam)
    return found


def naive_tree(bench: Bench, row: int, branching: Sequence[int]) -> dict[Path, float]:
    """Of a fixed form: each node's best children, and their paths' log-probabilities."""
    level: dict[Path, float] = {(): 0.0}
    found: dict[Path, float] = {}
    for children in branching:
        grown: dict[Path, float] = {}
        for text, so_far in level.items():
            best = bench.log_probs_after(row, text).topk(children)
            for token, log_prob in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                if log_prob > -np.inf:
                    grown[(*text, token)] = so_far + log_prob
        found.update(grown)
        level = grown
    return found


def possible(result: DraftResult) -> dict[int, dict[Path, float]]:
    """By row: paths of the nodes that may be verified, and their log-probabilities."""
    tree = result.tree.keep(result.tree.real & np.isfinite(result.tree.log_probs))
    return {
        row: {text: node.log_prob for text, node in by_path(nodes).items()}
        for row, nodes in nodes_of(tree).items()
    }


def assert_logits(bench: Bench, result: DraftResult) -> None:
    """After the root, and after every node that was fed, they are the ordinary forward's."""
    for index, (row, nodes) in enumerate(nodes_of(result.tree).items()):
        deepest = int(result.tree.depths[index].max())
        for place in range(-1, len(nodes)):
            text = path(nodes, place)
            at = result.place(index, place)
            assert (at < 0) == (len(text) == deepest)
            if at >= 0:
                wanted = bench.logits_after(row, text)
                torch.testing.assert_close(result.logits[at], wanted, rtol=0, atol=1e-10)


@SETTINGS
@pytest.mark.parametrize(
    ("width", "depths"), [(1, [4, 1, 3, 2]), (3, [4, 1, 3, 2]), (2, [3, 3, 3, 3]), (5, [2] * 4)]
)
def test_a_tree_is_that_of_a_naive_beam_search(
    settings: SamplingSettings, width: int, depths: list[int]
) -> None:
    bench = Bench([7, 1, 20, 3], settings)
    bench.feed(2, 12)  # rows lag by different counts
    result = draft(bench, dict(enumerate(depths)), width)
    assert result.tree.sizes.tolist() == [depth * width for depth in depths]
    assert np.array_equal(result.tree.depths.max(axis=1), depths)
    assert result.tree.is_path == (width == 1)
    for row, nodes in nodes_of(result.tree).items():
        found = {text: node.log_prob for text, node in by_path(nodes).items()}
        for text, log_prob in found.items():
            assert log_prob == pytest.approx(bench.path_log_prob(row, text), abs=1e-9)
        possible = {text: log_prob for text, log_prob in found.items() if log_prob > -np.inf}
        assert possible == pytest.approx(naive_beam(bench, row, depths[row], width), abs=1e-9)
        assert [node.origin for node in nodes] == list(range(len(nodes)))
    assert_logits(bench, result)


SPECINFER = (1, 1, 3, 1, 1, 1, 1, 1)


@SETTINGS
@pytest.mark.parametrize("branching", [SPECINFER, (2, 1, 2), (3, 1), (1, 2, 2, 1), (4,), (1, 1)])
def test_a_tree_of_a_fixed_form_has_the_best_children_of_each_node(
    settings: SamplingSettings, branching: tuple[int, ...]
) -> None:
    bench = Bench([7, 1, 20], settings)
    bench.feed(2, 12)
    width = int(np.prod(branching))
    result = draft(bench, dict.fromkeys(range(3), len(branching)), width, branching=branching)
    for row, found in possible(result).items():
        assert found == pytest.approx(naive_tree(bench, row, branching), abs=1e-9)


def test_a_fixed_forms_missing_places_are_not_taken_for_a_token() -> None:
    """Their token is 0, and so is what the model says here."""
    bench = Bench([5, 9], SamplingSettings(logit_bias=((0, 100.0),)))
    bases = bench.manager.counts.copy()
    result = draft(bench, {0: 5, 1: 5}, 3, branching=SPECINFER)
    for row, committed in enumerate(([0, 0, 319], [0, 0, 0, 0])):
        assert tuple(committed[:2]) in possible(result)[row]
        bench.commit(row, committed)
    forget(bench, [0, 1], bases, result.fed)
    assert bench.state.lengths(np.arange(2)).tolist() == (bases[:2] + np.array([2, 3])).tolist()
    assert_logits(bench, draft(bench, {0: 2, 1: 2}, 3))


@pytest.mark.parametrize("width", [1, 3])
def test_all_nodes_but_the_deepest_are_fed_and_known_to_the_state(width: int) -> None:
    bench = Bench([7, 5, 20])
    result = draft(bench, {0: 3, 2: 4}, width)
    fed = result.fed
    assert fed.tree is result.tree
    deepest = result.tree.depths.max(axis=1, keepdims=True)
    here = fed.flat_slots != NO_SLOT
    assert np.array_equal(here, result.tree.real & (result.tree.depths < deepest))
    slots = fed.flat_slots[here]
    assert len(set(slots.tolist())) == len(slots)
    assert np.array_equal(bench.state.cache_tokens.reshape(-1)[slots], result.tree.tokens[here])
    roots = (bench.manager.counts[fed.tree.rows] - 1)[:, None]
    positions = (roots + result.tree.depths)[here]
    assert np.array_equal(bench.state.positions.reshape(-1)[slots], positions)


@pytest.mark.parametrize("width", [1, 3])
def test_what_was_committed_of_a_draft_stays_cached(width: int) -> None:
    random = np.random.default_rng(3)
    bench = Bench([5, 9, 4], WARM)
    for _ in range(4):
        bases = bench.manager.counts.copy()
        result = draft(bench, {0: 4, 1: 2, 2: 3}, width)
        kept = []
        for row, nodes in nodes_of(result.tree).items():
            text = path(nodes, int(random.integers(len(nodes))))
            deepest = max(map(len, by_path(nodes)))
            bench.commit(row, [*text, 319])
            kept.append(bases[row] + min(len(text), deepest - 1))
        forget(bench, [0, 1, 2], bases, result.fed)
        assert bench.state.lengths(np.arange(3)).tolist() == kept
    assert_logits(bench, draft(bench, {0: 2, 1: 2, 2: 2}, width=3))


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("fails_at", [1, 2, 4])
def test_a_failed_draft_leaves_the_state_as_before_once_it_is_rolled_back(
    fails_at: int, width: int
) -> None:
    bench = Bench([7, 3])
    good, bench.model = bench.model, FailingModel(bench.model, fails_at)
    with pytest.raises(RuntimeError, match="out of memory"):
        draft(bench, {0: 4, 1: 4}, width)
    forget(bench, [0, 1], bench.manager.counts.copy())
    bench.model = good
    again = draft(bench, {0: 4, 1: 4})
    assert again.tree.tokens.tolist() == [bench.continuation(row, 4) for row in range(2)]


@pytest.mark.parametrize("settings", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("depth", "width"), [(1, 1), (3, 1), (3, 3)])
def test_logits_that_are_not_numbers_are_an_error(
    settings: SamplingSettings, depth: int, width: int
) -> None:
    bench = Bench([7, 3], settings)
    bench.model = SpeechlessModel(bench.model)
    with pytest.raises(NonFiniteLogits, match="not numbers") as raised:
        draft(bench, {0: depth, 1: depth}, width)
    assert raised.value.rows.tolist() == [0]
