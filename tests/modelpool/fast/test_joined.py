"""Joined layers have the bits that they have alone, or stay apart."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelpool.fast import joined as joining
from modelpool.fast.direct_forward import direct_forward_of
from modelpool.fast.joined import join_layers, joined, keeps_bits
from modelpool.fast.linear import PackedLinear, PackedWeight, can_pack, parameter_count
from modelpool.fast.tuning import Tuning
from modelpool.packed_model import PackedModel
from test_support.llama_models import LLAMA_SHAPED, VOCAB, Feeder, draw, make_model

DTYPES = [dtype for dtype in (torch.bfloat16, torch.float32) if can_pack(dtype)]
pytestmark = pytest.mark.skipif(not DTYPES, reason="torch without oneDNN")
OUTPUTS = {"gate_proj": 320, "up_proj": 320}


def packed_mlp(inputs: int, dtype: torch.dtype, bias: bool = False) -> Any:
    """A module whose packed layers read the same input."""
    mlp = nn.Module()
    for name, outputs in OUTPUTS.items():
        plain = nn.Linear(inputs, outputs, bias).requires_grad_(False).to(dtype)
        setattr(mlp, name, PackedLinear(plain))
    return mlp


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("inputs", [96, 1024, 1152])
def test_joined_layers_have_the_bits_that_they_had_alone(
    inputs: int, bias: bool, dtype: torch.dtype
) -> None:
    mlp = packed_mlp(inputs, dtype, bias)
    apart = copy.deepcopy(mlp)
    kept = [mlp.gate_proj.weight, mlp.up_proj.weight]
    assert join_layers([mlp]) == 1
    assert mlp.gate_proj.shared is mlp.up_proj.shared
    together = joined(mlp.gate_proj, mlp.up_proj)
    for rows in (1, 2, 7, 32, 33, 70):
        x = draw(rows, inputs, dtype=dtype)
        expected = apart.gate_proj(x), apart.up_proj(x)
        for got in (together(x), (mlp.gate_proj(x), mlp.up_proj(x))):
            assert all(map(torch.equal, got, expected)), rows
    assert all(map(torch.equal, (mlp.gate_proj.weight, mlp.up_proj.weight), kept))
    assert parameter_count(mlp) == parameter_count(apart)
    assert join_layers([mlp]) == 0


def test_what_sums_in_another_order_stays_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = PackedWeight._product

    def by_halves(self: PackedWeight, x: Tensor) -> Tensor:
        """Wide products are summed in two parts."""
        if self.out_features <= max(OUTPUTS.values()):
            return plain(self, x)
        first = x.clone()
        first[..., self.in_features // 3 :] = 0
        return plain(self, first).float().add(plain(self, x - first)).to(x.dtype)

    monkeypatch.setattr(PackedWeight, "_product", by_halves)
    monkeypatch.setattr(joining, "keeps_bits", keeps_bits.__wrapped__)
    mlp = packed_mlp(96, torch.float32)
    assert join_layers([mlp]) == 0
    assert mlp.gate_proj.shared is not mlp.up_proj.shared


def test_a_direct_forward_joins_and_keeps_the_bits_of_layers_apart() -> None:
    model = make_model(LLAMA_SHAPED["llama-biased"](), DTYPES[0])
    packed = PackedModel.wrap("m", model, VOCAB, Tuning(pack_weights=True))
    counts = {0: 6, 1: 1, 3: 2}
    before = Feeder(packed.forward, packed).feed(counts)
    direct = direct_forward_of(packed)
    assert direct is not None
    core: Any = packed.model
    for layer in core.model.layers:
        attention = layer.self_attn
        if DTYPES[0] == torch.bfloat16:
            assert attention.q_proj.shared is attention.v_proj.shared
            assert layer.mlp.gate_proj.shared is layer.mlp.up_proj.shared
    for forward in (packed.forward, direct):
        assert torch.equal(Feeder(forward, packed).feed(counts), before)
