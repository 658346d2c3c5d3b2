"""Attention through a forward view equals attention over each token's own past, one by one."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from modelpool.attention.kv_view import AttentionLayer
from modelpool.attention.packed import OpaqueView, packed_attention_forward
from modelpool.attention.path import PathLayout, reference_attention
from statemgr import BLOCK_SLOTS, ForwardView, ModelState
from tests.kv_layers import kv_layer
from tests.statemgr.trees import feed

ROWS, SLOTS, DIM, LAYER = 8, 256, 4, 1


class _Attention(nn.Module):
    layer_idx = LAYER


@dataclass
class Past:
    """What one row should attend to: position, key and value of every valid token."""

    positions: list[int] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)  # each [kv_heads, DIM]
    values: list[Tensor] = field(default_factory=list)

    def add(self, position: int, key: Tensor, value: Tensor) -> None:
        self.positions.append(position)
        self.keys.append(key)
        self.values.append(value)

    def copy(self) -> "Past":
        return Past([*self.positions], [*self.keys], [*self.values])


class Bench:
    """A state with random pasts; forwards packs and attends naively beside it."""

    def __init__(
        self,
        heads: int = 4,
        kv_heads: int = 2,
        seed: int = 0,
        value_dim: int = DIM,
        is_latent: bool = False,
    ) -> None:
        self.heads, self.kv_heads = heads, kv_heads
        self.value_dim, self.is_latent = value_dim, is_latent
        layer = kv_layer(torch.device("cpu"), torch.float64, kv_heads, DIM, value_dim, is_latent)
        self.state = ModelState({0: layer, 1: layer}, ROWS, SLOTS)
        self.pasts = [Past() for _ in range(ROWS)]
        self._random = torch.Generator().manual_seed(seed)

    def forward(
        self,
        counts: dict[int, int],
        window: int | None = None,
        softcap: float | None = None,
        parents: dict[int, list[int]] | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, ForwardView]:
        """Appends `counts[row]` tokens to each row. Got and wanted, each [T, heads, DIM].

        Behind a row's tokens stand nodes with these `parents`, which are forgotten afterwards.
        """
        rows = np.array(sorted(counts))
        own = np.array([counts[row] for row in rows.tolist()])
        above = [(parents or {}).get(row, []) for row in rows.tolist()]
        positions, slots, tree = feed(self.state, rows, own, above)
        sizes, total = own + [len(one) for one in above], len(slots)
        query = self._draw(self.heads, total)
        key, value = (self._draw(self.kv_heads, total, width) for width in (DIM, self.value_dim))
        value = key[..., : self.value_dim] if self.is_latent else value
        view = self.state.view(rows, sizes, positions, slots, tree)
        out = attend(query, key, value, view, window, softcap, sinks)
        wanted, token = [], 0
        for row, count, size in zip(rows.tolist(), own.tolist(), sizes.tolist(), strict=True):
            first, past = token + count, self.pasts[row]  # the first of the nodes
            for at in range(token, first):
                past.add(int(positions[at]), key[:, at], value[:, at])
            for at in range(token, token + size):
                seen = past
                if at >= first and tree is not None:
                    seen = past.copy()
                    for node in (first + np.unique(tree.paths[at])).tolist():
                        seen.add(int(positions[node]), key[:, node], value[:, node])
                how = int(positions[at]), window, softcap, sinks
                wanted.append(naive(query[:, at], seen, *how))
            token += size
        if tree is not None:
            bases = np.array([len(self.pasts[row].positions) for row in rows.tolist()])
            self.state.commit(rows, bases, np.zeros(0, dtype=np.int64))
        return out, torch.stack(wanted), view

    def rollback(self, row: int, length: int) -> None:
        self.state.rollback(np.array([row]), np.array([length]))
        past = self.pasts[row]
        del past.positions[length:], past.keys[length:], past.values[length:]

    def _draw(self, heads: int, tokens: int, width: int = DIM) -> Tensor:
        return torch.randn(heads, tokens, width, generator=self._random, dtype=torch.float64)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    view: ForwardView,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[T, heads, DIM]"""
    out, _ = packed_attention_forward(
        _Attention(),
        query.unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        None,
        scaling=0.7,
        sliding_window=window,
        softcap=softcap,
        s_aux=sinks,
        packed_kv=OpaqueView(view, reference_attention()),
    )
    return out[0]


