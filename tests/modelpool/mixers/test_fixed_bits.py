"""A token of a recurrent layer has the bits of its text alone, whatever passes it was read in."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import FalconH1Config, GraniteMoeHybridConfig, Lfm2Config, Qwen3_5TextConfig
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridMambaLayer,
)
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from modelpool.kernels.recurrence import matrix_kernels
from modelpool.mixers import deltanet, mamba2, matrix_state, short_conv
from modelpool.mixers.registry import Arithmetic, moving_layer
from modelpool.probe import ProbeView
from modelpool.recurrent import RecurrentLayer, StateKey
from statemgr import ModelState, TokenOrder, export_row, import_row

HIDDEN, SLOTS = 96, 512
Tokens = Sequence[Tensor]


@dataclass(frozen=True)
class Layer:
    """A layer of transformers. Tokens are what its linear layers make of random hidden states."""

    module: Any
    arithmetic: Arithmetic

    def tokens(self, count: int, seed: int = 0) -> Tokens:
        chance = torch.Generator().manual_seed(seed)
        hidden = torch.randn(1, count, HIDDEN, generator=chance)
        return self.arithmetic.project(self.module, hidden.to(self.module.out_proj.weight))

    @cached_property
    def states(self) -> Mapping[StateKey, RecurrentLayer]:
        view = ProbeView(torch.device("cpu"), 4)
        view.begin(0, 4)
        self.arithmetic.mix(self.module, view, self.tokens(4))
        return view.recurrent

    def whole(self, tokens: Tokens) -> Tensor:
        """[T, channels] of a text that is read at once."""
        return Rows(self).read({0: tokens}, certain=True)[0]


def cut(tokens: Tokens, *at: int) -> Tokens:
    """Copies, as tokens of a pass of their own are."""
    return [each[slice(*at)].clone() for each in tokens]


class Rows:
    """Rows of a layer's states, and what was fed to them."""

    def __init__(self, layer: Layer, rows: int = 4, wanted: Sequence[int] = ()) -> None:
        self._layer = layer
        kept = {0: set(wanted)}
        self.state = ModelState({}, rows, SLOTS, recurrent=layer.states, wanted=kept)

    def length(self, row: int) -> int:
        return int(self.state.lengths(np.array([row]))[0])

    def read(
        self,
        given: Mapping[int, Tokens],
        certain: bool = False,
        parents: Mapping[int, Sequence[int]] | None = None,
    ) -> dict[int, Tensor]:
        """Outputs [T, channels] by row. `parents`: places in the row's part; -1: what it has."""
        rows = np.array(sorted(given))
        counts = np.array([len(given[row][0]) for row in rows])
        trees = {
            row: (parents or {}).get(row, range(-1, count - 1))
            for row, count in zip(rows.tolist(), counts.tolist(), strict=True)
        }
        positions = np.concatenate([self.length(row) + _depths(trees[row]) for row in trees])
        slots = self.state.append(rows, counts, positions, positions)
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        places = np.concatenate([np.array(trees[row]) for row in trees])
        before = np.where(places < 0, -1, slots[np.maximum(starts + places, 0)])
        order = TokenOrder(counts if certain else np.zeros_like(counts), before)
        view = self.state.view(rows, counts, positions, slots, order=order)
        parts = [torch.cat(each) for each in zip(*(given[row] for row in trees), strict=True)]
        with torch.inference_mode():
            out = self._layer.arithmetic.mix(self._layer.module, view, parts)
        return dict(zip(trees, torch.split(out, counts.tolist()), strict=True))

    def commit(self, row: int, base: int, places: Sequence[int]) -> None:
        """Of the last pass, a path."""
        slots = np.array([row * SLOTS + base + place for place in places], dtype=np.int64)
        self.state.commit(np.array([row]), np.array([base]), slots)


def _depths(parents: Sequence[int]) -> Any:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return np.array(depths)


