"""What a forward calls by name, so that a profile can say where its time goes.

Contract: `DirectForward` and `LeanForward` have a copy `watched(watch)`, which calls each of its
parts as `watch(name, part)` returns it: the same operators on the same values, hence the same bits.
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from modelpool.attention.packed import KVView


class Watch(Protocol):
    def __call__(self, name: str, part: Callable[..., Any]) -> Callable[..., Any]:
        """`part`, or what does the same. Several parts may have one name."""


def written(view: KVView, layer: int, key: Tensor, value: Tensor) -> None:
    """See `KVView.write`."""
    view.write(layer, key, value)
