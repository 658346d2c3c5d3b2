"""Drafting on an accelerator never waits for it before the tree is whole.

A fake CUDA device: tensors with a shape and a device and without values. What would wait for a real
one (a value on the host, a copy to it, a shape that depends on values) is an error.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from modelpool.attention.packed import AttentionLayer, KVView, attend_all
from modelpool.probe import KVLayer
from processors.active_model import ActiveModel
from processors.draft import DraftProcessor
from processors.drafts import DraftRequest
from processors.sampler import Sampler
from processors.sampling_row import SamplingSettings
from processors.shared_noise import SharedNoise
from statemgr import StateManager

CUDA = torch.device("cuda:0")
VOCAB, DEPTH, LAYERS, HEADS, KV_HEADS, DIM = 64, 4, 2, 4, 2, 8


class HostWait(Exception):
    pass


class TreeIsAskedFor(Exception):
    """Where the one wait of a draft is."""


class NoHostWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises at whatever makes the host wait for an accelerator."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        here = [one for one in args if isinstance(one, Tensor)]
        is_there = any(one.device.type == "cuda" for one in here)
        if is_there and name in ("_local_scalar_dense", "nonzero", "masked_select", "unique"):
            raise HostWait(name)
        if name == "_to_copy" and is_there and torch.device(kwargs.get("device") or CUDA) != CUDA:
            raise HostWait("copy to the host")
        if name == "index" and any(one.dtype == torch.bool for one in _indices(args)):
            raise HostWait("a mask as an index")
        return func(*args, **kwargs)


def _indices(args: Any) -> list[Tensor]:
    return [one for one in args[1] if isinstance(one, Tensor)]


class IndexedElsewhere(TorchFunctionMode):
    """Brackets and copies without a guard of devices, which torch without CUDA has not."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, places = func.__name__, [one.device.type for one in args if isinstance(one, Tensor)]
        if name == "copy_" and "cuda" in places:
            return _copied(*args[:2])
        if name == "__getitem__" and places[:1] == ["cuda"]:
            return _part(*args)
        if name == "__setitem__" and places[:1] == ["cuda"]:
            part, value = _part(*args[:2]), args[2]
            return _copied(part, value) if isinstance(value, Tensor) else part.fill_(value)
        return func(*args, **(kwargs or {}))


def _copied(there: Tensor, here: Tensor) -> Tensor:
    """There are no values to copy."""
    if there.device.type == "cpu":
        raise HostWait("copy to the host")
    assert here.expand_as(there).shape == there.shape
    return there


def _part(values: Tensor, index: Any) -> Tensor:
    """`values[index]` of numbers, slices, None, an ellipsis and tensors."""
    parts = index if isinstance(index, tuple) else (index,)
    tensors: list[Tensor | None] = []
    dim = 0
    for place, one in enumerate(parts):
        if one is Ellipsis:
            dim = values.dim() - sum(part is not None for part in parts[place + 1 :])
        elif one is None:
            values, dim = values.unsqueeze(dim), dim + 1
        elif isinstance(one, slice):
            values = torch.ops.aten.slice.Tensor(values, dim, one.start, one.stop, one.step or 1)
            dim += 1
        elif isinstance(one, Tensor):
            tensors += [None] * (dim - len(tensors)) + [one]
            dim += 1
        else:
            values = values.select(dim, int(one))
    return torch.ops.aten.index.Tensor(values, tensors) if tensors else values


class FakeModel:
    """Attends through the view as a model does; its logits are any."""

    name, device, vocab_size = "fake", CUDA, VOCAB

    def __init__(self, walks_paths: bool) -> None:
        layer = KVLayer(CUDA, torch.float16, KV_HEADS, DIM)
        self.kv_layers, self.walks_paths, self.forwards = (layer,) * LAYERS, walks_paths, 0

    def forward(
        self, tokens: Tensor, positions: Tensor, view: KVView, logit_index: Tensor
    ) -> Tensor:
        self.forwards += 1
        count = len(tokens)
        for number in range(LAYERS):
            new = _empty(count, KV_HEADS, DIM)
            view.write(number, new, new)
            if self.walks_paths:
                assert view.key_paths(CUDA).path.device == CUDA
                assert view.slots(CUDA).device == CUDA
            else:
                attend_all(view, AttentionLayer(number, 1.0, window=5), _empty(HEADS, count, DIM))
        return _empty(len(logit_index), VOCAB)


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float16, device=CUDA)


@contextmanager
def fake_cuda() -> Iterator[None]:
    with (
        torch.inference_mode(False),  # in it operators come whole, with what waits inside of them
        torch.no_grad(),
        FakeTensorMode(allow_non_fake_inputs=True),
        NoHostWaits(),  # type: ignore[no-untyped-call]
        IndexedElsewhere(),
    ):
        yield


SETTINGS = [
    SamplingSettings(),
    SamplingSettings(temperature=0.8, seed=3),
    SamplingSettings(temperature=0.7, top_k=4, top_p=0.9, min_p=0.1, repetition_penalty=1.2),
]


def opened(model: FakeModel, settings: list[SamplingSettings]) -> tuple[ActiveModel, Sampler]:
    manager, sampler = StateManager(rows=4, max_tokens=128), Sampler(VOCAB, window=16)
    for settings_of_row in settings:
        row = manager.allocate([3, 1, 4, 1], 64)
        assert row is not None
        sampler.open(row, settings_of_row, prompt=[3, 1, 4, 1])
    state = manager.open_state("fake", model.kv_layers, canonical=model.walks_paths)
    return ActiveModel(model, state, manager), sampler  # type: ignore[arg-type]


@pytest.mark.parametrize("walks_paths", [False, True], ids=["masks", "paths"])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("settings", [SETTINGS[:1], SETTINGS[:2], SETTINGS], ids=len)
def test_the_first_wait_of_a_draft_is_for_the_whole_tree(
    settings: list[SamplingSettings], width: int, walks_paths: bool
) -> None:
    rows = np.arange(len(settings))
    depths = np.full(len(rows), DEPTH)
    depths[-1] -= len(rows) > 1  # rows end at different depths
    request = DraftRequest(rows, np.zeros_like(rows), depths, width)
    model = FakeModel(walks_paths)
    with fake_cuda(), mock.patch("processors.beam.Beam.tree", side_effect=TreeIsAskedFor):
        active, sampler = opened(model, settings)
        with pytest.raises(TreeIsAskedFor):
            DraftProcessor(sampler, SharedNoise()).draft(active, request)
    assert model.forwards == DEPTH


@pytest.mark.parametrize("look", ["item", "cpu", "to", "copy", "mask"])
def test_what_waits_is_noticed(look: str) -> None:
    waits: dict[str, Callable[[Tensor], object]] = {
        "item": lambda there: there.sum().item(),
        "cpu": lambda there: there.cpu(),
        "to": lambda there: there.to("cpu", non_blocking=True),
        "copy": lambda there: torch.zeros(3).copy_(there),
        "mask": lambda there: there[there > 0],
    }
    with fake_cuda(), pytest.raises(HostWait):
        waits[look](torch.zeros(3, device=CUDA))
