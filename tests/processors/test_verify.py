"""Verification accepts what the verifier would have said, and says what comes after it."""

import dataclasses
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from modelpool.packed_model import PackedModel
from processors.draft import DraftProcessor
from processors.noise import gumbel
from processors.pack import FedTree
from processors.proposal import Proposal
from processors.rollback import RollbackProcessor
from processors.sampling_row import SamplingSettings
from processors.token_tree import ROOT, TokenTree, join
from processors.verify import Verdict, VerifyProcessor
from tests.modelpool.factories import VOCAB_SIZE
from tests.processors.tiny import (
    GREEDY,
    PENALIZED,
    WARM,
    Bench,
    FailingModel,
    SpeechlessModel,
)
from tests.processors.trees import Node, Nodes, Path, build, by_path, grown, nodes_of, path, walk

Ints = NDArray[np.int64]

SETTINGS = pytest.mark.parametrize(
    "settings", [GREEDY, WARM, PENALIZED], ids=["greedy", "sampled", "penalized"]
)


def line(tokens: list[int]) -> Nodes:
    return [Node(place - 1, token, 0.0, place) for place, token in enumerate(tokens)]


def path_tree(nodes: dict[int, list[int]]) -> TokenTree:
    return build({row: line(tokens) for row, tokens in nodes.items()})


def chunks_of(prefill: dict[int, int] | None) -> tuple[Ints, Ints]:
    chunks = prefill or {}
    return np.array(list(chunks), dtype=np.int64), np.array(list(chunks.values()), dtype=np.int64)


def verify(
    bench: Bench, tree: TokenTree, prefill: dict[int, int] | None = None, rescore: bool = False
) -> Verdict:
    return VerifyProcessor().verify(
        bench.model,
        bench.state,
        bench.manager,
        bench.sampler,
        tree,
        bench.output_positions(tree.rows),
        chunks_of(prefill),
        rescore=rescore,
    )


def verify_path(
    bench: Bench, nodes: dict[int, list[int]], prefill: dict[int, int] | None = None
) -> Verdict:
    return verify(bench, path_tree(nodes), prefill)


def verify_by_rejection(
    bench: Bench,
    tree: TokenTree,
    proposals: list[Proposal],
    prefill: dict[int, int] | None = None,
) -> Verdict:
    return VerifyProcessor().verify_by_rejection(
        bench.model,
        bench.state,
        bench.manager,
        bench.sampler,
        tree,
        bench.output_positions(tree.rows),
        proposals,
        level=1,
        prefill=chunks_of(prefill),
    )


def draft(bench: Bench, rows: list[int], depths: list[int], purpose: int = 0) -> Proposal:
    which = np.array(rows)
    return DraftProcessor().draft(
        bench.model,
        bench.state,
        bench.manager,
        bench.sampler,
        which,
        bench.output_positions(which),
        np.array(depths),
        width=1,
        purpose=purpose,
    )


def forget(bench: Bench, rows: list[int], bases: Ints, fed: FedTree) -> None:
    which = np.array(rows)
    RollbackProcessor().rollback(bench.state, bench.manager, which, bases[which], [fed])
    bench.manager.check_integrity()


def random_trees(bench: Bench, sizes: dict[int, int], seed: int) -> dict[int, Nodes]:
    random = np.random.default_rng(seed)
    return {
        row: grown(random, size, lambda text, row=row: bench.says(row, text), VOCAB_SIZE)  # type: ignore[misc]
        for row, size in sizes.items()
    }


def naive_path(bench: Bench, row: int, nodes: Nodes) -> list[int]:
    return list(walk(nodes, lambda text: bench.says(row, text)))


def assert_logits(bench: Bench, verdict: Verdict) -> None:
    """After the root and after every node they are the ordinary forward's."""
    seen = []
    for index, (row, nodes) in enumerate(nodes_of(verdict.tree).items()):
        for place in range(-1, len(nodes)):
            at = int(verdict.places[index, place + 1])
            wanted = bench.logits_after(row, path(nodes, place))
            torch.testing.assert_close(verdict.logits[at], wanted, rtol=0, atol=1e-9)
            seen.append(at)
        assert np.all(verdict.places[index, len(nodes) + 1 :] == -1)
    assert seen == list(range(len(verdict.logits)))


