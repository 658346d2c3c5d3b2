"""Masks are what their definition says, cell for cell, whatever way they are made."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from modelpool.attention.path import PathLayout
from modelpool.attention.row_groups import RowGroup
from modelpool.attention.sdpa import SdpaLayout
from statemgr import ForwardView, ModelState, TreePaths
from tests.kv_layers import kv_layer
from tests.statemgr.trees import feed

ROWS, SLOTS, WIDTH = 5, 256, 4
CPU = torch.device("cpu")
LAYER = kv_layer(CPU, torch.float64, 1, 2)


def from_host(layout: SdpaLayout, values: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(values)


def defined(
    state: ModelState, group: RowGroup, tree: TreePaths | None, window: int | None
) -> NDArray[np.bool_]:
    """[B, Q, S] may the query attend to the slot? One after the other."""
    allowed = np.zeros((group.rows, group.queries, group.length), dtype=np.bool_)
    for index in range(group.rows):
        row = group.first + index
        for query, position in enumerate(group.positions[index].tolist()):
            seen = state.cache_mask[row, : group.length] & (
                state.positions[row, : group.length] <= position
            )
            if window is not None:
                seen &= state.positions[row, : group.length] > position - window
            if tree is not None and position >= 0:
                nodes = seen[tree.starts[row] :]
                nodes &= np.isin(np.arange(len(nodes)), tree.paths[group.source[index, query]])
            if position < 0:
                seen[0] = True
            allowed[index, query] = seen
    return allowed


def assert_as_defined(
    state: ModelState,
    view: ForwardView,
    tree: TreePaths | None,
    window: int | None,
    dtype: torch.dtype,
    repeat: int,
) -> None:
    layout = view.layout(SdpaLayout)
    for group in layout.groups:
        mask = layout.mask(group, repeat, window, dtype, CPU)
        allowed = torch.from_numpy(defined(state, group, tree, window)).repeat(1, repeat, 1)
        wanted = torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, float("-inf"))
        assert mask.dtype == dtype
        assert torch.equal(mask, wanted.unsqueeze(1))
        with mock.patch.object(SdpaLayout, "_to", from_host):  # as an accelerator compares
            there = layout._allowed(group, window, torch.device("cuda"))
        assert torch.equal(there, layout._allowed(group, window, CPU))


def leave_holes(state: ModelState, row: int, siblings: int) -> None:
    """Commits the last of some nodes at one position."""
    one = np.array([row])
    length = state.lengths(one)
    positions = np.repeat(length, siblings)
    slots = state.append(one, np.array([siblings]), np.zeros_like(positions), positions)
    state.commit(one, length, slots[-1:])


def parents_of(draws: list[int]) -> list[int]:
    return [draw % node if node and draw % 3 else -1 for node, draw in enumerate(draws)]


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=ROWS, max_size=ROWS),
    holes=st.lists(st.sampled_from((0, 0, 0, 2, 3)), min_size=ROWS, max_size=ROWS),
    fed=st.dictionaries(st.integers(0, ROWS - 1), st.integers(1, 20), min_size=1),
    parents=st.lists(st.lists(st.integers(0, 9), max_size=WIDTH), min_size=ROWS, max_size=ROWS),
    is_tree=st.booleans(),
    canonical=st.booleans(),
    window=st.sampled_from((None, 1, 3, 60)),
    dtype=st.sampled_from((torch.float64, torch.bfloat16)),
    repeat=st.sampled_from((1, 3)),
)
def test_masks_are_as_defined(
    lengths: list[int],
    holes: list[int],
    fed: dict[int, int],
    parents: list[list[int]],
    is_tree: bool,
    canonical: bool,
    **asked: Any,
) -> None:
    state = ModelState({0: LAYER}, ROWS, SLOTS, canonical)
    everyone = np.arange(ROWS)
    feed(state, everyone, np.array(lengths), [[]] * ROWS)
    for row, siblings in enumerate(holes):
        if siblings:
            leave_holes(state, row, siblings)
    rows = np.array(sorted(fed))
    counts = np.array([fed[row] for row in rows.tolist()])
    nodes = [parents_of(parents[row]) if is_tree else [] for row in rows.tolist()]
    positions, slots, tree = feed(state, rows, counts, nodes)
    total = counts + np.array([len(one) for one in nodes])
    view = state.view(rows, total, positions, slots, tree)
    assert_as_defined(state, view, tree, **asked)


def test_a_state_with_holes_has_no_paths() -> None:
    state = ModelState({0: LAYER}, ROWS, SLOTS, canonical=True)
    feed(state, np.array([0]), np.array([3]), [[]])
    one, place = np.array([1]), np.array([5])
    slots = state.append(np.array([0]), one, place, place)  # in slot 3
    with pytest.raises(AssertionError, match="order of positions"):
        state.view(np.array([0]), one, place, slots).layout(PathLayout).on(CPU)


def test_the_mask_of_rows_without_holes_needs_nothing_of_the_size_of_the_cache_from_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = ModelState({0: LAYER}, ROWS, SLOTS)
    rows, counts = np.arange(2), np.array([200, 200])
    feed(state, rows, counts, [[], []])
    positions, slots, _ = feed(state, rows, np.array([2, 2]), [[], []])
    view = state.view(rows, np.array([2, 2]), positions, slots)
    copied: list[int] = []

    def noting(layout: SdpaLayout, values: NDArray[Any], device: torch.device) -> Tensor:
        copied.append(values.size)
        return from_host(layout, values, device)

    monkeypatch.setattr(SdpaLayout, "_to", noting)
    layout = view.layout(SdpaLayout)
    layout.mask(layout.groups[0], 1, None, torch.float64, CPU)
    assert copied == [4]
