"""Packed attention equals SDPA over each token's own past, in float64; nothing else leaks in."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from modelpool.attention.packed import AttentionLayer, attend_all
from modelpool.probe import KVLayer
from statemgr import ModelState, TreeMask

HEADS, KV_HEADS, DIM, ROWS, SLOTS = 4, 2, 8, 4, 256
SCALE = DIM**-0.5


class Pack:
    """Random queries, keys and values of one pack, `counts[i]` tokens of `rows[i]`."""

    def __init__(self, rows: list[int], counts: list[int], seed: int = 0) -> None:
        self.rows, self.counts = np.array(rows), np.array(counts)
        self.total = int(self.counts.sum())
        self._random = torch.Generator().manual_seed(seed)
        self.query = self._draw(HEADS)
        self.key, self.value = self._draw(KV_HEADS), self._draw(KV_HEADS)

    def _draw(self, heads: int) -> Tensor:
        return torch.randn(heads, self.total, DIM, generator=self._random, dtype=torch.float64)

    def of(self, index: int) -> slice:
        """The tokens of the index-th row."""
        stop = int(self.counts[: index + 1].sum())
        return slice(stop - int(self.counts[index]), stop)


@pytest.fixture
def state() -> ModelState:
    layer = KVLayer(torch.device("cpu"), torch.float64, KV_HEADS, DIM)
    return ModelState([layer], ROWS, SLOTS)


def attend(
    state: ModelState,
    pack: Pack,
    layer: AttentionLayer,
    tree: TreeMask | None = None,
    positions: list[int] | None = None,
) -> Tensor:
    """[T, heads, dim] of a pack whose tokens are appended to the state."""
    begun = state.lengths(pack.rows)
    each = [start + np.arange(n) for start, n in zip(begun, pack.counts, strict=True)]
    places = np.concatenate(each) if positions is None else np.array(positions)
    slots = state.append(pack.rows, pack.counts, np.zeros(pack.total, dtype=np.int64), places)
    view = state.view(pack.rows, pack.counts, places, slots, tree)
    view.write(layer.number, pack.key.transpose(0, 1), pack.value.transpose(0, 1))
    return attend_all(view, layer, pack.query)


def sdpa(pack: Pack, own: slice, allowed: Tensor) -> Tensor:
    """[t, heads, dim] of one row's tokens. `allowed`: [t, t]."""
    out = F.scaled_dot_product_attention(
        pack.query[:, own], pack.key[:, own], pack.value[:, own], allowed, enable_gqa=True
    )
    return out.transpose(0, 1)


def causal(count: int, window: int | None = None) -> Tensor:
    distance = torch.arange(count)[:, None] - torch.arange(count)
    return (distance >= 0) & (distance < (window or count))


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize(
    ("rows", "counts"), [([0], [1]), ([0], [9]), ([0, 1, 3], [5, 1, 20]), ([1, 2], [40, 2])]
)
def test_each_row_of_a_pack_attends_as_if_it_were_alone(
    rows: list[int], counts: list[int], window: int | None, state: ModelState
) -> None:
    pack = Pack(rows, counts)
    got = attend(state, pack, AttentionLayer(0, SCALE, window))
    for index, count in enumerate(counts):
        own = pack.of(index)
        wanted = sdpa(pack, own, causal(count, window))
        torch.testing.assert_close(got[own], wanted, rtol=0, atol=1e-12)


def test_scores_are_capped_before_the_softmax(state: ModelState) -> None:
    pack, cap = Pack([0], [6]), 0.7
    got = attend(state, pack, AttentionLayer(0, SCALE, softcap=cap))
    key, value = (part.repeat_interleave(HEADS // KV_HEADS, 0) for part in (pack.key, pack.value))
    scores = cap * torch.tanh(pack.query @ key.transpose(1, 2) * SCALE / cap)
    weights = scores.masked_fill(~causal(6), -torch.inf).softmax(dim=-1)
    torch.testing.assert_close(got, (weights @ value).transpose(0, 1), rtol=0, atol=1e-12)


def test_a_node_of_a_tree_attends_to_its_ancestors_alone(state: ModelState) -> None:
    """A root, two children of it, and a child of the second one."""
    pack = Pack([0], [4])
    visible = torch.tensor(
        [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 1, 1]], dtype=torch.bool
    )  # of the three nodes
    starts = np.array([1, SLOTS, SLOTS, SLOTS])
    tree = TreeMask(starts, visible)
    got = attend(state, pack, AttentionLayer(0, SCALE), tree, positions=[0, 1, 1, 2])
    allowed = torch.cat((torch.ones(4, 1, dtype=torch.bool), visible), dim=1)
    torch.testing.assert_close(got, sdpa(pack, slice(0, 4), allowed), rtol=0, atol=1e-12)


def test_padding_rows_and_slots_change_no_bit(state: ModelState) -> None:
    alone, layer = Pack([1], [3]), AttentionLayer(0, SCALE)
    wanted = attend(state, alone, layer)
    state.free(1)
    together = Pack([0, 1, 3], [2, 3, 1], seed=1)
    own = together.of(1)
    for mine, theirs in (
        (together.query, alone.query),
        (together.key, alone.key),
        (together.value, alone.value),
    ):
        mine[:, own] = theirs
    assert torch.equal(attend(state, together, layer)[own], wanted)


@pytest.mark.parametrize("what", ["key", "value"])
def test_not_a_number_in_another_row_does_not_leak(what: str, state: ModelState) -> None:
    pack = Pack([0, 1, 2], [3, 3, 3])
    getattr(pack, what)[:, pack.of(1)] = torch.nan
    got = attend(state, pack, AttentionLayer(0, SCALE))
    assert got[pack.of(1)].isnan().all(dim=(1, 2))[-1]
    for index in (0, 2):
        wanted = sdpa(pack, pack.of(index), causal(3))
        torch.testing.assert_close(got[pack.of(index)], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_scrubbed", [False, True])
def test_not_a_number_in_a_masked_slot_leaks_unless_the_slot_is_scrubbed(
    is_scrubbed: bool, state: ModelState
) -> None:
    """Why slots of a failed forward are scrubbed, and not only masked: 0 times NaN is NaN."""
    layer, first = AttentionLayer(0, SCALE), Pack([0], [4])
    attend(state, first, layer)
    slots = np.array([2, 3])
    state.store.layer(0)[1][slots] = torch.nan
    if is_scrubbed:
        state.scrub(slots)
    else:
        state.rollback(np.array([0]), np.array([2]))
    second = Pack([0], [1], seed=1)
    got = attend(state, second, layer)
    assert bool(got.isfinite().all()) == is_scrubbed
