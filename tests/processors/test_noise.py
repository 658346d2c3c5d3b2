"""The noise is a pure function, and a bank of it says nothing that the function does not."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from processors.contexts import Contexts
from processors.noise import NoiseBank, _from_uniforms, _Rings, gumbel
from processors.row_noise import _FAR
from processors.sampler import Sampler
from processors.sampling_row import SamplingSettings
from processors.score_edits import warp

VOCAB = 40


HOST = torch.device("cpu")
OTHER = torch.device("cpu", 0)  # another device to a bank, which knows it by its name alone


def make_bank(window: int = 8) -> NoiseBank:
    return NoiseBank(VOCAB, window)


def test_noise_is_a_function_of_seed_stream_position_and_id() -> None:
    assert np.array_equal(gumbel(3, 5, VOCAB), gumbel(3, 5, VOCAB))
    others = [gumbel(4, 5, VOCAB), gumbel(3, 6, VOCAB), gumbel(3, 5, VOCAB, stream=1)]
    assert not any(np.isin(other, gumbel(3, 5, VOCAB)).any() for other in others)


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 2**20])
def test_every_seed_and_position_gives_finite_noise(seed: int, position: int) -> None:
    assert np.isfinite(gumbel(seed, position, 1000)).all()


def test_noise_has_the_mean_and_the_spread_of_a_gumbel() -> None:
    noise = gumbel(0, 0, 200_000)
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.02)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.05)


def test_a_row_without_noise_is_refused() -> None:
    bank = make_bank()
    bank.open(1, seed=5)
    for row in (0, 1):
        bank.close(row)
        with pytest.raises(AssertionError):
            bank.take(HOST, [row], [0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_bank_recalls_positions_that_its_ring_has_lost(dtype: torch.dtype) -> None:
    bank = make_bank(window=4)
    bank.open(1, seed=5, stream=2)
    ahead = bank.take(HOST, [1] * 4, [6, 7, 8, 9])
    positions = np.array([0, 9, 3, 6, 5])
    found = bank.recall(HOST, np.ones(5, dtype=np.int64), positions, dtype)
    expected = [gumbel(5, position, VOCAB, stream=2) for position in positions.tolist()]
    assert torch.equal(found, torch.from_numpy(np.stack(expected)).to(dtype))
    assert torch.equal(bank.take(HOST, [1] * 4, [6, 7, 8, 9]), ahead)


asked_once = st.sets(  # rows, and places in their rings
    st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=4
)
asked_of_a_bank = st.tuples(
    st.sampled_from([HOST, OTHER]),
    st.integers(0, 9),
    asked_once,
    st.sampled_from([torch.float64, torch.float32]),
)


@given(st.lists(st.one_of(st.integers(0, 2), asked_of_a_bank), max_size=12))
def test_whatever_was_asked_before_noise_is_of_seed_stream_and_position(
    steps: list[int | tuple[torch.device, int, set[tuple[int, int]], torch.dtype]],
) -> None:
    """Rings are written anew as positions move on; a number: that row is opened again."""
    bank, keys = make_bank(window=4), dict[int, tuple[int, int]]()
    for number, step in enumerate([*range(3), *steps]):
        if isinstance(step, int):
            bank.close(step)  # of a row without noise: nothing
            keys[step] = 100 + number, 2**32 * number
            bank.open(step, *keys[step])
            continue
        device, first, asked, dtype = step
        rows, positions = [row for row, _ in asked], [first + place for _, place in asked]
        taken = bank.take(device, rows, positions, dtype)
        for noise, row, position in zip(taken, rows, positions, strict=True):
            seed, stream = keys[row]
            wanted = torch.from_numpy(gumbel(seed, position, VOCAB, stream)).to(dtype)
            assert torch.equal(noise, wanted)
        taken.zero_()  # it is a copy


@given(
    st.lists(
        st.tuples(
            st.sampled_from([HOST, OTHER]),
            st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), min_size=1, max_size=4),
            st.sampled_from([torch.float64, torch.float32]),
        ),
        max_size=8,
    )
)
def test_devices_share_what_was_drawn_and_each_gets_the_noise_of_the_seed(
    asked: list[tuple[torch.device, list[tuple[int, int]], torch.dtype]],
) -> None:
    bank, drawn = make_bank(window=6), []

    def noting(seed: int, position: int, *rest: Any) -> NDArray[np.float64]:
        drawn.append((seed, position))
        return gumbel(seed, position, *rest)

    for device in (HOST, OTHER):
        bank.hold_on(device)
    for row in range(3):
        bank.open(row, seed=row)
    with mock.patch("processors.noise.gumbel", noting):
        for device, places, dtype in asked:
            rows, positions = zip(*places, strict=True)
            for noise, (row, position) in zip(
                bank.take(device, rows, positions, dtype=dtype), places, strict=True
            ):
                wanted = torch.from_numpy(gumbel(row, position, VOCAB)).to(dtype)
                assert torch.equal(noise, wanted)
    assert len(drawn) == len(set(drawn))


def test_a_bank_that_could_not_grow_on_one_device_grows_when_it_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bank = make_bank()
    bank.open(0, seed=5)
    first = bank.take(HOST, [0], [3]), bank.take(OTHER, [0], [3])
    grow = _Rings.grow

    def no_memory(rings: _Rings, places: int) -> None:
        if rings is bank._rings[OTHER]:
            raise MemoryError("full")
        grow(rings, places)

    with monkeypatch.context() as patch:
        patch.setattr(_Rings, "grow", no_memory)
        with pytest.raises(MemoryError):
            bank.open(1, seed=6)
    for device, before in zip((HOST, OTHER), first, strict=True):
        assert torch.equal(bank.take(device, [0], [3]), before)
    bank.open(1, seed=6)
    for device in (HOST, OTHER):
        assert np.array_equal(bank.take(device, [1], [3])[0].numpy(), gumbel(6, 3, VOCAB))


MANY = 2**15  # ids, from which on limited rows get noise for what is left alone


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_ids_that_limits_leave_have_the_noise_of_a_row_without_limits(
    dtype: torch.dtype,
) -> None:
    limits: list[dict[str, Any]] = [
        {"top_k": 9},
        {"top_p": 0.3},
        {"min_p": 0.2},
        {"top_k": 3000},
        {},
    ]
    sampler = Sampler(MANY, window=8)
    for row, one in enumerate(limits):
        sampler.open(row, SamplingSettings(temperature=0.8, seed=row, stream=row, **one))
    rows, positions = np.array([0, 1, 2, 3, 4, 0]), np.array([2, 0, 1, 5, 3, 3])
    random = torch.Generator().manual_seed(0)
    logits = (2 * torch.randn(6, MANY, generator=random)).to(dtype)
    logits[1, :3] += 9
    contexts = Contexts(rows=rows, positions=positions, depths=np.zeros_like(rows))
    got = sampler.scores(logits, contexts)
    each = zip(rows.tolist(), positions.tolist(), strict=True)
    drawn = torch.from_numpy(np.stack([gumbel(row, at, MANY, stream=row) for row, at in each]))
    kept = ~got.isneginf()
    assert [int(count) for count in kept.sum(dim=1)][::5] == [9, 9]
    wanted = logits.double() / 0.8 + drawn
    torch.testing.assert_close(got[kept], wanted[kept], rtol=0, atol=1e-12)


def test_noise_is_within_the_bounds_that_exclude_ids() -> None:
    least, most = _from_uniforms(np.array([0.0, 1 - 2.0**-53]))
    assert least == _from_uniforms(np.array([2.0**-54]))
    assert 40 < most - least < _FAR


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**63),
    scale=st.sampled_from([0.1, 1.0, 3.0, 10.0]),
    temperature=st.sampled_from([0.02, 0.1, 0.3, 0.5, 1.0]),
    limits=st.sampled_from([{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.01}]),
)
def test_the_choice_is_that_by_noise_of_all_ids(
    seed: int, scale: float, temperature: float, limits: dict[str, Any]
) -> None:
    sampler = Sampler(MANY, window=8)
    rows = [SamplingSettings(temperature=temperature, seed=seed + row, **limits) for row in (0, 1)]
    for row, one in enumerate(rows):
        sampler.open(row, one)
    random = torch.Generator().manual_seed(seed % 2**32)
    logits = (scale * torch.randn(2, MANY, generator=random)).round(decimals=1)  # ties
    places = Contexts(
        rows=np.arange(2), positions=np.array([3, 7]), depths=np.zeros(2, dtype=np.int64)
    )
    drawn = torch.from_numpy(np.stack((gumbel(seed, 3, MANY), gumbel(seed + 1, 7, MANY))))
    got = sampler.scores(logits, places)
    wanted = warp(logits, rows, torch.float64) + drawn
    assert torch.equal(got.argmax(dim=1), wanted.argmax(dim=1))
    best = got.argmax(dim=1, keepdim=True)
    noise = drawn.gather(1, best)
    score = got.gather(1, best) - logits.double().gather(1, best) / temperature
    torch.testing.assert_close(score, noise, rtol=0, atol=1e-9)


@pytest.mark.parametrize("limits", [{"temperature": 0.2}, {"temperature": 1.0, "top_k": 900}])
def test_rows_of_many_ids_draw_for_those_that_can_win(limits: dict[str, Any]) -> None:
    sampler = Sampler(MANY, window=8)
    sampler.open(0, SamplingSettings(seed=1, **limits))
    one, none = np.array([0]), np.array([0])
    logits, ids = torch.zeros(1, MANY), np.array([7, MANY - 1])
    logits[0, :900] = 10.0
    with mock.patch("processors.noise.gumbel", side_effect=AssertionError):
        chosen, _ = sampler.choose(logits, Contexts(rows=one, positions=none, depths=none))
        at = sampler.noise_at(0, 4, ids)
    assert int(chosen) == int(gumbel(1, 0, MANY)[:900].argmax())
    np.testing.assert_allclose(at, gumbel(1, 4, MANY)[ids], rtol=0, atol=1e-15)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_cold_rows_keep_what_is_no_number(value: float) -> None:
    sampler = Sampler(MANY, window=8)
    sampler.open(0, SamplingSettings(temperature=0.2, seed=1))
    one, none = np.array([0]), np.array([0])
    logits = torch.zeros(1, MANY)
    logits[0, 5] = value
    chosen, score = sampler.choose(logits, Contexts(rows=one, positions=none, depths=none))
    assert chosen.tolist() == [5]
    assert torch.equal(score.isnan(), torch.tensor([value != value]))
    assert not score.isfinite().any()


def test_a_draw_that_fails_in_a_thread_is_told_and_made_again() -> None:
    bank = NoiseBank(MANY, window=4, threads=2)
    for row in range(2):
        bank.open(row, seed=row)
    with mock.patch("processors.noise.gumbel", side_effect=MemoryError), pytest.raises(MemoryError):
        bank.take(HOST, [0, 1], [3, 3])
    assert np.array_equal(bank.take(HOST, [0, 1], [3, 3])[1].numpy(), gumbel(1, 3, MANY))
