"""ShortForward: what forwards without modules have in common, their parts called by name.

Contract: a profile can say where the time of a forward goes by its copy `watched(watch)`, which
calls each part as `watch(name, part)` returns it: the same operators on the same values, hence the
same bits.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any, Self

from torch import Tensor
from torch.nn import functional as F

from modelpool.attention.kv_view import Attend, KVView

Operator = Callable[[Tensor], Tensor]
# Returns the part, or what does the same. Several parts may have one name.
Watch = Callable[[str, Callable[..., Any]], Callable[..., Any]]


class ShortForward:
    """Its layers have a `watched` copy each, too."""

    _layers: tuple[Any, ...]
    _norm: Operator
    _head: Operator
    _attend: Attend
    # By attribute, the names of the parts beside the layers.
    _parts: Mapping[str, str] = {
        "_norm": "norms",
        "_head": "head",
        "_rotate": "rotation",
        "_write": "keys and values",
        "_attend": "attention",
        "_gate": "activation",
    }

    def watched(self, watch: Watch) -> Self:
        """The same forward, its parts called as `watch` has them."""
        other = copy.copy(self)
        other._layers = tuple(layer.watched(watch) for layer in self._layers)
        for attribute, name in self._parts.items():
            setattr(other, attribute, watch(name, getattr(self, attribute)))
        return other

    @staticmethod
    def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        raise NotImplementedError

    @staticmethod
    def _write(view: KVView, layer: int, key: Tensor, value: Tensor) -> None:
        view.write(layer, key, value)

    @staticmethod
    def _gate(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate).mul_(up)
