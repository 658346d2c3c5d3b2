"""The store moves and empties slots in all layers; what a row must hold: `test_model_state`."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from modelpool.probe import KVLayer
from statemgr import KVStore

CPU = torch.device("cpu")


@pytest.fixture
def store() -> KVStore:
    """Layers of two shapes; every slot holds its number."""
    layers = [KVLayer(CPU, torch.float64, heads, 2) for heads in (1, 2, 1)]
    store = KVStore(layers, rows=2, slots=8)
    for layer in range(3):
        for part in store.layer(layer):
            part.copy_(torch.arange(16)[:, None, None].expand_as(part))
    return store


def held(store: KVStore) -> list[list[float]]:
    """By layer and part, what each slot holds."""
    parts = [part for layer in range(3) for part in store.layer(layer)]
    assert all(bool((part == part[:, :1, :1]).all()) for part in parts)
    return [part[:, 0, 0].tolist() for part in parts]


def test_slots_move_in_all_layers_though_source_and_destination_overlap(store: KVStore) -> None:
    store.move(np.array([5, 6, 7]), np.array([4, 5, 6]))
    assert held(store) == [[0, 1, 2, 3, 5, 6, 7, 7, *range(8, 16)]] * 6


def test_slots_are_scrubbed_in_all_layers(store: KVStore) -> None:
    store.scrub(np.array([1, 15]))
    assert held(store) == [[0, 0, *range(2, 15), 0]] * 6


def test_indices_go_to_a_device_once_and_the_host_does_not_wait(store: KVStore) -> None:
    copies: list[Any] = []
    to = Tensor.to

    def noting(tensor: Tensor, *place: Any, **options: Any) -> Tensor:
        copies.append(options)
        return to(tensor, *place, **options)

    with mock.patch.object(Tensor, "to", noting):
        store.move(np.array([5, 6]), np.array([4, 5]))
        store.scrub(np.array([1]))
    assert copies == [{"non_blocking": True}] * 2
