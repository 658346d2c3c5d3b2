"""Of each row: how far its request may go, and how its tokens are chosen."""

from typing import Any

import numpy as np
import pytest

from specrouter.execution.decoding_rows import DecodingRows, sampling_settings
from specrouter.request.params import SamplingParams
from specrouter.request.spec import RequestSpec
from statemgr import StateManager

EOS = frozenset({9})


def prompt(generated: tuple[int, ...] = (), **params: Any) -> RequestSpec:
    return RequestSpec(
        token_ids=(4, 5, 6),
        generated=generated,
        params=SamplingParams(**params),
        speculation=None,
        seed=3,
    )


@pytest.fixture
def manager() -> StateManager:
    return StateManager(2, 64)


@pytest.fixture
def rows(manager: StateManager) -> DecodingRows:
    """Row 0 goes on from an earlier attempt's two tokens, row 1 begins."""
    rows = DecodingRows(manager, 32, EOS, 8)
    for request in (prompt((7, 8), max_new_tokens=6), prompt(max_new_tokens=4, temperature=0.5)):
        row = manager.allocate(request.committed, request.total_tokens)
        assert row is not None
        rows.open(row, request)
    return rows


def test_tokens_of_an_earlier_attempt_and_of_this_one_are_no_longer_remaining(
    rows: DecodingRows, manager: StateManager
) -> None:
    both = np.array([0, 1])
    assert rows.output_positions(both).tolist() == [2, 0]
    assert rows.remaining(both).tolist() == [4, 4]
    assert rows.sampled(both).tolist() == [False, True]
    rows.extend(1, np.array([10, 11, 12]))
    assert manager.committed(1).tolist() == [4, 5, 6, 10, 11, 12]
    assert rows.remaining(both).tolist() == [4, 1]


def test_no_row_is_committed_more_than_its_request_may_have(
    rows: DecodingRows, manager: StateManager
) -> None:
    with pytest.raises(AssertionError, match="deeper than the request may go"):
        rows.extend(1, np.array([10, 11, 12, 13, 14]))
    assert manager.committed(1).tolist() == [4, 5, 6]


@pytest.mark.parametrize(
    ("params", "ends"),
    [
        ({}, (9,)),
        ({"stop_token_ids": (20, 3)}, (3, 9, 20)),
        ({"stop_token_ids": (20,), "ignore_eos": True}, (20,)),
    ],
)
def test_a_text_ends_at_its_stop_ids_and_at_its_end_unless_that_is_ignored(
    params: dict[str, Any], ends: tuple[int, ...]
) -> None:
    assert sampling_settings(prompt(**params), EOS).end_token_ids == ends
