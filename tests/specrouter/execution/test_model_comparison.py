"""The total variation between models."""

import pytest
import torch

from specrouter.execution.model_comparison import total_variation


def test_total_variation_is_half_the_sum_of_differences() -> None:
    p, q = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]), torch.tensor([[0.5, 0.0, 0.5]] * 2)
    assert total_variation(p.log(), q.log()) == pytest.approx((0.5 + 0.5) / 2)
    assert total_variation(p.log(), p.log()) == 0.0
