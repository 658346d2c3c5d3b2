"""Grammars prune what was drafted and mask who verifies; rows without one are as they were."""

import dataclasses
import zlib
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from processors.contexts import Contexts
from processors.grammar import Bits, GrammarError, Path, allows, exclude_others, prune
from processors.sampler import Sampler
from processors.sampling_row import SamplingSettings
from processors.token_tree import TokenTree
from processors.verify import VerifyProcessor, VerifyRequest
from test_support.factories import VOCAB_SIZE
from tests.processors.tiny import GREEDY, WARM, Bench
from tests.processors.trees import Nodes, build, by_path, forests, grown, nodes_of, walk

END = 2  # ends a text


class HashGrammar:
    """Allows about half of all ids, by a hash of the whole text; fails behind some texts."""

    def __init__(
        self,
        vocab_size: int = VOCAB_SIZE,
        failing: Sequence[Path] = (),
        binds_drafts: bool = True,
    ) -> None:
        self.binds_drafts = binds_drafts
        self._vocab_size = vocab_size
        self._failing = set(failing)
        self.text: Path = ()

    def advance(self, tokens: list[int]) -> None:
        self.text += tuple(tokens)

    def mask(self, path: Path) -> Bits | None:
        if path in self._failing:
            raise GrammarError("too hard")
        known = self.is_legal(path) and END not in path
        return np.packbits(self.allowed(path), bitorder="little") if known else None

    def is_legal(self, path: Path) -> bool:
        return all(
            self.allowed(path[:place])[token] and END not in path[:place]
            for place, token in enumerate(path)
        )

    def allowed(self, path: Path) -> np.ndarray:
        """[V]"""
        seed = zlib.crc32(repr((*self.text, *path)).encode())
        allowed = np.random.default_rng(seed).random(self._vocab_size) < 0.5
        allowed[END] = True
        return allowed


@given(forests, st.integers(0, 2))
def test_pruning_leaves_exactly_the_nodes_whose_whole_path_is_allowed(
    rows: dict[int, Nodes], spare: int
) -> None:
    grammars = {row: HashGrammar(vocab_size=3) for row in rows if row % 3}
    left = nodes_of(prune(build(rows, spare), grammars))
    for row, nodes in rows.items():
        wanted = set(by_path(nodes))
        if row in grammars:
            wanted = {path for path in wanted if grammars[row].is_legal(path)}
        assert set(by_path(left[row])) == wanted


def test_a_tree_ends_where_its_grammar_fails() -> None:
    """Though the grammar may know more behind it: what stands on a node goes with it."""
    first = int(HashGrammar().allowed(()).argmax())
    tree = TokenTree.path(np.array([0]), np.array([[first, END]]), np.array([2]))
    assert prune(tree, {0: HashGrammar()}).sizes.tolist() == [2]
    assert prune(tree, {0: HashGrammar(failing=[()])}).sizes.tolist() == [0]


def test_what_is_excluded_is_all_but_the_set_bits_and_nan_stays() -> None:
    scores = torch.arange(11.0).repeat(2, 1)
    scores[1, 3] = torch.nan
    allowed = np.zeros((2, 11), dtype=np.bool_)
    allowed[0, [0, 7, 8, 10]] = allowed[1, [2, 9]] = True
    masks = np.packbits(allowed, axis=1, bitorder="little")
    assert allows(masks[0], 8)
    assert not allows(masks[0], 9)
    exclude_others(scores, torch.from_numpy(masks))
    assert scores[0].isfinite().nonzero()[:, 0].tolist() == [0, 7, 8, 10]
    assert scores[1].isfinite().nonzero()[:, 0].tolist() == [2, 9]
    assert scores[1].isnan().nonzero()[:, 0].tolist() == [3]


def with_grammar(settings: SamplingSettings, grammar: HashGrammar) -> SamplingSettings:
    return dataclasses.replace(settings, grammar=grammar)


def random_logits(count: int) -> Tensor:
    return torch.randn(count, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))


def places(sampler: Sampler, rows: list[int], paths: list[Path]) -> Contexts:
    depths = np.array([len(path) for path in paths])
    texts = np.zeros((len(paths), int(depths.max())), dtype=np.int64)
    for line, path in zip(texts, paths, strict=True):
        line[: len(path)] = path
    masks = sampler.masks(np.array(rows), depths, depths, texts)
    wanted = None if masks is None else torch.from_numpy(masks)
    return Contexts(
        rows=np.array(rows),
        positions=depths,
        depths=depths,
        paths=torch.from_numpy(texts),
        masks=wanted,
    )


