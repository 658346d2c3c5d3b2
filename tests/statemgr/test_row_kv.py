"""What is exported of a row is imported elsewhere bit by bit, or refused with the reason."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from statemgr import KVMismatchError, KVStore, ModelState, RowKV, export_row, import_row
from statemgr.arrays import Ints
from tests.kv_layers import kv_layer

CPU = torch.device("cpu")
SLOTS = 128
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Of each layer KV heads, widths of key and value, and whether this is a part of the key.
SHAPES = ((2, 4, 4, False), (1, 6, 3, False), (1, 6, 4, True), (2, 4, 4, False))
TEXT = np.arange(500, 540)


def make_state(dtype: torch.dtype) -> ModelState:
    layers = dict(enumerate(kv_layer(CPU, dtype, *shape) for shape in SHAPES))
    return ModelState(layers, rows=3, slots=SLOTS)


def fill(state: ModelState, row: int, count: int, seed: int) -> None:
    """Reads so many tokens of `TEXT`: bits of any kind, NaN and infinities among them."""
    numbers = state.append(
        np.array([row]), np.array([count]), TEXT[:count], np.arange(count, dtype=np.int64)
    )
    slots = torch.from_numpy(state.tables.flat(numbers))
    generator = torch.Generator().manual_seed(seed)
    for part in parts(state.store):
        shape = (*part[slots].shape[:-1], part.shape[-1] * part.element_size())
        noise = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        part[slots] = noise.view(part.dtype)


def parts(store: KVStore) -> list[Tensor]:
    return [part for layer in store.own for part in store.layer(layer)]


def bits(state: ModelState, row: int, count: int) -> list[Tensor]:
    """Of a row's first tokens, by position."""
    slots = torch.from_numpy(state.slots_of(row, count))
    return [part[slots].view(torch.uint8) for part in parts(state.store)]


def assert_equal_bits(one: ModelState, other: ModelState, rows: tuple[int, int], n: int) -> None:
    for ours, theirs in zip(bits(one, rows[0], n), bits(other, rows[1], n), strict=True):
        assert torch.equal(ours, theirs)


def exported(dtype: torch.dtype = torch.float32, start: int = 0, stop: int = 9) -> RowKV:
    state = make_state(dtype)
    fill(state, 0, stop, seed=1)
    return export_row(state, 0, start, stop, TEXT, "fp")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(
    count=st.integers(1, 30),
    cuts=st.sets(st.integers(1, 29)),
    rows=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_bits_are_equal_after_an_import_in_any_pieces(
    dtype: torch.dtype, count: int, cuts: set[int], rows: tuple[int, int], seed: int
) -> None:
    """Exported piece by piece while the row reads on, into another place of another store."""
    source, target = make_state(dtype), make_state(dtype)
    fill(source, rows[0], count, seed)
    text = TEXT[: count + 1]
    edges = [0, *sorted(cut for cut in cuts if cut < count), count]
    pieces = [
        export_row(source, rows[0], start, stop, text, "fp") for start, stop in pairwise(edges)
    ]
    assert sum(import_row(target, rows[1], one, text, "fp") for one in pieces) == count
    assert_equal_bits(source, target, rows, count)
    target.check_integrity(rows[1], text)


def test_what_a_row_has_stays_and_only_the_rest_is_added() -> None:
    source, target = make_state(torch.float64), make_state(torch.float64)
    fill(source, 0, 9, seed=1)
    fill(target, 2, 5, seed=2)
    before = bits(target, 2, 5)
    kv = export_row(source, 0, 2, 9, TEXT, "fp")
    assert import_row(target, 2, kv, TEXT, "fp") == 4
    assert all(map(torch.equal, before, bits(target, 2, 5)))
    for ours, theirs in zip(bits(source, 0, 9), bits(target, 2, 9), strict=True):
        assert torch.equal(ours[5:], theirs[5:])
    assert import_row(target, 2, kv, TEXT, "fp") == 0, "there is nothing left to add"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "other"}, "of the model other, not fp"),
        ({"dtype": "bfloat16"}, "in bfloat16, not float32"),
        ({"layers": ((2, 4, 4),)}, r"of layers \(\(2, 4, 4\),\), not \(\(2, 4, 4\), .*"),
    ],
)
def test_another_model_is_refused(change: dict[str, Any], reason: str) -> None:
    kv = exported()
    other = replace(kv, format=replace(kv.format, **change))
    refused(other, reason)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"start": 1}, "from position 1 on, where the row has 0"),
        ({"text": "0"}, "of another text"),
        ({"count": 8}, r"uint8 \(1692,\), not 8 x 188 bytes"),
        ({"data": np.zeros(0, dtype=np.uint8)}, r"uint8 \(0,\), not 9 x 188 bytes"),
    ],
)
def test_what_does_not_follow_a_row_is_refused(change: dict[str, Any], reason: str) -> None:
    refused(replace(exported(), **change), reason)


def test_the_last_token_is_read_by_the_row_itself() -> None:
    refused(exported(), "of 9 tokens, where 9 are committed", TEXT[:9])


def refused(kv: RowKV, reason: str, text: Ints = TEXT) -> None:
    """And the row is as it was."""
    target = make_state(torch.float32)
    with pytest.raises(KVMismatchError, match=f"^{reason}$"):
        import_row(target, 0, kv, text, "fp")
    target.check_free(0)


def test_a_row_that_could_not_be_filled_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_state(torch.float32)

    def fails(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr("statemgr.row_kv._write", fails)
    with pytest.raises(RuntimeError, match="no memory"):
        import_row(target, 0, exported(), TEXT, "fp")
    target.check_free(0)


def test_layers_of_different_dtypes_are_not_exported() -> None:
    dtypes = (torch.float32, torch.bfloat16)
    layers = {number: kv_layer(CPU, dtype, 1, 2) for number, dtype in enumerate(dtypes)}
    state = ModelState(layers, rows=1, slots=SLOTS)
    state.append(np.array([0]), np.array([1]), TEXT[:1], np.array([0]))
    with pytest.raises(ValueError, match="layers of different dtypes: bfloat16, float32"):
        export_row(state, 0, 0, 1, TEXT, "fp")
