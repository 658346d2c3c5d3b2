"""A token of a matrix state has the same bits however it is cut from its text."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from modelpool.fast.cpu import cpu_threads
from modelpool.kernels.recurrence import MatrixKernels, matrix_kernels

SHAPES = ((1, 1, 1), (3, 16, 8), (2, 300, 33), (4, 32, 40), (16, 128, 128))
pytestmark = pytest.mark.skipif(matrix_kernels() is None, reason="no C library")


def kernels() -> MatrixKernels:
    found = matrix_kernels()
    assert found is not None
    return found


def tokens(shape: tuple[int, int, int], count: int, has_rate: bool) -> dict[str, Tensor | None]:
    heads, key_dim, value_dim = shape
    draws = torch.Generator().manual_seed(count)
    asking = torch.randn(count, heads, 2, key_dim, generator=draws) / key_dim**0.5
    decay, rate = torch.rand(2, count, heads, 1, generator=draws)
    return {
        "key": asking[:, :, 0],
        "query": asking[:, :, 1],
        "value": torch.randn(count, heads, value_dim, generator=draws),
        "decay": decay,
        "rate": rate if has_rate else None,
        "overlap": (asking[:, :, 0] * asking[:, :, 1]).sum(-1, keepdim=True),
    }


def piece(of: dict[str, Tensor | None], start: int, stop: int) -> dict[str, Tensor | None]:
    return {name: None if each is None else each[start:stop] for name, each in of.items()}


def run(shape: tuple[int, int, int], of: dict[str, Tensor | None], *cuts: int) -> list[Tensor]:
    state, outputs = torch.zeros(shape), []
    for start, stop in itertools.pairwise((0, *cuts, len(of["value"]))):  # type: ignore[arg-type]
        outputs.append(kernels().scan(state, **piece(of, start, stop))[0])  # type: ignore[arg-type]
    return [torch.cat(outputs), state]


@pytest.mark.parametrize("has_rate", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_computes_the_recurrence(shape: tuple[int, int, int], has_rate: bool) -> None:
    of = tokens(shape, 20, has_rate)
    wide = {name: each.double() for name, each in of.items() if each is not None}
    state, expected = torch.zeros(shape, dtype=torch.float64), []
    for t in range(20):
        now = {name: each[t] for name, each in wide.items()}
        state = state * now["decay"].unsqueeze(-1)
        added = now["value"]
        if has_rate:
            added = (added - torch.einsum("hk,hkv->hv", now["key"], state)) * now["rate"]
        state = state + now["key"].unsqueeze(-1) * added.unsqueeze(1)
        expected.append(torch.einsum("hk,hkv->hv", now["query"], state))
    out, found = run(shape, of)
    torch.testing.assert_close(out.double(), torch.stack(expected), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.double(), state, atol=1e-5, rtol=1e-5)


@given(st.sampled_from(SHAPES), st.booleans(), st.sets(st.integers(1, 39), max_size=6))
def test_a_text_in_pieces_has_the_bits_of_the_whole(
    shape: tuple[int, int, int], has_rate: bool, cuts: set[int]
) -> None:
    of = tokens(shape, 40, has_rate)
    whole, pieces = run(shape, of), run(shape, of, *sorted(cuts))
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


def test_threads_change_no_bit() -> None:
    of, shape = tokens(SHAPES[-1], 64, True), SHAPES[-1]
    with cpu_threads(1):
        one = run(shape, of)
    with cpu_threads(3):
        three = run(shape, of)
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))


@pytest.mark.parametrize("has_rate", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_was_read_can_be_put_behind_the_state_later(
    shape: tuple[int, int, int], has_rate: bool
) -> None:
    of = tokens(shape, 10, has_rate)
    out, state = run(shape, of)
    later = torch.zeros(shape)
    for t in range(10):
        before = later.clone()
        now = piece(of, t, t + 1)
        found, added = kernels().scan(later, **now, keeps=True)  # type: ignore[arg-type]
        assert torch.equal(later, before)
        assert torch.equal(found[0], out[t])
        key, decay = now["key"], now["decay"]
        assert key is not None
        assert decay is not None
        kernels().advance(later, key[0], added[0], decay[0])
    assert torch.equal(later, state)


def test_what_is_no_number_stays_in_its_head() -> None:
    of, shape = tokens((3, 16, 8), 5, True), (3, 16, 8)
    assert isinstance(of["value"], Tensor)
    of["value"][2, 1, 3] = float("nan")
    out, state = run(shape, of)
    assert not out[2:, 1].isfinite().all()
    assert out[:, [0, 2]].isfinite().all()
    assert state[[0, 2]].isfinite().all()


def test_the_default_dtype_of_the_process_changes_nothing() -> None:
    """transformers sets it while it loads another model."""
    of, shape = tokens((3, 16, 8), 5, True), (3, 16, 8)
    expected = run(shape, of)
    torch.set_default_dtype(torch.bfloat16)
    try:
        state = torch.zeros(shape, dtype=torch.float32)
        found, _ = kernels().scan(state, **of)  # type: ignore[arg-type]
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected[0])
    assert torch.equal(state, expected[1])


def test_what_the_library_cannot_read_is_refused() -> None:
    of = tokens((3, 16, 8), 5, True)
    with pytest.raises(ValueError, match="float64"):
        kernels().scan(torch.zeros(3, 16, 8, dtype=torch.float64), **of)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="contiguous"):
        kernels().scan(torch.zeros(3, 8, 16).transpose(1, 2), **of)  # type: ignore[arg-type]
