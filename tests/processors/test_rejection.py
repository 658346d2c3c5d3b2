"""Rejection sampling: what a verifier keeps of drawn drafts, and where it draws itself."""

import dataclasses
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from modelpool.packed_model import PackedModel
from processors.contexts import Contexts
from processors.drafts import DraftResult
from processors.noise import gumbel
from processors.rejection import RejectionSampling
from processors.sampler import Sampler
from processors.sampling_row import SamplingSettings
from processors.token_tree import TokenTree, join
from processors.verify_result import VerifyResult
from test_support.factories import VOCAB_SIZE
from tests.processors.tiny import GREEDY, PENALIZED, WARM, Bench, FailingModel, SpeechlessModel
from tests.processors.verification import (
    assert_logits,
    draft,
    forget,
    path_tree,
    verify,
    verify_by_rejection,
)


def assert_same_result(got: VerifyResult, wanted: VerifyResult) -> None:
    assert np.array_equal(got.accepted, wanted.accepted)
    for index in range(len(got.tree.rows)):
        assert got.path(index).tolist() == wanted.path(index).tolist()
    assert np.array_equal(got.places, wanted.places)
    assert np.array_equal(got.sound, wanted.sound)
    assert np.array_equal(got.fed.flat_slots, wanted.fed.flat_slots)
    torch.testing.assert_close(got.logits, wanted.logits, rtol=0, atol=1e-12)


def drawn_by(drafter: Bench) -> tuple[TokenTree, list[DraftResult]]:
    """Two drafts and their tree, in which a row has no nodes."""
    each = ({0: 4, 3: 2}, {2: 3})
    drafts = [draft(drafter, depths, rule=RejectionSampling()) for depths in each]
    trees = [TokenTree.empty(np.array([1])), *(drafted.tree for drafted in drafts)]
    return join(trees), drafts


@pytest.mark.parametrize("seed", range(4))
def test_without_chance_rejection_is_the_walk(seed: int) -> None:
    lengths = [30, 12, 9, 5, 7]
    bench, other, drafter = Bench(lengths), Bench(lengths), Bench(lengths, seed=1)
    random = np.random.default_rng(seed)
    says = {row: bench.continuation(row, 5) for row in range(5)}
    looked_up = {1: says[1][: seed + 1], 4: [*says[4][:seed], 319, 3]}
    drafts = [
        draft(drafter, {2: 4}),  # of a model that is not the verifier
        draft(Bench(lengths), {3: 3}),  # of the verifier's twin
        DraftResult.without_logits(path_tree(looked_up)),
    ]
    whole = join([drafted.tree for drafted in drafts])
    tree = whole.select(random.integers(1, 5, size=4), np.full(4, 4))
    parts = []
    for drafted in drafts:  # capped as the tree is
        sizes = tree.sizes[np.searchsorted(tree.rows, drafted.tree.rows)]
        cut = drafted.tree.select(sizes, sizes)
        parts.append(DraftResult(cut, drafted.logits, drafted.places, drafted.fed))
    for one in (bench, other):
        one.feed(2, 5)
    got = verify_by_rejection(bench, tree, parts, prefill={0: 20})
    wanted = verify(other, tree, prefill={0: 20})
    assert_same_result(got, wanted)
    assert_logits(bench, got)
    assert bench.snapshot() == other.snapshot()


@pytest.mark.parametrize("settings", [WARM, PENALIZED], ids=["sampled", "penalized"])
def test_a_verifier_keeps_all_that_it_could_have_drawn_itself(settings: SamplingSettings) -> None:
    """Were the distribution after another node taken, of either side, some would be refused."""
    lengths = [12, 9, 5, 7]
    bench, twin = Bench(lengths, settings), Bench(lengths, settings)
    tree, drafts = drawn_by(twin)
    result = verify_by_rejection(bench, tree, drafts)
    assert result.accepted.sum(axis=1).tolist() == [4, 0, 3, 2]
    assert_logits(bench, result)
    for is_hard in (False, True):  # the token after an accepted path is always handed on
        rule = RejectionSampling()
        handed_on = rule.next_draft(result, hard_rejection=is_hard, is_path=False)
        assert handed_on.tree.sizes.tolist() == [5, 1, 4, 3]
        assert handed_on.tree.is_path


def test_rejection_refuses_what_the_verifier_would_never_say() -> None:
    settings = SamplingSettings(temperature=1.0, top_k=3, seed=2)
    bench = Bench([12, 9], settings)
    never = [int(bench.log_probs_after(row).argmin()) for row in range(2)]
    tree = path_tree({0: [never[0], 5], 1: [never[1]]})
    result = verify_by_rejection(bench, tree, [DraftResult.without_logits(tree)])
    assert result.accepted.sum(axis=1).tolist() == [0, 0]
    for row in range(2):
        assert bench.log_probs_after(row)[result.path(row)[0]] > -np.inf