@SETTINGS
def test_a_path_is_the_models_own_continuation(settings: SamplingSettings) -> None:
    bench = Bench([6, 11, 4, 1], settings)
    says = [bench.continuation(row, 5) for row in range(4)]
    wrong = (says[1][2] + 1) % 320
    nodes = {0: says[0][:4], 1: [*says[1][:2], wrong, 5], 2: [], 3: [(says[3][0] + 1) % 320]}
    verdict = verify_path(bench, nodes)
    assert verdict.lengths.tolist() == [4, 2, 0, 0]
    for row in range(4):
        text = verdict.path(row).tolist()
        assert len(text) == verdict.lengths[row] + 1
        assert text == says[row][: len(text)]
    assert verdict.sound.all()
    assert verdict.pack_tokens == (6 + 4) + (11 + 4) + 4 + (1 + 1)


def test_verified_logits_are_those_of_the_ordinary_forward() -> None:
    bench = Bench([6, 3])
    verdict = verify_path(bench, {0: [5, 6], 1: [7]})
    nodes = {0: [5, 6], 1: [7]}
    parts = [bench.logits(bench.prompts[row] + nodes[row])[-len(nodes[row]) - 1 :] for row in nodes]
    torch.testing.assert_close(verdict.logits, torch.cat(parts), rtol=0, atol=1e-10)


def test_prefill_chunks_travel_along_and_change_no_choice() -> None:
    bench, alone = Bench([30, 6, 25, 9]), Bench([30, 6, 25, 9])
    wanted = verify_path(alone, {1: [5, 6], 3: [7]})
    verdict = verify_path(bench, {1: [5, 6], 3: [7]}, prefill={0: 20, 2: 24})
    assert np.array_equal(verdict.choices, wanted.choices)
    torch.testing.assert_close(verdict.logits, wanted.logits, rtol=0, atol=1e-12)
    assert bench.state.lengths(np.array([0, 2])).tolist() == [20, 24]
    forget(bench, [1, 3], bench.manager.counts, verdict.fed)
    says = bench.continuation(0, 1)
    assert verify_path(bench, {0: []}).path(0).tolist() == says


def test_accepted_nodes_stay_cached_and_the_rest_is_forgotten() -> None:
    bench = Bench([6])
    says = bench.continuation(0, 6)
    verdict = verify_path(bench, {0: [*says[:2], (says[2] + 1) % 320]})
    bases = bench.manager.counts.copy()
    bench.commit(0, verdict.path(0).tolist())
    forget(bench, [0], bases, verdict.fed)
    assert bench.state.lengths(np.array([0])).tolist() == [6 + 2]
    assert verify_path(bench, {0: []}).path(0).tolist() == says[3:4]


def test_the_next_level_verifies_the_choice_unless_rejection_is_hard() -> None:
    bench = Bench([6, 4])
    says = [bench.continuation(row, 3) for row in range(2)]
    verdict = verify_path(bench, {0: says[0][:1], 1: [(says[1][0] + 1) % 320]})
    soft = verdict.proposal(hard_rejection=False, is_path=True)
    for is_path in (False, True):
        hard = verdict.proposal(hard_rejection=True, is_path=is_path)
        assert {row: list(by_path(n)) for row, n in nodes_of(hard.tree).items()} == {
            0: [(says[0][0],)],
            1: [],
        }
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
    verdict = verify_path(bench, {0: [3, 4]})
    forget(bench, [0], bench.manager.counts, verdict.fed)
    before = bench.snapshot()
    good, bench.model = bench.model, FailingModel(bench.model, 1)
    tree = build({0: [Node(ROOT, 5), Node(ROOT, 6), Node(0, 7)], 1: line([6, 7])})
    with pytest.raises(RuntimeError, match="out of memory"):
        verify(bench, tree, prefill={2: 4})
    assert bench.snapshot() == before
    assert bench.holds_numbers
    bench.model = good
    assert verify_path(bench, {0: [], 1: []}).path(1).tolist() == bench.continuation(1, 1)


