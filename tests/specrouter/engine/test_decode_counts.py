"""What decoding has brought is counted by chain, by position and by time, and stays bounded."""

import pytest

from specrouter.engine.decode_counts import (
    OTHER_CHAINS,
    TIME_BOUNDS_S,
    ChainCounts,
    DecodeCounts,
    Gain,
)
from specrouter.request.params import MAX_DEPTH

PAIR = ("small", "big")


@pytest.fixture
def counts() -> DecodeCounts:
    return DecodeCounts()


def test_gains_are_counted_by_chain(counts: DecodeCounts) -> None:
    gain = Gain(PAIR, drafted=4, committed=3, produced=3)
    counts.record([gain, gain, Gain(("big",), 0, 1, 1)], None)
    counts.record([gain], None)
    seen = counts.figures()
    assert seen.chains == {PAIR: ChainCounts(3, 9), ("big",): ChainCounts(1, 1)}
    assert (seen.produced_tokens, seen.drafts) == (10, 3)
    assert (seen.drafted_tokens, seen.accepted_tokens) == (12, 6)


def test_tokens_behind_the_end_of_a_text_are_accepted_and_not_produced(
    counts: DecodeCounts,
) -> None:
    counts.record([Gain(PAIR, drafted=4, committed=5, produced=2)], None)
    seen = counts.figures()
    assert (seen.accepted_tokens, seen.produced_tokens) == (4, 2)


def test_positions_count_drafts_that_were_accepted_at_least_so_far(
    counts: DecodeCounts,
) -> None:
    lengths = [0, 1, 3, 3]
    counts.record([Gain(PAIR, 4, length + 1, length + 1) for length in lengths], None)
    counts.record([Gain(("big",), 0, 1, 1)], None)  # no draft
    assert counts.figures().accepted_at == (3, 2, 2) + (0,) * (MAX_DEPTH - 3)
    counts.record([Gain(PAIR, 20, MAX_DEPTH + 3, 1)], None)  # as verifiers may lengthen it
    assert counts.figures().accepted_at == (4, 3, 3) + (1,) * (MAX_DEPTH - 3)


def test_a_budget_counts_where_there_is_one(counts: DecodeCounts) -> None:
    gain = Gain(PAIR, drafted=4, committed=3, produced=3)
    counts.record([gain, gain], 10)
    counts.record([gain], None)
    seen = counts.figures()
    assert (seen.budget_tokens, seen.budgeted_tokens) == (10, 8)


def test_chains_that_callers_think_up_are_bounded(counts: DecodeCounts) -> None:
    for number in range(70):
        for _ in range(2):
            counts.record([Gain((f"model-{number}", "big"), 1, 2, 2)], None)
    chains = counts.figures().chains
    assert len(chains) == 65
    assert chains["model-63", "big"] == ChainCounts(2, 4)
    assert chains[OTHER_CHAINS] == ChainCounts(12, 24)


def test_times_are_counted_up_to_their_bound(counts: DecodeCounts) -> None:
    for time_ms in (5.0, 5.1, 1e6):
        counts.record_cycle(time_ms / 1000)
    seen = counts.figures().cycle_times
    below = dict(zip(TIME_BOUNDS_S, seen.counts, strict=False))
    assert (below[0.002], below[0.005], below[0.01], below[10.0]) == (0, 1, 2, 2)
    assert (len(seen.counts), seen.counts[-1]) == (len(TIME_BOUNDS_S) + 1, 3)
    assert seen.sum_s == pytest.approx(1000.0101)


def test_tokens_share_the_time_since_those_before(counts: DecodeCounts) -> None:
    counts.record([Gain(PAIR, 4, 3, 3, since_s=0.03), Gain(PAIR, 4, 3, 3)], None)
    seen = counts.figures().between_tokens
    assert dict(zip(TIME_BOUNDS_S, seen.counts, strict=False))[0.01] == seen.counts[-1] == 3
    assert seen.sum_s == pytest.approx(0.03)
