"""vLLM's and Sarathi-Serve's admission, by their definitions."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from research.sim.baseline_admission import decode_first, prefill_first
from tests.specrouter.slo.test_admission import request as usual_request
from tests.specrouter.slo.test_admission import view
from tests.specrouter.views import Entry

lengths = st.lists(st.integers(0, 60), max_size=8)


def request(number: int, left: int = 0, **others: Any) -> Entry:
    return usual_request(number, number, left, kv_tokens=left + 21, **others)


def decoding(count: int) -> list[Entry]:
    return [request(100 + at, row=at) for at in range(count)]


def test_while_prompts_are_read_nobody_decodes() -> None:
    found = prefill_first(64)(view([request(0, 9), request(1, 19)], decoding(3)))
    assert found.admitted == (0, 1)
    assert found.chunks == {0: 10, 1: 20}, "whole, with the token that follows"
    assert found.paused == {100, 101, 102}


def test_without_prompts_all_decode() -> None:
    found = prefill_first(64)(view([], decoding(3)))
    assert (found.admitted, found.chunks, found.paused) == ((), {}, frozenset())


def test_prompts_are_never_cut_and_one_that_is_too_long_comes_alone() -> None:
    found = prefill_first(64)(view([request(0, 99), request(1, 9)], decoding(1)))
    assert (found.admitted, found.chunks) == ((0,), {0: 100})


@given(lengths, st.integers(1, 120), st.integers(0, 8))
def test_prefill_first_reads_whole_prompts_in_order_within_the_batch(
    left: list[int], batch: int, rows: int
) -> None:
    waiting = [request(number, tokens) for number, tokens in enumerate(left)]
    found = prefill_first(batch)(view(waiting, [], rows))
    assert list(found.admitted) == list(range(len(found.admitted))), "in the order of arrival"
    total = sum(left[each] + 1 for each in found.admitted)
    assert total <= batch or len(found.admitted) == 1
    after = len(found.admitted)
    if after < min(rows, len(left)):
        assert total + left[after] + 1 > batch, "the next one would not have fitted"


def test_a_request_that_awaits_its_first_token_only_is_no_decoding_one() -> None:
    last = request(5, row=3, awaits_first=True)
    found = prefill_first(64)(view([], [*decoding(2), last]))
    assert found.chunks == {}
    assert found.paused == {100, 101}


@given(lengths, st.integers(0, 8), st.integers(1, 64))
def test_decode_first_leaves_prompts_what_the_decoding_ones_do_not_take(
    left: list[int], others: int, batch: int
) -> None:
    waiting = [request(number, tokens) for number, tokens in enumerate(left)]
    found = decode_first(batch)(view(waiting, decoding(others)))
    alone = others + sum(not tokens for tokens in left)
    assert sum(found.chunks.values()) == min(
        max(0, batch - alone), sum(tokens + 1 for tokens in left if tokens)
    )
    assert found.paused == frozenset()
    cut = [number for number, tokens in found.chunks.items() if tokens <= left[number]]
    assert cut in ([], list(found.chunks)[-1:]), "only the last one's chunk is not its prompt"