@SETTINGS
@pytest.mark.parametrize("canonical", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_random_trees_are_judged_as_by_ordinary_forwards(
    settings: SamplingSettings, canonical: bool, seed: int
) -> None:
    bench = Bench([30, 12, 40, 9, 1], settings, canonical=canonical)
    bench.feed(1, 11)
    bench.feed(2, 7)
    bench.feed(3, 5)  # row 4 has nothing cached
    rows = random_trees(bench, {1: 12, 3: 4 * seed, 4: 9}, seed)
    verdict = verify(bench, build(rows, spare=seed % 2), prefill={0: 20, 2: 30})
    assert_logits(bench, verdict)
    assert verdict.pack_tokens == 20 + 30 + 1 + 4 + 1 + sum(map(len, rows.values()))
    for index, row in enumerate(rows):
        wanted = naive_path(bench, row, rows[row])
        assert verdict.path(index).tolist() == wanted
        assert verdict.lengths[index] == len(wanted) - 1
        says = [bench.says(row, path(rows[row], p)) for p in range(-1, len(rows[row]))]
        assert verdict.choices[index, : len(says)].tolist() == says
    assert verdict.sound.all()
    assert bench.state.lengths(np.array([0, 2])).tolist() == [20, 37]


@SETTINGS
@pytest.mark.parametrize("seed", range(4))
def test_the_next_level_gets_the_tree_as_the_verifier_judges_it(
    settings: SamplingSettings, seed: int
) -> None:
    bench = Bench([12, 9, 1], settings)
    rows = random_trees(bench, {0: 10, 1: 0, 2: 5 * seed}, seed)
    verdict = verify(bench, build(rows, spare=seed % 2), rescore=True)
    proposal = verdict.proposal(hard_rejection=False, is_path=False)
    extended = nodes_of(proposal.tree)  # which asserts that no siblings are equal
    for index, (row, nodes) in enumerate(rows.items()):
        own = by_path(nodes)
        chosen = {(*text, bench.says(row, text)) for text in ((), *own)}
        assert by_path(extended[row]).keys() == own.keys() | chosen
        for place, node in enumerate(extended[row]):
            text = path(extended[row], place)
            assert node.log_prob == pytest.approx(bench.path_log_prob(row, text), abs=1e-9)
            at = proposal.place(index, place)
            assert (at >= 0) == (text in own), "nothing is known after a choice"
            if at >= 0:
                wanted = bench.logits_after(row, text)
                torch.testing.assert_close(proposal.logits[at], wanted, rtol=0, atol=1e-9)
    assert proposal.fed is verdict.fed
    for limit in range(12):
        chosen_few = nodes_of(proposal.tree.select(np.full(3, limit), np.full(3, 5)))
        for row, few in chosen_few.items():
            known = by_path(extended[row])
            assert len(few) <= limit
            for text, node in by_path(few).items():
                assert (node.log_prob, node.origin) == (known[text].log_prob, known[text].origin)


def test_without_rescoring_nothing_is_said_of_probabilities() -> None:
    bench = Bench([12, 9])
    verdict = verify(bench, build(random_trees(bench, {0: 5, 1: 3}, 0)))
    assert not verdict.choice_log_probs.any()
    assert not verdict.node_log_probs.any()


@pytest.mark.parametrize("settings", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_logits_that_are_not_numbers_spoil_their_own_row_only(settings: SamplingSettings) -> None:
    bench, good = Bench([6, 4], settings), Bench([6, 4], settings)
    tree = build(random_trees(bench, {0: 3, 1: 3}, 1))
    wanted = verify(good, tree)
    bench.model = SpeechlessModel(bench.model)
    verdict = verify(bench, tree)
    assert verdict.sound.tolist() == [False, True]
    assert verdict.path(1).tolist() == wanted.path(1).tolist()


@SETTINGS
@pytest.mark.parametrize("canonical", [False, True])
def test_trees_follow_one_another_as_if_each_were_the_first(
    settings: SamplingSettings, canonical: bool
) -> None:
    bench = Bench([12, 5, 30, 1], settings, canonical=canonical)
    random = np.random.default_rng(8)
    everyone = [0, 1, 2, 3]
    for cycle in range(4):
        rows = random_trees(bench, {row: int(random.integers(0, 14)) for row in everyone}, cycle)
        verdict = verify(bench, build(rows))
        assert_logits(bench, verdict)
        bases = bench.manager.counts.copy()
        for row, nodes in rows.items():  # a random path, as if another had chosen
            text: Path = path(nodes, int(random.integers(ROOT, len(nodes))))
            bench.commit(row, [*text, int(random.integers(VOCAB_SIZE))])
        forget(bench, everyone, bases, verdict.fed)
        assert np.array_equal(bench.state.lengths(np.arange(4)), bench.manager.counts[:4] - 1)
    assert_logits(bench, verify_path(bench, {row: [] for row in everyone}))


def assert_same_verdict(got: Verdict, wanted: Verdict) -> None:
    assert np.array_equal(got.accepted, wanted.accepted)
    for index in range(len(got.tree.rows)):
        assert got.path(index).tolist() == wanted.path(index).tolist()
    assert np.array_equal(got.places, wanted.places)
    assert np.array_equal(got.sound, wanted.sound)
    assert got.pack_tokens == wanted.pack_tokens
    assert np.array_equal(got.fed.flat_slots, wanted.fed.flat_slots)
    torch.testing.assert_close(got.logits, wanted.logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_without_chance_rejection_is_the_walk(seed: int) -> None:
    lengths = [30, 12, 9, 5, 7]
    bench, other, drafter = Bench(lengths), Bench(lengths), Bench(lengths, seed=1)
    random = np.random.default_rng(seed)
    says = {row: bench.continuation(row, 5) for row in range(5)}
    looked_up = {1: says[1][: seed + 1], 4: [*says[4][:seed], 319, 3]}
    proposals = [
        draft(drafter, [2], [4]),  # of a model that is not the verifier
        draft(Bench(lengths), [3], [3]),  # of the verifier's twin
        Proposal.without_logits(path_tree(looked_up)),
    ]
    whole = join([proposal.tree for proposal in proposals])
    tree = whole.select(random.integers(1, 5, size=4), np.full(4, 4))
    parts = []
    for proposal in proposals:  # capped as the tree is
        sizes = tree.sizes[np.searchsorted(tree.rows, proposal.tree.rows)]
        cut = proposal.tree.select(sizes, sizes)
        parts.append(Proposal(cut, proposal.logits, proposal.places, proposal.fed))
    for one in (bench, other):
        one.feed(2, 5)
    got = verify_by_rejection(bench, tree, parts, prefill={0: 20})
    wanted = verify(other, tree, prefill={0: 20})
    assert_same_verdict(got, wanted)
    assert_logits(bench, got)
    assert bench.snapshot() == other.snapshot()


@pytest.mark.parametrize("settings", [WARM, PENALIZED], ids=["sampled", "penalized"])
def test_a_verifier_keeps_all_that_it_could_have_drawn_itself(settings: SamplingSettings) -> None:
    """Were the distribution after another node taken, of either side, some would be refused."""
    lengths = [12, 9, 5, 7]
    bench, twin = Bench(lengths, settings), Bench(lengths, settings)
    proposals = [draft(twin, [0, 3], [4, 2], purpose=1), draft(twin, [2], [3], purpose=1)]
    tree = join([proposal.tree for proposal in proposals] + [TokenTree.empty(np.array([1]))])
    verdict = verify_by_rejection(bench, tree, proposals)
    assert verdict.lengths.tolist() == [4, 0, 3, 2]
    assert_logits(bench, verdict)
    for is_hard, more in ((False, 1), (True, 0)):
        handed_on = verdict.proposal(is_hard, is_path=True)
        assert handed_on.tree.sizes.tolist() == [4 + more, more, 3 + more, 2 + more]


def test_rejection_refuses_what_the_verifier_would_never_say() -> None:
    settings = SamplingSettings(temperature=1.0, top_k=3, seed=2)
    bench = Bench([12, 9], settings)
    never = [int(bench.log_probs_after(row).argmin()) for row in range(2)]
    tree = path_tree({0: [never[0], 5], 1: [never[1]]})
    verdict = verify_by_rejection(bench, tree, [Proposal.without_logits(tree)])
    assert verdict.lengths.tolist() == [0, 0]
    for row in range(2):
        assert bench.log_probs_after(row)[verdict.path(row)[0]] > -np.inf


@pytest.mark.parametrize("settings", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_rejection_tells_which_row_was_not_judged_by_numbers(settings: SamplingSettings) -> None:
    bench = Bench([6, 4], settings)
    bench.model = SpeechlessModel(bench.model)
    tree = path_tree({0: [3, 4], 1: [5]})
    verdict = verify_by_rejection(bench, tree, [Proposal.without_logits(tree)])
    assert verdict.sound.tolist() == [False, True]


@pytest.mark.parametrize("settings", [GREEDY, WARM, PENALIZED], ids=["g", "s", "p"])
def test_rejection_judges_in_parts_to_the_same_bits(settings: SamplingSettings) -> None:
    lengths = [12, 9, 5, 7]
    drafter, verdicts = Bench(lengths, settings, seed=1), []
    proposals = [draft(drafter, [0, 3], [4, 2], purpose=1), draft(drafter, [2], [3], purpose=1)]
    tree = join([proposal.tree for proposal in proposals] + [TokenTree.empty(np.array([1]))])
    for part in (2**19, 2 * VOCAB_SIZE):
        with mock.patch("processors.logits._CPU_PART", part):
            verdicts.append(verify_by_rejection(Bench(lengths, settings), tree, proposals))
    assert_same_verdict(verdicts[1], verdicts[0])


def test_rejection_draws_noise_where_a_row_stops_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = [12, 9, 5, 7]
    bench, drafter = Bench(lengths, WARM), Bench(lengths, WARM, seed=1)
    proposal = draft(drafter, [0, 1, 2, 3], [4, 4, 3, 1], purpose=1)
    drawn: list[tuple[int, int]] = []

    def noting(seed: int, position: int, vocab_size: int, *rest: Any, **options: Any) -> Any:
        drawn.append((position, rest[1]))
        return gumbel(seed, position, vocab_size, *rest, **options)

    monkeypatch.setattr("processors.noise.gumbel", noting)
    verdict = verify_by_rejection(bench, proposal.tree, [proposal])
    begun = bench.output_positions(np.arange(4))
    wanted = [
        (int(at + more), int(at + 1)) for at, more in zip(begun, verdict.lengths, strict=True)
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
    verdict = verify_by_rejection(bench, tree, [Proposal.without_logits(tree)])
    assert verdict.sound.tolist() == [False, True]
    handed_on = verdict.proposal(hard_rejection=False, is_path=True).tree
    left = handed_on.select(np.full(2, 9), np.full(2, 9))
    assert left.sizes.tolist() == [2, 3]
    assert left.tokens[0, :2].tolist() == before


def test_a_failed_rejection_leaves_the_state_as_before() -> None:
    bench = Bench([6, 4, 9], WARM)
    tree = path_tree({0: [3, 4], 1: [5]})
    proposals = [Proposal.without_logits(tree)]
    forget(bench, [0, 1], bench.manager.counts, verify(bench, tree).fed)
    before = bench.snapshot()
    good: PackedModel = bench.model
    bench.model = FailingModel(bench.model, 1)
    with pytest.raises(RuntimeError, match="out of memory"):
        verify_by_rejection(bench, tree, proposals, prefill={2: 4})
    assert bench.snapshot() == before
    assert bench.holds_numbers
    bench.model = good
    assert_logits(bench, verify_by_rejection(bench, tree, proposals))
