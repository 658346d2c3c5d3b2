"""A fake CUDA device: tensors with a shape and a device and without values.

What would wait for a real one (a value on the host, a copy to it, a shape that depends on values)
is an error, and copies to it are counted.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = torch.device("cuda:0")
_FROM_NUMPY = torch.from_numpy


class HostWait(Exception):
    pass


@dataclass
class FakeCuda:
    """`copies`: from the host to the device."""

    copies: int = 0


class NoHostWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises at whatever makes the host wait for an accelerator."""

    def __init__(self, device: FakeCuda) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

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
        if name == "_to_copy" and not is_there:
            self._device.copies += torch.device(kwargs.get("device") or "cpu") == CUDA
        if name == "index" and any(one.dtype == torch.bool for one in _indices(args)):
            raise HostWait("a mask as an index")
        return func(*args, **kwargs)


def _indices(args: Any) -> list[Tensor]:
    return [one for one in args[1] if isinstance(one, Tensor)]


class IndexedElsewhere(TorchFunctionMode):
    """Brackets and copies without a guard of devices, which torch without CUDA has not."""

    def __init__(self, device: FakeCuda) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, places = func.__name__, [one.device.type for one in args if isinstance(one, Tensor)]
        if name == "copy_" and "cuda" in places:
            self._device.copies += places[1] == "cpu"
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


def _real(values: NDArray[Any]) -> Tensor:
    """What the host has made has values, and may be looked at there."""
    with unset_fake_temporarily():
        return _FROM_NUMPY(values)


@contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    device = FakeCuda()
    with (
        mock.patch("torch.from_numpy", _real),
        torch.inference_mode(False),  # in it operators come whole, with what waits inside of them
        torch.no_grad(),
        FakeTensorMode(allow_non_fake_inputs=True),
        NoHostWaits(device),
        IndexedElsewhere(device),
    ):
        yield device