def naive(
    query: Tensor,
    past: Past,
    at: int,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[heads, DIM] attention of one token at position `at`, [heads, DIM]."""
    seen = [
        index
        for index, position in enumerate(past.positions)
        if position <= at and (window is None or position > at - window)
    ]
    repeat = query.shape[0] // past.keys[0].shape[0]
    keys = torch.stack([past.keys[index] for index in seen], 1).repeat_interleave(repeat, 0)
    values = torch.stack([past.values[index] for index in seen], 1).repeat_interleave(repeat, 0)
    scores = 0.7 * (keys @ query.unsqueeze(-1)).squeeze(-1)  # [heads, seen]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
    if sinks is not None:
        weights *= 1 - (sinks.exp() / (sinks.exp() + scores.exp().sum(-1))).unsqueeze(-1)
    return (weights.unsqueeze(1) @ values).squeeze(1)


def assert_equal(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [1, 3, 8, 1000])
def test_a_sliding_window_counts_positions_not_slots(window: int) -> None:
    bench = Bench()
    bench.forward({0: 20, 1: 6, 3: 9}, window)
    for row, length in ((0, 11), (3, 2)):
        bench.rollback(row, length)
    got, wanted, _ = bench.forward({0: 4, 1: 1, 3: 20}, window)
    assert_equal(got, wanted)


@pytest.mark.parametrize(
    ("window", "value_dim", "is_latent"),
    [
        (None, DIM, False), (1, DIM, False), (2, 6, False), (4, DIM, False), (None, 3, False),
        (1000, DIM, False), (None, 3, True), (4, DIM, True),
    ],
)  # fmt: skip
def test_random_trees_equal_naive(window: int | None, value_dim: int, is_latent: bool) -> None:
    random = np.random.default_rng(2)
    bench = Bench(kv_heads=1 if is_latent else 2, value_dim=value_dim, is_latent=is_latent)
    for _ in range(25):
        rows = sorted(random.permutation(ROWS)[: random.integers(1, ROWS)].tolist())
        counts = {row: int(random.integers(1, 4)) for row in rows}
        parents = {
            row: [int(random.integers(-1, node)) if node else -1 for node in range(size)]
            for row, size in zip(rows, random.choice([1, 4, 8, 11, 21], len(rows)), strict=True)
            if row == rows[0] or random.random() < 0.7
        }
        got, wanted, _ = bench.forward(counts, window, parents=parents)
        assert_equal(got, wanted)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1), (2, 2)])
def test_random_packs_equal_naive(heads: int, kv_heads: int) -> None:
    """Past the first quantum of slots, too."""
    random = np.random.default_rng(1)
    bench = Bench(heads, kv_heads)
    for _ in range(12):
        rows = random.choice(ROWS, size=int(random.integers(1, ROWS + 1)), replace=False)
        counts = {int(row): int(random.choice([1, 1, 2, 4, 16, 40])) for row in rows}
        for row in counts:
            if len(bench.pasts[row].positions) > 150:
                bench.rollback(row, int(random.integers(0, 150)))
        got, wanted, _ = bench.forward(counts)
        assert_equal(got, wanted)


def test_what_no_token_sees_may_be_no_numbers() -> None:
    """Rows of nobody, and slots that a failed forward wrote."""
    bench = Bench()
    bench.forward({0: 3, 2: 5})
    rows, feed = np.array([0, 2]), np.array([2, 1])
    slots = bench.state.append(rows, feed, np.zeros(3, dtype=np.int64), np.array([3, 4, 5]))
    is_free = bench.state.tables.references == 0
    free = np.flatnonzero(np.repeat(is_free, BLOCK_SLOTS))
    for part in bench.state.store.layer(LAYER):
        part[torch.from_numpy(free)] = torch.nan
        part[torch.from_numpy(bench.state.tables.flat(slots))] = torch.nan
    bench.state.rollback(rows, np.array([3, 5]))
    got, wanted, _ = bench.forward({0: 1, 2: 2})
    assert_equal(got, wanted)


def test_a_row_has_the_same_bits_whatever_stands_beside_it() -> None:
    alone, beside = Bench(), Bench()
    draws = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(heads, 3, DIM, generator=draws, dtype=torch.float64) for heads in (4, 2, 2)
    )
    outs = []
    for bench, rows in ((alone, [1]), (beside, [0, 1, 2])):
        feed = np.full(len(rows), 3)
        positions = np.tile(np.arange(3), len(rows))
        slots = bench.state.append(np.array(rows), feed, np.zeros_like(positions), positions)
        view = bench.state.view(np.array(rows), feed, positions, slots)
        pack = [part.repeat(1, len(rows), 1).unsqueeze(0) for part in (query, key, value)]
        out, _ = packed_attention_forward(
            _Attention(),
            pack[0],
            pack[1],
            pack[2],
            None,
            packed_kv=OpaqueView(view, reference_attention()),
        )
        outs.append(out[0, 3 * rows.index(1) :][:3])
    assert torch.equal(outs[0], outs[1])


def test_a_spread_models_layers_attend_each_on_its_own_device() -> None:
    devices = [torch.device("cpu"), torch.device("meta")]
    layers = dict(enumerate(kv_layer(device, torch.float64, 2, DIM) for device in devices))
    state = ModelState(layers, ROWS, SLOTS)
    rows, counts = np.array([0, 1, 2]), np.array([1, 3, 20])
    positions = np.concatenate([np.arange(count) for count in counts])
    view = state.view(rows, counts, positions, state.append(rows, counts, positions, positions))
    for number, device in enumerate(devices):
        key = torch.zeros(2, 24, DIM, dtype=torch.float64, device=device)
        view.write(number, key.transpose(0, 1), key.transpose(0, 1))
        assert view.arena(AttentionLayer(number, 1.0))[0].device == device
        assert view.layout(PathLayout).on(device).tables.device == device
