"""The store copies slots in all layers; what a row must hold: `test_model_state`."""

import mmap
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from statemgr import KVStore
from tests.kv_layers import kv_layer

CPU = torch.device("cpu")


@pytest.fixture
def store() -> KVStore:
    """Layers of two shapes and dtypes, of one values narrower than keys; every slot holds its
    number."""
    wide, narrow = (torch.float64, 1, 2, 2), (torch.float32, 2, 3, 2)
    layers = dict(enumerate(kv_layer(CPU, *one) for one in (wide, narrow, wide)))
    store = KVStore(layers, slots=16)
    assert store.nbytes == 16 * (2 * 4 * 8 + 2 * (3 + 2) * 4)
    for layer in range(3):
        for part in store.layer(layer):
            part.copy_(torch.arange(16)[:, None, None].expand_as(part))
    return store


def held(store: KVStore) -> list[list[float]]:
    """By layer and part, what each slot holds."""
    parts = [part for layer in range(3) for part in store.layer(layer)]
    assert all(bool((part == part[:, :1, :1]).all()) for part in parts)
    return [part[:, 0, 0].tolist() for part in parts]


def test_slots_are_copied_in_all_layers_though_source_and_destination_overlap(
    store: KVStore,
) -> None:
    store.copy(np.array([5, 6, 9]), np.array([4, 5, 6]))
    assert held(store) == [[0, 1, 2, 3, 5, 6, 9, *range(7, 16)]] * 6


def test_of_latents_there_is_one_tensor() -> None:
    layers = {number: kv_layer(CPU, torch.float32, 1, 6, 4, is_latent=True) for number in range(2)}
    store = KVStore(layers, slots=16)
    assert store.nbytes == 2 * 16 * 6 * 4
    keys, values = store.layer(1)
    keys.normal_()
    assert torch.equal(values, keys[..., :4])
    assert store.kept(1) == (keys,)
    before = keys.clone()
    store.copy(np.array([5, 6, 9]), np.array([4, 5, 6]))
    assert torch.equal(values[[4, 5, 6]], before[[5, 6, 9], :, :4])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_found(store: KVStore, bad: float) -> None:
    store.layer(1)[1][5, 1, 0] = bad
    assert store.is_finite(np.array([4, 6, *range(8, 16)]))
    assert not store.is_finite(np.array([9, 5, 1]))


def test_finite_halves_are_numbers_though_their_sum_is_none() -> None:
    layer = kv_layer(CPU, torch.float16, 1, 4)
    store = KVStore({0: layer}, slots=16)
    store.layer(0)[0][:] = 60000.0
    assert store.is_finite(np.arange(16))


def test_indices_go_to_a_device_once_and_the_host_does_not_wait(store: KVStore) -> None:
    copies: list[Any] = []
    to = Tensor.to

    def noting(tensor: Tensor, *place: Any, **options: Any) -> Tensor:
        copies.append(options)
        return to(tensor, *place, **options)

    with mock.patch.object(Tensor, "to", noting):
        store.copy(np.array([5, 7]), np.array([4, 5]))
    assert copies == [{"non_blocking": True}]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells what is resident")
def test_memory_is_taken_when_it_is_written() -> None:
    def resident_mib() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * mmap.PAGESIZE // 2**20

    layer = kv_layer(CPU, torch.bfloat16, 8, 128, 128)
    before = resident_mib()
    store = KVStore({0: layer, 1: layer}, slots=2**17)
    assert store.nbytes == 2**30
    assert resident_mib() - before < 64
    keys, values = store.layer(1)
    assert not keys[::4096].any()
    keys[-1] = values[-1] = 1.0
    assert resident_mib() - before < 64


def test_more_memory_than_there_is_is_said() -> None:
    layer = kv_layer(CPU, torch.bfloat16, 8, 128)
    with pytest.raises(MemoryError, match="bytes of keys and values"):
        KVStore({0: layer}, slots=2**48)
