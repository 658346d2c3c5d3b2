"""The noise is a pure function, and a bank of it says nothing that the function does not."""

import numpy as np
import pytest
import torch

from processors.noise import NoiseBank, gumbel, uniform

VOCAB = 40


def make_bank(window: int = 8) -> NoiseBank:
    return NoiseBank(VOCAB, window, torch.device("cpu"))


def test_noise_is_a_function_of_seed_stream_position_and_id() -> None:
    assert np.array_equal(gumbel(3, 5, VOCAB), gumbel(3, 5, VOCAB))
    others = [gumbel(4, 5, VOCAB), gumbel(3, 6, VOCAB), gumbel(3, 5, VOCAB, stream=1)]
    assert not any(np.isin(other, gumbel(3, 5, VOCAB)).any() for other in others)


def test_a_larger_vocabulary_changes_no_value() -> None:
    assert np.array_equal(gumbel(3, 5, 7), gumbel(3, 5, 1000)[:7])


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 2**20])
def test_every_seed_and_position_gives_finite_noise(seed: int, position: int) -> None:
    assert np.isfinite(gumbel(seed, position, 1000)).all()


def test_noise_has_the_mean_and_the_spread_of_a_gumbel() -> None:
    noise = gumbel(0, 0, 200_000)
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.02)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.05)


def test_a_uniform_is_a_function_of_seed_stream_and_position() -> None:
    assert uniform(3, 5) == uniform(3, 5)
    assert len({uniform(3, 5), uniform(4, 5), uniform(3, 6), uniform(3, 5, stream=1)}) == 4


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    values = np.array([uniform(seed, seed % 7) for seed in range(20_000)])
    assert 0.0 <= values.min() < 0.001
    assert 0.999 < values.max() < 1.0
    assert values.mean() == pytest.approx(0.5, abs=0.01)
    assert values.var() == pytest.approx(1 / 12, abs=0.005)


def test_a_uniform_knows_nothing_of_the_gumbel_noise_of_its_key() -> None:
    noise = np.array([gumbel(seed, 0, 8) for seed in range(5_000)])
    values = np.array([uniform(seed, 0) for seed in range(5_000)])
    as_uniform = np.exp(-np.exp(-noise))
    assert np.abs(as_uniform - values[:, None]).min() > 0.0
    for token in range(8):
        assert abs(np.corrcoef(as_uniform[:, token], values)[0, 1]) < 0.06


def test_a_bank_keeps_the_streams_of_one_seed_apart() -> None:
    bank = make_bank()
    bank.open(0, seed=5)
    bank.open(1, seed=5, stream=2**32 + 1)
    taken = bank.take([0, 1], [3, 3]).numpy()
    assert np.array_equal(taken[0], gumbel(5, 3, VOCAB))
    assert np.array_equal(taken[1], gumbel(5, 3, VOCAB, stream=2**32 + 1))


def test_a_bank_gives_each_row_the_noise_of_its_seed() -> None:
    bank = make_bank()
    seeds = {4: 10, 0: 11, 7: 12}
    for row, seed in seeds.items():
        bank.open(row, seed)
    rows, positions = [4, 4, 0, 7, 0], [0, 3, 3, 0, 9]
    for _ in range(2):  # computed, then remembered
        taken = bank.take(rows, positions).numpy()
        for noise, row, position in zip(taken, rows, positions, strict=True):
            assert np.array_equal(noise, gumbel(seeds[row], position, VOCAB))


def test_a_ring_is_written_anew_as_positions_move_on() -> None:
    bank = make_bank(window=4)
    bank.open(0, seed=5)
    for position in [0, 1, 2, 3, 4, 5, 3, 2, 9, 5]:  # forwards, and back within the window
        noise = bank.take([0], [position])[0].numpy()
        assert np.array_equal(noise, gumbel(5, position, VOCAB))


def test_a_row_that_is_opened_again_forgets_its_former_seed() -> None:
    bank = make_bank()
    bank.open(0, seed=5)
    bank.take([0], [2])
    bank.close(0)
    bank.close(0)  # of a row without noise: nothing
    bank.open(0, seed=6)
    assert np.array_equal(bank.take([0], [2])[0].numpy(), gumbel(6, 2, VOCAB))


def test_a_bank_grows_without_losing_noise() -> None:
    bank = make_bank()
    for row in range(9):
        bank.open(row, seed=row)
        bank.take([row], [1])
    taken = bank.take(list(range(9)), [1] * 9).numpy()
    assert all(np.array_equal(taken[row], gumbel(row, 1, VOCAB)) for row in range(9))


def test_every_draw_for_a_position_has_noise_of_its_own() -> None:
    assert not np.array_equal(gumbel(3, 5, VOCAB), gumbel(3, 5, VOCAB, draw=1))
    assert uniform(3, 5) != uniform(3, 5, draw=1)
    bank = NoiseBank(VOCAB, 4, torch.device("cpu"))
    bank.open(0, 7)
    for draw in (1, 2, 0, 2):
        taken = bank.take([0], [3], [draw])[0].numpy()
        assert np.array_equal(taken, gumbel(7, 3, VOCAB, draw=draw))


def test_float32_noise_is_the_rounded_float64_noise() -> None:
    bank = make_bank(window=4)
    bank.open(0, seed=5)
    bank.take([0], [1])  # before anybody asked for float32
    for row in range(1, 4):
        bank.open(row, seed=5 + row)  # and as the bank grows
        for position in (1, 2, 6, 2):
            taken = bank.take([0, row], [position] * 2, dtype=torch.float32)
            assert taken.dtype == torch.float32
            assert torch.equal(taken, bank.take([0, row], [position] * 2).float())
            wanted = gumbel(5 + row, position, VOCAB).astype(np.float32)
            assert np.array_equal(taken[1].numpy(), wanted)


def test_what_is_taken_is_a_copy() -> None:
    bank = make_bank()
    bank.open(0, seed=5)
    for dtype in (torch.float64, torch.float32):
        bank.take([0], [3], dtype=dtype).zero_()
        assert torch.equal(bank.take([0], [3], dtype=dtype)[0].double() != 0, torch.ones(VOCAB) > 0)


def test_a_row_without_noise_is_refused() -> None:
    bank = make_bank()
    bank.open(1, seed=5)
    for row in (0, 1):
        bank.close(row)
        with pytest.raises(AssertionError):
            bank.take([row], [0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_bank_recalls_positions_that_its_ring_has_lost(dtype: torch.dtype) -> None:
    bank = make_bank(window=4)
    bank.open(1, seed=5, stream=2)
    ahead = bank.take([1] * 4, [6, 7, 8, 9])
    positions = np.array([0, 9, 3, 6, 5])
    found = bank.recall(np.ones(5, dtype=np.int64), positions, dtype)
    expected = [gumbel(5, position, VOCAB, stream=2) for position in positions.tolist()]
    assert torch.equal(found, torch.from_numpy(np.stack(expected)).to(dtype))
    assert torch.equal(bank.take([1] * 4, [6, 7, 8, 9]), ahead)


def test_what_a_bank_recalls_is_never_that_of_another_draw() -> None:
    bank = make_bank()
    bank.open(0, seed=5)
    bank.take([0], [3], draws=[2])
    assert torch.equal(
        bank.recall(np.array([0]), np.array([3]))[0], torch.from_numpy(gumbel(5, 3, VOCAB))
    )
