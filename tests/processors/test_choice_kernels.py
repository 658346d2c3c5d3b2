"""The kernels of noise and choice by Triton's interpreter, or on a GPU where there is one."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from processors.noise import gumbel
from test_support.triton_interpreter import DEVICE, ON_GPU, needs_triton

pytestmark = [
    needs_triton,
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),  # of padding
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]

VOCAB = 41  # more than a block of the tests, and no multiple of it


def random_keys(count: int, seed: int = 0) -> NDArray[np.uint64]:
    """[3, count]: seed, stream, position; the largest and the smallest among them."""
    random = np.random.default_rng(seed)
    keys = random.integers(0, 2**64 - 1, (3, count), dtype=np.uint64, endpoint=True)
    keys[1] >>= np.uint64(20)
    keys[2] >>= np.uint64(44)
    keys[:, 0], keys[:2, 1] = 0, np.uint64(2**64 - 1)
    return keys


def there(keys: NDArray[np.uint64]) -> Tensor:
    return torch.from_numpy(keys.view(np.int64)).to(DEVICE)


def best(logits: Tensor, keys: NDArray[np.uint64], temperatures: Tensor, width: int) -> Any:
    from processors.choice_kernels import NoiseKeys, best_of

    of_noise = NoiseKeys(there(keys), temperatures.to(DEVICE))
    rows = 1 if ON_GPU else 128  # of a program: the interpreter takes as long for one
    return best_of(logits.to(DEVICE), of_noise, width, rows=rows, ids=32)


def hostile_logits(count: int, dtype: torch.dtype) -> Tensor:
    """Ties everywhere, and in some rows NaN, -inf alone, or +inf."""
    random = torch.Generator().manual_seed(count)
    logits = torch.randint(-3, 4, (count, VOCAB), generator=random).to(dtype)
    logits[torch.rand(logits.shape, generator=random) < 0.2] = -torch.inf
    kind = torch.arange(count) % 20
    logits[kind == 3] = -torch.inf
    logits[kind == 5, 17] = torch.inf
    broken = torch.rand(logits.shape, generator=random) < 0.1
    logits[(kind == 7)[:, None] & broken] = torch.nan
    return logits


@pytest.mark.parametrize("width", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_best_few_and_the_total_are_those_of_all_scores(width: int, dtype: torch.dtype) -> None:
    count = 60
    keys = random_keys(count)
    temperatures = torch.where(torch.arange(count) % 3 == 0, 0.0, 0.8).double()
    logits = hostile_logits(count, dtype)
    noise = [gumbel(int(s), int(p), VOCAB, int(t)) for s, t, p in keys.T]
    warm = temperatures[:, None] > 0
    divided = logits.double() / torch.where(warm, temperatures[:, None], 1.0)
    scores = torch.where(warm, divided + torch.from_numpy(np.stack(noise)), logits.double())
    values, ids = scores.sort(dim=1, descending=True, stable=True)
    got = best(logits, keys, temperatures, width)
    assert got.ids.is_contiguous()  # a beam takes a view of them
    assert got.scores.is_contiguous()
    whole = ~scores.isnan().any(dim=1)
    assert torch.equal(got.ids.cpu()[whole], ids[whole, :width])
    torch.testing.assert_close(got.scores.cpu()[whole], values[whole, :width], rtol=0, atol=1e-14)
    totals = scores[whole].logsumexp(dim=1)
    torch.testing.assert_close(got.totals.cpu()[whole], totals, rtol=0, atol=1e-13)
    assert got.scores.cpu()[~whole].isnan().all()
    assert got.totals.cpu()[~whole].isnan().all()
    assert torch.equal(got.ids[:, 0].cpu()[~whole], scores[~whole].isnan().int().argmax(dim=1))


def test_a_temperature_that_is_no_number_makes_scores_that_are_none() -> None:
    temperatures = torch.tensor([math.nan, 0.8, 0.0]).double()
    got = best(hostile_logits(3, torch.float32), random_keys(3), temperatures, 2)
    assert got.scores.cpu().isnan().all(dim=1).tolist() == [True, False, False]


def test_scores_of_single_ids_are_those_among_all() -> None:
    from processors.choice_kernels import NoiseKeys, scores_of

    keys, count = random_keys(30), 30
    temperatures = torch.where(torch.arange(count) % 3 == 0, 0.0, 0.8).double()
    logits = hostile_logits(count, torch.float32).nan_to_num(nan=0.5)
    places = torch.arange(200) % count
    tokens = (torch.arange(200) * 7) % (VOCAB + 2) - 1
    of_noise = NoiseKeys(there(keys), temperatures.to(DEVICE))
    got = scores_of(logits.to(DEVICE), of_noise, places.to(DEVICE), tokens.to(DEVICE)).cpu()
    unknown = (tokens < 0) | (tokens >= VOCAB)
    assert got[unknown].isneginf().all()
    for score, place, token in zip(got[~unknown], places[~unknown], tokens[~unknown], strict=True):
        seed, stream, position = map(int, keys[:, place])
        wanted = float(logits[place, token])
        if temperatures[place]:
            noise = gumbel(seed, position, VOCAB, stream)[token]
            wanted = wanted / float(temperatures[place]) + float(noise)
        assert float(score) == pytest.approx(wanted, abs=1e-14)
