"""Outliers of activations, planted with small columns of weights: the function is the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig

from modelpool.checkpoint.int8_values import Int8Values
from modelpool.fast import quantised
from modelpool.fast.experts import QuantisedExperts
from modelpool.fast.int8 import Int8Weight
from modelpool.fast.quantised import QuantisedLinear, SmoothedWeight, column_factors
from test_support.factories import pool_of, save_llama, save_model
from tests.modelpool.compressed import logits, needs_int8
from tests.modelpool.outliers import plant


def difference(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@needs_int8
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("is_mixture", [False, True])
def test_quantised_weights_lose_no_more_by_outliers(
    weights: str, is_mixture: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"hidden": 64, "dtype": "float32", "layers": 1}
    if is_mixture:
        save_model(Qwen3MoeConfig, tmp_path, **options)
    else:
        save_llama(tmp_path, **options)
    plain, rounded = (logits(pool_of(tmp_path, weights=one).get("m")) for one in ("auto", weights))
    usual = difference(rounded, plain)
    plant(tmp_path)
    assert torch.equal(logits(pool_of(tmp_path).get("m")), plain)
    model = pool_of(tmp_path, weights=weights).get("m")
    assert difference(logits(model), plain) < 1.5 * usual
    kinds = [one for one in model.model.modules() if isinstance(one, QuantisedLinear)]
    assert any(isinstance(one.shared, SmoothedWeight) for one in kinds)
    mixtures = [one for one in model.model.modules() if isinstance(one, QuantisedExperts)]
    assert all(
        isinstance(one, SmoothedWeight) for each in mixtures for one in (*each.up, *each.down)
    )
    assert len(mixtures) == is_mixture
    monkeypatch.setattr(quantised, "column_factors", lambda weights: None)
    monkeypatch.setattr("modelpool.packed_model.check_parity", lambda *_: None)
    assert difference(logits(pool_of(tmp_path, weights=weights).get("m")), plain) > 2 * usual


@needs_int8
def test_a_smoothed_weight_is_that_of_the_scaled_columns() -> None:
    random = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(shape, generator=random) for shape in ((48, 64), (5, 64)))
    weight[:, 7] /= 100
    factors = column_factors([weight])
    assert factors is not None
    assert factors.tolist() == [64.0 if one == 7 else 1.0 for one in range(64)]
    smooth, _ = quantised.weight_of([weight], [None], None, [False])
    plain = Int8Weight([Int8Values.of(weight * factors)], None)
    for dtype in (torch.float32, torch.bfloat16):
        found = smooth.multiply(x.to(dtype))
        wanted = plain.multiply(x.to(dtype).float() / factors, dtype)
        assert found.dtype == dtype
        assert torch.equal(found, wanted)
        assert torch.equal(found[1:3], smooth.multiply(x.to(dtype)[1:3]))