def some_paths(grammar: HashGrammar) -> list[Path]:
    first, second = np.flatnonzero(grammar.allowed(()))[3:5].tolist()
    return [(), (first,), (second,), (first, int(grammar.allowed((first,)).argmax()))]


@pytest.mark.parametrize("settings", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_a_verifier_chooses_the_best_of_what_is_allowed(settings: SamplingSettings) -> None:
    grammar = HashGrammar()
    sampler, free = Sampler(VOCAB_SIZE, window=16), Sampler(VOCAB_SIZE, window=16)
    sampler.open(0, with_grammar(dataclasses.replace(settings, top_k=0), grammar))
    free.open(0, dataclasses.replace(settings, top_k=0))
    paths = some_paths(grammar)
    contexts = places(sampler, [0] * 4, paths)
    chosen, _ = sampler.choose(random_logits(4), contexts)
    scores = free.scores(random_logits(4), places(free, [0] * 4, paths)).double()
    for index, path in enumerate(paths):
        allowed = torch.from_numpy(grammar.allowed(path))
        assert int(chosen[index]) == int(scores[index].masked_fill(~allowed, -torch.inf).argmax())


@pytest.mark.parametrize("settings", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_neighbours_of_a_grammar_and_drafts_are_as_without_it(settings: SamplingSettings) -> None:
    sampler, free = Sampler(VOCAB_SIZE, window=16), Sampler(VOCAB_SIZE, window=16)
    sampler.open(0, with_grammar(settings, HashGrammar()))
    sampler.open(1, settings)
    for row in range(2):
        free.open(row, settings)
    logits, rows, paths = random_logits(3), [1, 0, 1], [(), (), (5,)]
    alone = free.scores(logits, places(free, rows, paths))
    beside = sampler.scores(logits, places(sampler, rows, paths))
    assert torch.equal(alone[[0, 2]].double(), beside[[0, 2]].double())
    drafts = dataclasses.replace(places(sampler, rows, paths), masks=None)
    for one, other in zip(
        free.rank(logits, drafts, 4), sampler.rank(logits, drafts, 4), strict=True
    ):
        assert torch.equal(one, other)


def test_min_tokens_holds_an_end_back_only_where_something_else_may_follow() -> None:
    class EndingGrammar(HashGrammar):
        def allowed(self, path: Path) -> np.ndarray:
            return np.isin(np.arange(VOCAB_SIZE), [END] if path else [END, 7])

    settings = SamplingSettings(min_tokens=9, end_token_ids=(END,), grammar=EndingGrammar())
    sampler = Sampler(VOCAB_SIZE, window=16)
    sampler.open(0, settings)
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[:, END] = 5.0
    chosen, _ = sampler.choose(logits, places(sampler, [0, 0], [(), (7,)]))
    assert chosen.tolist() == [7, END]


def test_a_failing_grammar_spoils_its_own_places_and_is_reported() -> None:
    sampler = Sampler(VOCAB_SIZE, window=16)
    grammar = HashGrammar()
    good, bad = some_paths(grammar)[1:3]
    sampler.open(0, SamplingSettings(grammar=HashGrammar(failing=[bad])))
    sampler.open(1, GREEDY)
    _, scores = sampler.choose(random_logits(3), places(sampler, [0, 0, 1], [bad, good, bad]))
    assert scores.isfinite().tolist() == [False, True, True]
    assert {row: str(error) for row, error in sampler.take_errors().items()} == {0: "too hard"}


@pytest.mark.parametrize("settings", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_a_verdict_walks_along_what_is_best_of_the_allowed(settings: SamplingSettings) -> None:
    bench = Bench([12, 9], settings)
    grammar = HashGrammar()
    bench.sampler.close(0)
    bench.sampler.open(0, with_grammar(settings, grammar), bench.prompts[0])

    def says(row: int, path: Path) -> int:
        scores = bench.log_probs_after(row, path)
        if row == 0 and grammar.is_legal(path):
            scores = scores.masked_fill(~torch.from_numpy(grammar.allowed(path)), -torch.inf)
        return int(scores.argmax())

    random = np.random.default_rng(4)
    trees = {row: grown(random, 9, partial(says, row), 320) for row in (0, 1)}
    for tree in (build(trees), prune(build(trees), bench.sampler.grammars)):
        request = VerifyRequest(
            tree=tree, output_positions=bench.output_positions(tree.rows), rescore=True
        )
        result = VerifyProcessor(bench.sampler).verify(bench.active, request)
        for row, nodes in trees.items():
            wanted = walk(nodes, partial(says, row))
            assert tuple(result.path(row).tolist()) == wanted
        bench.state.rollback(tree.rows, bench.state.lengths(tree.rows) * 0)
