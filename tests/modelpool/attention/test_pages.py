"""Plans of attention by pages are what is written out token by token, slot by slot."""

import numpy as np
from hypothesis import given

from modelpool.attention.pages import PageTable, is_causal, packed_mask
from tests.modelpool.attention.packs import (
    Row,
    firsts_of,
    pack_rows_of,
    packs,
    paths_of,
    visible,
    windows,
)


@given(packs)
def test_pages_of_a_row_are_its_slots_in_their_order(rows: list[Row]) -> None:
    table = PageTable.of(pack_rows_of(rows))
    for index, (first, row) in enumerate(zip(firsts_of(rows).tolist(), rows, strict=True)):
        start, stop = table.page_starts[index : index + 2]
        assert table.pages[start:stop].tolist() == [first + slot for slot in range(row.length)]
        assert table.last_lengths[index] == (1 if row.length else 0)
        start, stop = table.query_starts[index : index + 2]
        assert stop - start == row.count
        start, stop = table.mask_starts[index : index + 2]
        assert 8 * (stop - start) - 8 < row.count * row.length <= 8 * (stop - start)
    arrays = vars(table).values()
    assert {array.dtype for array in arrays} == {np.dtype(np.int32)}
    assert len(table.pages) == table.page_starts[-1]
    assert [table.query_starts[0], table.page_starts[0], table.mask_starts[0]] == [0, 0, 0]


@given(packs, windows)
def test_bits_are_what_each_token_sees_and_zeros_behind(
    rows: list[Row], window: int | None
) -> None:
    """Trees and texts, rows without tokens, windows; what paths hold behind their ends is any.
    FlashInfer's own packing is numpy's, row by row, the lowest bit first."""
    asked = pack_rows_of(rows)
    table = PageTable.of(asked)
    packed = packed_mask(asked, table, paths_of(rows), window).numpy()
    wanted = list[int]()
    for row in rows:
        bits = np.array(visible(row, window), dtype=np.bool_).reshape(-1)
        wanted += np.packbits(bits, bitorder="little").tolist()
    assert packed.dtype == np.uint8
    assert packed.tolist() == wanted
    assert len(packed) == table.mask_starts[-1]


@given(packs)
def test_texts_without_a_window_are_causal_from_the_right(rows: list[Row]) -> None:
    """Where no bits are given, token i of n sees the slots up to `length - n + i`."""
    if not is_causal(pack_rows_of(rows), None):
        assert any(row.parents for row in rows)
        return
    for row in rows:
        wanted = np.tri(row.count, row.length, row.length - row.count, dtype=np.bool_)
        assert visible(row, None) == wanted.tolist()


def test_a_window_needs_bits() -> None:
    assert not is_causal(pack_rows_of([Row(0, 3, 2, ())]), 4)
