"""Predictions of quoted text: the longest quotations decide, and only what may be quoted counts."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from statemgr import OutputStore, SuffixTable
from statemgr.suffix_table import Place

VOCAB = 12
TEXTS = st.lists(st.integers(0, VOCAB - 1), max_size=60)
PATHS = st.lists(st.integers(0, VOCAB - 1), max_size=6)


def after(table: SuffixTable, text: list[int], path: list[int], row: int = 0) -> Place:
    """Where a path leads that goes on from a row's text."""
    where = table.end(row, np.array(text, dtype=np.int64))
    for token in path:
        where = table.after(row, where, token)
    return where


def predicted(
    text: list[int],
    path: list[int] | None = None,
    expected: list[int] | None = None,
    outputs: OutputStore | None = None,
    tenant: str | None = None,
) -> dict[int, float]:
    """Of a text that is a prompt as a whole."""
    table = SuffixTable(VOCAB, outputs)
    table.open(0, len(text), expected or [], tenant)
    ids, probabilities = table.predict(0, after(table, text, path or []))
    return dict(zip(ids.tolist(), probabilities.tolist(), strict=True))


def test_a_longer_quotation_is_believed_more() -> None:
    phrase = [*range(12), *range(12)]
    chances = []
    for length in (2, 4, 8, 16):
        text = [*phrase, 7, *phrase[-length:]]
        [(token, chance), *_] = predicted([11, *text] if length == 16 else text).items()
        assert token == 7
        chances.append(chance)
    assert chances == sorted(chances)
    assert chances[0] < 0.4 < 0.95 < chances[-1]


def test_the_longest_quotation_decides_against_many_short_ones() -> None:
    short = [token for _ in range(6) for token in (0, 8, 9, 3)]
    text = [1, 2, 4, 5, 6, 7, 8, 9, 5, *short, 1, 2, 4, 5, 6, 7, 8, 9]
    assert next(iter(predicted(text))) == 5


def test_a_path_is_followed_and_left_for_another() -> None:
    text = [1, 2, 3, 4, 5, 0, 3, 9, 10, 1, 2]
    assert list(predicted(text)) == [3]
    assert list(predicted(text, [3, 4])) == [5]
    assert list(predicted(text, [3, 9])) == [10], "the text goes on otherwise, and is looked up"
    assert list(predicted(text, [7])) == []


def test_what_is_expected_follows_the_prompt_and_outweighs_what_was_seen_once() -> None:
    assert next(iter(predicted([1, 2, 3], expected=[4, 5, 6]))) == 4
    assert list(predicted([1, 2, 3], [4, 5], expected=[4, 5, 6])) == [6]
    seen = predicted([1, 2, 7, 9, 3], [1, 2], expected=[0, 1, 2, 8])
    assert seen[8] > seen[7]


def test_outputs_of_the_same_tenant_are_quoted_and_no_others() -> None:
    outputs = OutputStore(1000)
    outputs.keep("ours", [1, 2, 3, 4, 5, 6, 7])
    assert list(predicted([0, 2, 3, 4, 5], outputs=outputs, tenant="ours")) == [6]
    for tenant in ("theirs", "", None):
        assert predicted([0, 2, 3, 4, 5], outputs=outputs, tenant=tenant) == {}


def test_an_output_that_makes_room_is_not_quoted() -> None:
    outputs = OutputStore(64 + 1 + 10)
    outputs.keep("", [1, 2, 3, 4, 5, 6])
    assert list(predicted([2, 3, 4, 5], outputs=outputs, tenant="")) == [6]
    outputs.keep("", [7, 8, 9, 10, 11, 7])
    assert predicted([2, 3, 4, 5], outputs=outputs, tenant="") == {}
    assert list(predicted([8, 9, 10, 11], outputs=outputs, tenant="")) == [7]


def test_a_text_that_shrinks_is_noticed_and_a_closed_row_is_forgotten() -> None:
    table = SuffixTable(VOCAB)
    table.open(0)
    table.end(0, np.array([1, 2, 3]))
    with pytest.raises(AssertionError, match="shrank"):
        table.end(0, np.array([1, 2]))
    table.close(0)
    table.close(0)
    with pytest.raises(KeyError):
        table.end(0, np.array([1, 2]))


@given(TEXTS, TEXTS, TEXTS, PATHS, st.lists(st.integers(0, 120), max_size=4))
def test_how_a_text_arrived_does_not_matter(
    prompt: list[int], expected: list[int], output: list[int], path: list[int], cuts: list[int]
) -> None:
    text, found = prompt + output, []
    for pieces in ([], sorted(cuts)):
        table = SuffixTable(VOCAB)
        table.open(0, len(prompt), expected)
        for cut in pieces:
            table.end(0, np.array(text[:cut], dtype=np.int64))
        found.append(table.predict(0, after(table, text, path)))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@given(TEXTS, PATHS, st.lists(TEXTS, max_size=3))
def test_probabilities_are_positive_and_the_best_stands_first(
    text: list[int], path: list[int], earlier: list[list[int]]
) -> None:
    outputs = OutputStore(10_000)
    for tokens in earlier:
        outputs.keep("", tokens)
    table = SuffixTable(VOCAB, outputs)
    table.open(0, len(text), tenant="")
    ids, probabilities = table.predict(0, after(table, text, path))
    assert (probabilities > 0).all()
    assert probabilities.sum() < 1.0
    assert (np.diff(probabilities) <= 0).all()
    assert len(set(ids.tolist())) == len(ids)
    everything = [[*text, *path], *earlier]
    followers = {(a, b) for one in everything for a, b in pairwise(one)}
    assert all(((text + path)[-1], token) in followers for token in ids.tolist())
