"""The C library chooses what the sampler's own operators do, with the noise of plain numpy."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from modelpool.fast.cpu import cpu_threads
from modelpool.kernels.library import linear_kernels
from processors import noise
from processors.contexts import Contexts
from processors.noise import gumbel, gumbel_at, gumbel_of_place
from processors.sampler import Sampler
from processors.sampling_row import SamplingSettings

pytestmark = pytest.mark.skipif(linear_kernels() is None, reason="no C library")
INFINITY, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("size", [1, 3, 64, 1001, 152_000])
def test_noise_has_the_bits_of_numpy_step_by_step(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [(0, 0, 0), (2**64 - 1, 3, 7), (11, 1, 2**40)]
    in_c = [gumbel(seed, position, size, stream) for seed, stream, position in keys]
    ids = np.arange(0, size, 7)
    for (seed, stream, position), found in zip(keys, in_c, strict=True):
        seeds, streams, positions = (np.full(len(ids), one) for one in (seed, stream, position))
        few = gumbel_at(seeds.astype(np.uint64), streams, positions, ids)
        assert np.array_equal(few, found[ids])
    monkeypatch.setattr(noise, "linear_kernels", lambda: None)
    plain = [gumbel(seed, position, size, stream) for seed, stream, position in keys]
    assert all(map(np.array_equal, in_c, plain))


def test_the_logarithm_is_within_two_units_of_the_last_place() -> None:
    draws = np.random.default_rng(0)
    x = np.concatenate((draws.random(10**6), 10.0 ** draws.uniform(-17, 2, 10**6), [2.0**-54, 1.0]))
    wanted = np.log(x)
    errors = np.abs(noise._logarithm(x) - wanted)
    assert (errors <= 2 * np.spacing(np.abs(wanted))).all()


def chosen(
    logits: Tensor, temperatures: Sequence[float], position: int
) -> tuple[list[int], Tensor]:
    sampler = Sampler(logits.shape[1], window=4)
    for row, temperature in enumerate(temperatures):
        sampler.open(row, SamplingSettings(temperature=temperature, seed=row + 5, stream=row))
    rows = np.arange(len(temperatures))
    places = Contexts(rows=rows, positions=np.full_like(rows, position), depths=rows * 0)
    ids, scores = sampler.choose(logits, places)
    return ids.tolist(), scores


@given(
    size=st.sampled_from([1, 5, 64, 333, 20_000]),
    temperatures=st.lists(
        st.sampled_from([0.0, 1e-5, 1e-3, 0.1, 0.7, 1.0, 3.0, 100.0]), min_size=1, max_size=5
    ),
    spread=st.sampled_from([0.0, 1e-3, 1.0, 10.0, 1e4, 1e30]),
    special=st.sampled_from([None, NAN, INFINITY, -INFINITY]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**16),
    is_padded=st.booleans(),
)
def test_the_choice_is_the_largest_sum_of_logit_and_noise(
    size: int,
    temperatures: list[float],
    spread: float,
    special: float | None,
    threads: int,
    seed: int,
    is_padded: bool,
) -> None:
    draws = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(temperatures), size + 3 * is_padded, generator=draws) * spread
    logits = logits[:, :size]  # as of a model with padded ids
    if special is not None:
        logits[:, torch.randint(size, (2,), generator=draws)] = special
    with cpu_threads(threads):
        ids, scores = chosen(logits, temperatures, seed)
    for row, temperature in enumerate(temperatures):
        wanted = logits[row].double().numpy()
        if temperature:
            wanted = wanted / temperature + gumbel(row + 5, seed, size, row)
        assert ids[row] == int(wanted.argmax())  # of equal ones the first, and the first NaN
        assert np.array_equal(scores[row].item(), wanted.max(), equal_nan=True)


def test_rows_of_all_kinds_are_chosen_for_together() -> None:
    logits, settings = torch.randn(4, 500), SamplingSettings(temperature=0.8, seed=1)
    alone, together = [], Sampler(500, window=4)
    kinds = [settings, SamplingSettings(), SamplingSettings(temperature=0.8, seed=1, top_k=5)]
    kinds.append(SamplingSettings(logit_bias=((3, 50.0),)))
    for row, one in enumerate(kinds):
        sampler = Sampler(500, window=4)
        for each, at in ((together, row), (sampler, 0)):
            each.open(at, one)
        here = np.zeros(1, dtype=np.int64)
        place = Contexts(rows=here, positions=here, depths=here)
        alone.append(sampler.choose(logits[row : row + 1], place)[0].item())
    rows = np.arange(4)
    ids, _ = together.choose(logits, Contexts(rows=rows, positions=rows * 0, depths=rows * 0))
    assert ids.tolist() == alone
    assert alone[3] == 3


@given(st.integers(0, 2**64 - 1), st.integers(0, 3), st.integers(0, 2**40))
def test_the_noise_of_some_ids_is_that_of_the_whole_place(
    seed: int, stream: int, position: int
) -> None:
    ids = np.array([0, 1, 2, 3, 4, 5, 7, 63, 64, 100, 999, 3, 0])
    whole = gumbel(seed, position, 1000, stream)
    np.testing.assert_array_equal(gumbel_of_place(seed, stream, position, ids), whole[ids])