@pytest.mark.parametrize("settings", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_rejection_tells_which_row_was_not_judged_by_numbers(settings: SamplingSettings) -> None:
    bench = Bench([6, 4], settings)
    bench.model = SpeechlessModel(bench.model)
    tree = path_tree({0: [3, 4], 1: [5]})
    result = verify_by_rejection(bench, tree, [DraftResult.without_logits(tree)])
    assert result.sound.tolist() == [False, True]


@pytest.mark.parametrize("settings", [GREEDY, WARM, PENALIZED], ids=["g", "s", "p"])
def test_rejection_judges_in_parts_to_the_same_bits(settings: SamplingSettings) -> None:
    lengths = [12, 9, 5, 7]
    results = []
    tree, drafts = drawn_by(Bench(lengths, settings, seed=1))
    for part in (2**19, 2 * VOCAB_SIZE):
        with mock.patch("processors.logits._CPU_PART", part):
            results.append(verify_by_rejection(Bench(lengths, settings), tree, drafts))
    assert_same_result(results[1], results[0])


def test_rejection_draws_noise_where_a_row_stops_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = [12, 9, 5, 7]
    bench, drafter = Bench(lengths, WARM), Bench(lengths, WARM, seed=1)
    drafted = draft(drafter, {0: 4, 1: 4, 2: 3, 3: 1}, rule=RejectionSampling())
    drawn: list[tuple[int, int]] = []

    def noting(seed: int, position: int, vocab_size: int, *rest: Any, **options: Any) -> Any:
        drawn.append((position, rest[1]))
        return gumbel(seed, position, vocab_size, *rest, **options)

    monkeypatch.setattr("processors.noise.gumbel", noting)
    result = verify_by_rejection(bench, drafted.tree, [drafted])
    begun = bench.output_positions(np.arange(4))
    wanted = [
        (int(at + more), int(at + 1))
        for at, more in zip(begun, result.accepted.sum(axis=1), strict=True)
    ]
    assert drawn == wanted


def test_rejection_hands_on_what_was_accepted_before_a_place_without_a_distribution() -> None:
    lengths = [12, 9]
    before = Bench(lengths).continuation(0, 2)

    def moody(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids[0, -2:].tolist() == before:
            raise LookupError("no more words")
        return scores

    bench = Bench(lengths, dataclasses.replace(GREEDY, logits_processors=(moody,)))
    tree = path_tree({0: [*before, 5, 6], 1: bench.continuation(1, 2)})
    result = verify_by_rejection(bench, tree, [DraftResult.without_logits(tree)])
    assert result.sound.tolist() == [False, True]
    handed_on = RejectionSampling().next_draft(result, hard_rejection=False, is_path=True).tree
    left = handed_on.select(np.full(2, 9), np.full(2, 9))
    assert left.sizes.tolist() == [2, 3]
    assert left.tokens[0, :2].tolist() == before


def test_what_an_intermediate_could_not_draw_is_not_handed_on() -> None:
    lengths = [12, 9]
    bench = Bench(lengths, WARM)
    tree = path_tree({row: bench.continuation(row, 2) for row in range(2)})
    uniforms = Sampler.uniforms

    def failing(sampler: Sampler, contexts: Contexts, purpose: int) -> Any:
        if 0 in contexts.rows:
            raise LookupError("no chance")
        return uniforms(sampler, contexts, purpose)

    with mock.patch.object(Sampler, "uniforms", failing):
        result = verify_by_rejection(bench, tree, [DraftResult.without_logits(tree)])
    assert result.sound.tolist() == [False, True]
    handed_on = RejectionSampling().next_draft(result, hard_rejection=False, is_path=True).tree
    left = handed_on.select(np.full(2, 9), np.full(2, 9))
    assert left.sizes.tolist() == [0, result.accepted.sum(axis=1)[1] + 1]


def test_a_failed_rejection_leaves_the_state_as_before() -> None:
    bench = Bench([6, 4, 9], WARM)
    tree = path_tree({0: [3, 4], 1: [5]})
    drafts = [DraftResult.without_logits(tree)]
    forget(bench, [0, 1], bench.manager.counts, verify(bench, tree).fed)
    before = bench.snapshot()
    good: PackedModel = bench.model
    bench.model = FailingModel(bench.model, 1)
    with pytest.raises(RuntimeError, match="out of memory"):
        verify_by_rejection(bench, tree, drafts, prefill={2: 4})
    assert bench.snapshot() == before
    bench.model = good
    assert_logits(bench, verify_by_rejection(bench, tree, drafts))