def _deltanet(heads: int, size: int) -> Any:
    config: Any = Qwen3_5TextConfig(
        hidden_size=HIDDEN,
        layer_types=["linear_attention"],
        num_hidden_layers=1,
        linear_num_key_heads=heads // 2 if heads % 2 == 0 else heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=size,
        linear_value_head_dim=size,
    )
    return Qwen3_5GatedDeltaNet(config, 0)


def _mamba(heads: int, size: int) -> Any:
    config = GraniteMoeHybridConfig(
        hidden_size=HIDDEN,
        mamba_n_heads=heads,
        mamba_d_head=2 * HIDDEN // heads,
        mamba_d_state=size,
        num_hidden_layers=1,
    )
    return GraniteMoeHybridMambaLayer(config, 0)


def _falcon(heads: int, size: int) -> Any:
    config = FalconH1Config(
        hidden_size=HIDDEN, mamba_n_heads=heads, mamba_d_ssm=heads * 32, mamba_d_state=size,
        num_hidden_layers=1, mamba_rms_norm=True,
    )  # fmt: skip
    mixer = FalconH1Mixer(config, 0)
    mixer.register_buffer("mup_vector", torch.ones(1, 1, mixer.in_proj.out_features))
    return mixer


def _conv(heads: int, size: int) -> Any:
    config = Lfm2Config(
        hidden_size=HIDDEN, conv_L_cache=heads, layer_types=["conv"], num_hidden_layers=1
    )
    return Lfm2ShortConv(config, 0)


_KINDS: Mapping[str, tuple[Callable[[int, int], Any], Arithmetic]] = {
    "deltanet": (_deltanet, deltanet),
    "mamba": (_mamba, mamba2),
    "falcon": (_falcon, mamba2),
    "conv": (_conv, short_conv),
}
_SHAPES = {
    "deltanet": ((3, 16), (4, 32), (16, 128)),
    "mamba": ((3, 16), (4, 32), (16, 128)),
    "falcon": ((4, 32),),
    "conv": ((3, 0), (4, 0)),
}
CASES = [
    (kind, *shape, dtype)
    for kind, shapes in _SHAPES.items()
    for shape in shapes
    for dtype in ("float64", "float32", "bfloat16")
]
FEW = [case for case in CASES if case[3] == "float32" and case[2] < 128]


@cache
def make(kind: str, heads: int, size: int, dtype: str) -> Layer:
    build, arithmetic = _KINDS[kind]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        module = build(heads, size)
        for name, parameter in module.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-5.0, -1.0)
            elif "norm" not in name:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return Layer(module.to(getattr(torch, dtype)).requires_grad_(False), arithmetic)


@pytest.fixture
def layer(request: pytest.FixtureRequest) -> Layer:
    return make(*request.param)


