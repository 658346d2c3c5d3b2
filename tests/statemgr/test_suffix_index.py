"""A suffix index finds what a search through all texts finds, whatever was appended and dropped."""

from array import array
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from statemgr.suffix_index import MAX_MATCHES, SuffixIndex

ORDERS = (2, 4, 7)
TOKENS = st.lists(st.integers(0, 2), max_size=40)  # few kinds: they repeat
# Texts in pieces, and how many texts are kept after each.
HISTORIES = st.lists(st.tuples(st.lists(TOKENS, max_size=3), st.integers(1, 4)), max_size=6)


def shared_tail(one: list[int], other: list[int]) -> int:
    """How many last tokens two texts share."""
    length = 0
    while length < min(len(one), len(other)) and one[-1 - length] == other[-1 - length]:
        length += 1
    return length


def searched(texts: list[list[int]], context: list[int]) -> list[tuple[int, int, list[int]]]:
    """(length, token, what comes after it) of all occurrences, by looking at every place."""
    for order in reversed(ORDERS):
        found = []
        for text in reversed(texts):
            for place in reversed(range(order, len(text))):
                length = shared_tail(context, text[:place])
                if len(context) >= order and length >= order:
                    found.append((length, text[place], text[place + 1 :]))
        if found:
            return found
    return []


def built(history: list[tuple[list[list[int]], int]]) -> tuple[SuffixIndex, list[list[int]]]:
    """An index, and the texts that it is to keep, the last of which goes on."""
    index, texts = SuffixIndex(ORDERS), list[list[int]]()
    texts.append([])
    for pieces, kept in history:
        for piece in pieces:
            index.append(piece)
            texts[-1] += piece
        index.end_text()
        texts.append([])
        while len(texts) > kept:
            index.drop_text()
            texts.pop(0)
    return index, texts


def texts_of(index: SuffixIndex) -> list[list[int]]:
    """That it keeps, without their ends; the last one goes on."""
    starts, tokens = [start - index._base for start in index._starts], index._tokens.tolist()
    whole = [tokens[start : after - 1] for start, after in pairwise(starts)]
    return [*whole, tokens[starts[-1] :]]


@given(HISTORIES, TOKENS, st.booleans(), TOKENS)
def test_what_is_found_is_what_a_search_finds(
    history: list[tuple[list[list[int]], int]], last: list[int], is_own: bool, other: list[int]
) -> None:
    index, texts = built(history)
    index.append(last)
    texts[-1] += last
    context = texts[-1] if is_own else other
    found = index.matches(array("i", context))
    expected = searched(texts, context)
    # Ends of texts are no followers, but count among the occurrences that are looked at.
    assert len(found) >= min(len(expected), MAX_MATCHES - len(texts))
    for match, (length, token, _) in zip(found, expected, strict=False):
        assert (match.length, index.token(match.place)) == (length, token)


@given(HISTORIES)
def test_texts_are_kept_whole_and_counted(history: list[tuple[list[list[int]], int]]) -> None:
    index, texts = built(history)
    assert texts_of(index) == texts
    assert len(index) == sum(map(len, texts)) + len(texts) - 1
    assert index.tail(3).tolist() == texts[-1][-3:]


@given(HISTORIES)
def test_nothing_is_left_of_texts_that_were_dropped(
    history: list[tuple[list[list[int]], int]],
) -> None:
    index, texts = built(history)
    if texts[-1]:
        index.end_text()
    while len(index._starts) > 1:
        index.drop_text()
    assert len(index) == 0
    assert index.matches(array("i", [0, 0, 0, 0, 0, 0, 0])) == []


def test_the_end_of_a_text_predicts_nothing() -> None:
    index = SuffixIndex()
    index.append([1, 2, 3, 4])
    assert index.matches(array("i", [1, 2, 3, 4])) == []
    index.end_text()
    index.append([5])
    assert index.matches(array("i", [1, 2, 3, 4])) == []
    assert index.matches(array("i", [2, 3, 4, 5])) == []


@given(HISTORIES, TOKENS, TOKENS)
def test_a_match_goes_on_as_long_as_its_text_does(
    history: list[tuple[list[list[int]], int]], last: list[int], other: list[int]
) -> None:
    index, texts = built(history)
    index.append(last)
    texts[-1] += last
    for match, (length, token, after) in zip(
        index.matches(array("i", other)), searched(texts, other), strict=False
    ):
        assert index.further(match, token + 1) is None
        further = index.further(match, token)
        if not after:
            assert further is None
        else:
            assert further is not None
            assert (further.length, index.token(further.place)) == (length + 1, after[0])
