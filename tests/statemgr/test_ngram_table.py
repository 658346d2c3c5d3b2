"""Predictions follow from the text alone: what repeats is expected, nothing is impossible."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from statemgr import NgramTable
from statemgr.ngram_table import MAX_CANDIDATES, MAX_ORDER
from statemgr.text_table import whole_distribution
from tests.yardstick import timed

VOCAB = 12
TEXTS = st.lists(st.integers(0, VOCAB - 1), max_size=60)


def read(tokens: list[int], vocab_size: int = VOCAB, row: int = 0) -> NgramTable:
    """A table that has read one row's text at once."""
    table = NgramTable(vocab_size)
    table.open(row)
    table.sync(row, np.array(tokens, dtype=np.int64))
    return table


def predict(tokens: list[int], suffix: list[int]) -> dict[int, float]:
    ids, probabilities = read(tokens).predict(0, suffix)
    return dict(zip(ids.tolist(), probabilities.tolist(), strict=True))


def test_what_followed_before_is_expected_again() -> None:
    found = predict([1, 2, 3, 4, 5, 6, 1, 2, 3, 4], [1, 2, 3, 4])
    assert list(found) == [5]
    assert found[5] > 0.8


def test_a_longer_context_is_believed_more() -> None:
    text = [1, 2, 3, 4, 5]
    chances = [predict(text, text[4 - order : 4])[5] for order in range(1, 5)]
    assert chances == sorted(chances)
    assert chances[0] < 0.3 < 0.8 < chances[-1]


def test_a_longer_context_overrules_a_shorter_one() -> None:
    text = [7, 1, 2, 8, 1, 3, 9, 1, 3, 8, 1, 3, 7, 1, 2]
    assert next(iter(predict(text, [9, 7, 1]))) == 2
    assert next(iter(predict(text, [0, 0, 1]))) == 3


def test_of_successors_seen_equally_often_the_last_one_wins() -> None:
    assert list(predict([1, 2, 1, 3, 1, 4], [1])) == [4, 3, 2]
    assert list(predict([1, 4, 1, 2, 1, 3], [1])) == [3, 2, 4]


def test_more_sightings_beat_the_most_recent_one() -> None:
    assert next(iter(predict([1, 2, 1, 2, 1, 3], [1]))) == 2


def test_the_last_token_alone_predicts_nothing() -> None:
    assert predict([1, 2, 3], [2, 3]) == {}
    assert predict([], []) == {}
    assert predict([1, 2], []) == {}


def test_candidates_are_few_and_the_best() -> None:
    ids = list(range(1, 41))
    text = [token for follower in [*ids, 7, 7] for token in (0, follower)]
    found, probabilities = read(text, vocab_size=50).predict(0, [0])
    assert len(found) == MAX_CANDIDATES
    assert found[0] == 7
    assert set(found.tolist()) <= set(ids)
    assert (np.diff(probabilities) <= 0).all()


def test_a_row_is_forgotten_when_it_is_closed_or_opened_again() -> None:
    table = read([1, 2, 1, 2], row=3)
    table.open(5)
    assert len(table.predict(3, [1])[0]) == 1
    assert len(table.predict(5, [1])[0]) == 0
    table.open(3)
    assert len(table.predict(3, [1])[0]) == 0
    table.close(3)
    table.close(3)
    with pytest.raises(KeyError):
        table.predict(3, [1])


def test_a_text_that_shrinks_is_noticed() -> None:
    with pytest.raises(AssertionError, match="shrank"):
        read([1, 2, 3]).sync(0, np.array([1, 2]))


@given(TEXTS, st.lists(st.integers(0, VOCAB - 1), max_size=6))
def test_a_distribution_is_positive_and_holds_the_candidates(
    tokens: list[int], path: list[int]
) -> None:
    table = read(tokens)
    ids, probabilities = table.predict(0, tokens + path)
    whole = whole_distribution(ids, probabilities, VOCAB)
    assert whole.shape == (VOCAB,)
    assert (whole > 0).all()
    assert whole.sum() == pytest.approx(1.0, abs=1e-12)
    assert np.array_equal(whole[ids], probabilities)
    assert len(np.unique(np.delete(whole, ids))) <= 1


@given(TEXTS, TEXTS)
def test_candidates_are_what_followed_the_last_token(tokens: list[int], path: list[int]) -> None:
    text = tokens + path
    followers = {b for a, b in pairwise(tokens) if a == text[-1]}
    assert set(read(tokens).predict(0, text)[0].tolist()) == followers


@given(TEXTS, TEXTS)
def test_nothing_before_the_longest_context_matters(tokens: list[int], suffix: list[int]) -> None:
    table = read(tokens)
    found, expected = table.predict(0, suffix), table.predict(0, suffix[-MAX_ORDER:])
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.timing
def test_reading_a_thousand_tokens_takes_milliseconds() -> None:
    tokens = np.random.default_rng(0).integers(0, 4096, 1000).tolist()
    assert timed(lambda tokens: read(tokens, 4096), [tokens]).yardsticks < 4.0


def expecting(prompt: list[int], expected: list[int], *parts: list[int]) -> NgramTable:
    """A table that has read a prompt and an output, part by part."""
    table, text = NgramTable(VOCAB), list[int]()
    table.open(0, len(prompt), expected)
    for part in parts:
        text += part
        table.sync(0, np.array(text, dtype=np.int64))
    return table


def test_what_is_expected_of_the_output_follows_the_prompt() -> None:
    table = expecting([1, 2, 3], [4, 5, 6, 7], [1, 2, 3])
    for suffix, follower in (([1, 2, 3], 4), ([2, 3, 4], 5), ([4, 5, 6], 7)):
        ids, probabilities = table.predict(0, suffix)
        assert ids[0] == follower
        assert probabilities[0] > 0.5


def test_what_is_expected_counts_more_than_what_was_seen_once() -> None:
    table = expecting([1, 2, 3, 0, 1, 2, 4], [0, 1, 2, 5, 6], [1, 2, 3, 0, 1, 2, 4])
    assert table.predict(0, [0, 1, 2])[0].tolist() == [5, 4, 3]


def test_the_output_goes_on_to_be_read() -> None:
    table = expecting([1, 2], [9, 9], [1, 2], [5, 6, 7], [5, 6])
    assert table.predict(0, [5, 6])[0][0] == 7


@given(TEXTS, TEXTS, TEXTS, st.integers(0, 60), st.integers(0, 60))
def test_with_an_expectation_too_it_does_not_matter_how_the_text_arrived(
    prompt: list[int], expected: list[int], output: list[int], first: int, second: int
) -> None:
    text = prompt + output
    first, second = sorted((min(first, len(text)), min(second, len(text))))
    whole = expecting(prompt, expected, text)
    parts = expecting(prompt, expected, text[:first], text[first:second], text[second:])
    for suffix in ([], text[-1:], text[-4:], [1], [2, 3], expected[-2:]):
        for one, other in zip(whole.predict(0, suffix), parts.predict(0, suffix), strict=True):
            np.testing.assert_array_equal(one, other)