@pytest.fixture(params=["library", "torch"])
def by_either(
    request: pytest.FixtureRequest, layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> Layer:
    """The layer, its matrix states computed by the C library, or as where there is none."""
    if request.param == "torch":
        monkeypatch.setattr(matrix_state, "matrix_kernels", lambda: None)
    return replace(layer)


every = pytest.mark.parametrize("layer", CASES, indirect=True, ids=str)
few = pytest.mark.parametrize("layer", FEW, indirect=True, ids=str)


@every
def test_a_text_may_be_cut_anywhere(layer: Layer) -> None:
    tokens = layer.tokens(300)
    wanted, rows, got, at = layer.whole(tokens), Rows(layer), [], 0
    for number, size in enumerate((1, 5, 16, 100, 1, 64, 113)):
        got.append(rows.read({1: cut(tokens, at, at + size)}, certain=number % 2 == 1)[1])
        if number % 2 == 0:
            rows.commit(1, at, range(size))
        at += size
    assert torch.equal(torch.cat(got), wanted)
    single = Rows(layer)
    for place in range(40):
        out = single.read({0: cut(tokens, place, place + 1)}, certain=place % 3 == 0)[0]
        assert torch.equal(out, wanted[place : place + 1])
        if place % 3:
            single.commit(0, place, [0])


@few
@pytest.mark.parametrize("seed", range(2))
def test_random_trees_and_acceptance_leave_the_bits_of_the_text(
    by_either: Layer, seed: int
) -> None:
    layer = by_either
    draws, rows, lengths = np.random.default_rng(seed), Rows(layer), [9, 2, 1]
    texts = [layer.tokens(90, seed=row) for row in range(3)]
    wrong, wanted = layer.tokens(200, seed=9), [layer.whole(each) for each in texts]
    rows.read({row: cut(texts[row], lengths[row]) for row in range(3)}, certain=True)
    while max(lengths) < 80:
        parents, rights, nodes = {}, {}, {}
        for row in range(3):
            is_right = np.concatenate(([True], draws.random(7) < 0.5))
            up, path = [-1], [0]
            for node in range(1, 8):
                up.append(path[-1] if is_right[node] else int(draws.integers(0, node)))
                path += [node] if is_right[node] else []
            at = lengths[row] + np.cumsum(is_right) - 1
            stray = draws.integers(0, 200, 8)
            nodes[row] = [good[at] for good in texts[row]]
            for made, bad in zip(nodes[row], wrong, strict=True):
                made[~is_right] = bad[stray[~is_right]]
            parents[row], rights[row] = up, path
        out = rows.read(nodes, parents=parents)
        for row, path in rights.items():
            start = lengths[row]
            assert torch.equal(out[row][path], wanted[row][start : start + len(path)])
            accepted = path[: int(draws.integers(0, len(path) + 1))]  # none, at times
            rows.commit(row, start, accepted)
            lengths[row] += len(accepted)


@few
def test_what_is_rejected_leaves_no_trace_though_it_is_no_number(layer: Layer) -> None:
    tokens = layer.tokens(12)
    wanted, rows = layer.whole(tokens), Rows(layer)
    rows.read({0: cut(tokens, 5)}, certain=True)
    for _ in range(2):  # nothing is accepted, twice
        nodes = [torch.cat((each[5:6], torch.full_like(each[:2], torch.nan))) for each in tokens]
        out = rows.read({0: nodes}, parents={0: (-1, 0, 0)})[0]
        assert torch.equal(out[:1], wanted[5:6])
        rows.commit(0, 5, [])
    assert torch.equal(rows.read({0: cut(tokens, 5, 12)})[0], wanted[5:])


@few
@pytest.mark.parametrize("count", [1, 2, 13])  # shorter than the convolution, too
def test_another_process_goes_on_at_any_length(count: int, layer: Layer) -> None:
    tokens, committed = layer.tokens(20), np.arange(count + 1)
    source, goal = Rows(layer), Rows(layer)
    source.read({1: cut(tokens, count)}, certain=True)
    kv = export_row(source.state, 1, 0, count, committed, "it")
    assert kv.state.nbytes == source.state.recurrent.row_bytes
    import_row(goal.state, 2, kv, committed, "it")
    assert torch.equal(goal.read({2: cut(tokens, count, 20)})[2], layer.whole(tokens)[count:])


def test_the_name_of_a_state_tells_who_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for kernels in (lambda: None, matrix_kernels):
        monkeypatch.setattr(matrix_state, "matrix_kernels", kernels)
        names |= {name for _, name in replace(make("mamba", 3, 16, "float32")).states}
    assert {name for name in names if "window" not in name} == (
        {"state-space-1", "state-space-c1"} if matrix_kernels() else {"state-space-1"}
    )


@every
def test_the_trial_at_load_finds_no_bits_that_move(layer: Layer) -> None:
    assert moving_layer(layer.module, HIDDEN) is None


def test_the_trial_at_load_finds_functions_with_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make("deltanet", 3, 16, "float32")
    monkeypatch.setattr(deltanet, "sigmoid", lambda x: torch.sigmoid(x) * (1 + 1e-6 * len(x)))
    assert moving_layer(layer.module, HIDDEN) == 0
