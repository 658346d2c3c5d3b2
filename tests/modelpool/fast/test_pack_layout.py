"""A pass's index arrays in one buffer: where they stand, and what fills them up."""

import dataclasses

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from modelpool.attention.path import PackPlaces
from modelpool.fast.pack_layout import Pack, PackLayout
from tests.modelpool.fast.passes import pack_of


@st.composite
def a_pack(draw: st.DrawFn) -> Pack:
    tokens = draw(st.integers(1, 20))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    numbers = random.integers(0, 2**30, (4, tokens)).astype(np.int32)
    path: Tensor | None = None
    if draw(st.booleans()):
        width = draw(st.integers(1, 6))
        path = torch.from_numpy(random.integers(0, 99, (tokens, width)).astype(np.int32))
    index = torch.from_numpy(random.integers(0, tokens, draw(st.integers(1, tokens))))
    ids = torch.from_numpy(random.integers(0, 200_000, tokens))
    tables = random.integers(0, 99, (draw(st.integers(1, 4)), draw(st.integers(1, 5))))
    return Pack(ids, PackPlaces(numbers, tables.astype(np.int32), 16, path, 9), index)


@given(a_pack())
def test_what_is_read_is_what_was_written(pack: Pack) -> None:
    layout = PackLayout.of(pack)
    buffer = torch.full((layout.size + 3,), -1, dtype=torch.int32)
    layout.fill(buffer.numpy(), pack)
    assert all(view.storage_offset() % 4 == 0 for view in layout.views(buffer)), "16 bytes"
    inputs = layout.inputs(buffer, longest=9)
    assert inputs.tokens.tolist() == pack.tokens.tolist()
    assert inputs.logit_index.tolist() == pack.logit_index.tolist()
    paths = inputs.paths
    places = torch.stack((inputs.slots, paths.rows, paths.positions, paths.tails))
    assert places.tolist() == pack.places.numbers.tolist()
    assert paths.tables.tolist() == pack.places.tables.tolist()
    assert (paths.block_slots, paths.longest) == (16, 9)
    assert inputs.positions is paths.positions
    if pack.places.path is not None:
        assert torch.equal(paths.path, pack.places.path)
    assert (buffer[layout.size :] == -1).all()


@given(a_pack(), st.integers(0, 9), st.integers(0, 9))
def test_a_larger_layout_is_filled_up_with_copies_of_the_last(
    pack: Pack, more: int, wider: int
) -> None:
    own = PackLayout.of(pack)
    layout = PackLayout(
        tokens=own.tokens + more, path=own.path + wider, logits=own.tokens + more,
        rows=own.rows + more, blocks=own.blocks + wider, block_slots=own.block_slots,
    )  # fmt: skip
    buffer = torch.full((layout.size,), -1, dtype=torch.int32)
    layout.fill(buffer.numpy(), pack)
    filled = layout.views(buffer)
    small = torch.full((own.size,), -1, dtype=torch.int32)
    own.fill(small.numpy(), pack)
    exact = own.views(small)
    for there, here in zip(filled, exact, strict=True):
        width = here.shape[1] if here.dim() > 1 else None
        part = there if width is None else there[:, :width]
        assert torch.equal(part[: len(here)], here)
        assert (part[len(here) :] == here[-1]).all()
        assert width is None or not there[:, width:].any()


def test_what_only_the_device_knows_is_left_out_on_the_host_and_put_in_there() -> None:
    """The device is torch's `meta`, whose tensors hold nothing: shapes only."""
    pack = pack_of(3, path=2)
    there = dataclasses.replace(pack, tokens=pack.tokens.to("meta"))
    layout = PackLayout(tokens=8, path=2, logits=8, rows=1, blocks=1, block_slots=16)
    host = torch.full((layout.size,), -1, dtype=torch.int32)
    layout.fill(host.numpy(), there)
    assert (layout.views(host)[0] == -1).all()
    assert layout.views(host)[1].tolist() == [0, 1, 2, *[2] * 5]
    layout.fill_rest(torch.empty(layout.size, dtype=torch.int32, device="meta"), there)
