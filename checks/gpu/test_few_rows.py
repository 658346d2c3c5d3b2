"""The measured product of few rows: a row's bits depend on its own numbers alone."""

import pytest
import torch

from tests.triton_interpreter import DEVICE, needs_triton

pytestmark = needs_triton
OUTPUTS, INPUTS, MOST = 256, 640, 20


@pytest.mark.parametrize("programs", [1, 6])
def test_each_row_has_the_bits_that_it_has_alone_whatever_lies_behind(programs: int) -> None:
    from checks.gpu.few_rows import Config, product

    config = Config(block_n=128, block_k=64, warps=4, stages=2, programs=programs)
    assert config.splits(OUTPUTS, INPUTS) == ((1, 640) if programs == 1 else (3, 256))
    random = torch.Generator().manual_seed(0)
    x = torch.randn(MOST, INPUTS, generator=random).half().to(DEVICE)
    weight = torch.randn(OUTPUTS, INPUTS, generator=random).half().to(DEVICE)
    wanted = product(x, weight, config)
    exact = x.double() @ weight.double().t()
    torch.testing.assert_close(wanted.double(), exact, rtol=1e-3, atol=5e-2)
    for count in range(1, MOST + 1):
        poisoned = x.clone()
        poisoned[count:] = torch.nan
        assert torch.equal(product(poisoned[:count], weight, config), wanted[:count])
        if count in (1, 16, 17):  # among rows that are no numbers
            assert torch.equal(product(poisoned, weight, config)[:count], wanted[:count])
