"""Cycles that read prompts end in time for the first tokens that were promised."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from research.sim.roofline import RooflineTime
from specrouter.profile.batch_time import Reserved
from specrouter.slo.serve.load import Prompt
from specrouter.slo.serve.reservation import first_chunk, longest_ms

# A cycle takes 2 ms and 1 for each token.
PLAIN = RooflineTime(((1.0, 0.0, 2.0),))
CHUNK = 6

Asked = list[tuple[int, int]]  # deadline, tokens
asked = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), max_size=4)
besides = st.integers(0, 3).map(lambda tokens: Reserved(PLAIN, tokens))


def prompts(those: Asked) -> list[Prompt]:
    found = [
        Prompt(id=n, deadline_ms=float(ms), tokens=tokens, tpot_ms=100.0)
        for n, (ms, tokens) in enumerate(those)
    ]
    return sorted(found, key=lambda each: each.deadline_ms)


def after(left: list[Prompt], tokens: int, took_ms: float) -> list[Prompt] | None:
    """When a cycle has read so many tokens, by rising deadline; None: somebody is late."""
    found = []
    for each in left:
        chunk = min(tokens, each.tokens)
        tokens -= chunk
        if each.deadline_ms < took_ms:
            return None
        if chunk < each.tokens:
            deadline_ms = each.deadline_ms - took_ms
            found.append(replace(each, tokens=each.tokens - chunk, deadline_ms=deadline_ms))
    return found


def possible(left: list[Prompt], beside: int) -> bool:
    """By trying all sizes of all cycles."""
    if not left:
        return True
    for tokens in range(1, min(CHUNK, sum(each.tokens for each in left)) + 1):
        then = after(left, tokens, 2.0 + tokens + beside)
        if then is not None and possible(then, beside):
            return True
    return False


@given(asked, besides)
def test_prompts_are_in_time_where_any_sizes_of_cycles_bring_them_so(
    those: Asked, times: Reserved
) -> None:
    left = prompts(those)
    found = first_chunk(times, CHUNK, left)
    assert (found is not None) == possible(left, times.tokens)


@given(asked, besides, st.floats(0.0, 1.0))
def test_a_promise_holds_from_cycle_to_cycle_as_long_as_they_may_take(
    those: Asked, times: Reserved, share: float
) -> None:
    """Whatever a cycle takes between what it needs and what it may."""
    left = prompts(those)
    if first_chunk(times, CHUNK, left) is None:
        return
    while left:
        tokens = first_chunk(times, CHUNK, left)
        assert tokens, "all that were in time still are"
        chunks, rest = [], tokens
        for each in left:
            chunks.append(min(rest, each.tokens))
            rest -= chunks[-1]
        least_ms, most_ms = times.ms(tokens), longest_ms(times, CHUNK, left, chunks)
        assert most_ms >= least_ms
        then = after(left, tokens, least_ms + share * (most_ms - least_ms))
        assert then is not None
        left = then


def test_no_cycle_goes_on_beyond_the_first_deadline_to_read_for_others() -> None:
    """By hand: until 8 ms there is room for 6 tokens, of which the first prompt needs 2."""
    first, second = (
        Prompt(id=1, deadline_ms=8.0, tokens=2, tpot_ms=100.0),
        Prompt(id=2, deadline_ms=30.0, tokens=20, tpot_ms=100.0),
    )
    assert first_chunk(PLAIN, 100, [first, second]) == 6
    assert first_chunk(PLAIN, 100, [first, replace(second, deadline_ms=25.0)]) is None
    assert longest_ms(PLAIN, 100, [first, second], [2, 4]) == pytest.approx(8.0)
    alone = longest_ms(PLAIN, 100, [first], [2])
    assert alone == pytest.approx(8.0), "drafts may take what is left until the deadline"
    early = longest_ms(PLAIN, 100, [first, replace(second, deadline_ms=27.0)], [2, 5])
    assert early == pytest.approx(9.0), "at least what it takes"
