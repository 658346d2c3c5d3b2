"""ShortForward: the common part of forwards that call a model's operators without its modules.

Contract: operators are chosen from a model's shape (`model_shape`) when a forward is made, so that
a pass decides nothing.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from modelpool.attention.kv_view import Attend, AttentionLayer, KVView
from modelpool.fast.model_shape import LayerShape, ModelShape, Operator
from modelpool.fast.rotation import Table, Turn
from modelpool.packed_model import PackedModel

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
_Find = Callable[Concatenate[PackedModel, P], T | None]


def optional(find: _Find[P, T]) -> _Find[P, T]:
    """Make `find`, which returns a forward of a model, return None if it fails.

    The model's ordinary forward works without it, and the model's own code may raise anything.
    Raises `torch.OutOfMemoryError`.
    """

    @wraps(find)
    def found(packed: PackedModel, /, *args: P.args, **options: P.kwargs) -> T | None:
        try:
            return find(packed, *args, **options)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            kind = type(error).__name__
            logger.info("%s keeps its ordinary forward: %s: %s", packed.name, kind, error)
            return None

    return found


def unchanged(x: Tensor, *_: Tensor) -> Tensor:
    return x


def then(first: Callable[..., Tensor], *following: Operator | None) -> Callable[..., Tensor]:
    """Compose `first` with those of the following operators that are not None."""
    for last in following:
        if last is not None:
            first = _both(first, last)
    return first


def _both(first: Callable[..., Tensor], last: Operator) -> Callable[..., Tensor]:
    return lambda *x: last(first(*x))


def run_alone(module: Callable[[Tensor], Any]) -> Operator:
    """Return a module that takes [1, T, hidden_size] as an operator on [T, hidden_size]."""

    def run(x: Tensor) -> Tensor:
        y = module(x.unsqueeze(0))
        y = y[0] if isinstance(y, tuple) else y  # a tuple also has a router's scores
        own: Tensor = y[0]
        return own

    return run


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortLayer:
    """The operators of one layer.

    Attributes:
        qkv: gives queries, keys and values, side by side.
        head_norms: norms of queries and keys [T, heads + kv_heads, head_dim].
        angles: index of the angles that it rotates by.
        out, down: give what is added to the residual; in a lean forward they have `add_to`.
        between: None if the MLP reads the same input as attention.
        rotated: number of heads of queries and of keys.
    """

    before: Operator
    qkv: Operator
    head_norms: Operator | None
    rotate: Turn
    angles: int
    out: Any
    between: Operator | None
    gate_up: Callable[[Tensor], Any]
    gate: Callable[[Any], Tensor]
    down: Any
    attention: AttentionLayer
    heads: int
    rotated: int
    head_dim: int

    def projected(self, x: Tensor, angles: Table) -> tuple[Tensor, Tensor]:
        """Return queries and keys [T, rotated, head_dim], and values [T, kv_heads, ...].

        The input `x` is [T, hidden].
        """
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        both = qkv[:, : self.rotated]
        if self.head_norms is not None:
            both = self.head_norms(both)
        return self.rotate(both, *angles), qkv[:, self.rotated :]

    def add_to(self, residual: Tensor, read: Tensor, seen: Tensor) -> None:
        """Add the outputs of attention and then of the MLP to `residual`, in place.

        This is for lean forwards. `read` is the input of attention, and `seen` its result before
        `out`.
        """
        self.out.add_to(residual, seen)
        gate_up = self.gate_up(read if self.between is None else self.between(residual))
        self.down.add_to(residual, self.gate(gate_up))


class ShortForward:
    """Base class of forwards whose subclasses define how parts of a layer are computed."""

    _layers: tuple[ShortLayer, ...]
    _norm: Operator
    _head: Operator
    _attend: Attend
    _is_lean: bool
    _normed: Callable[[Any], Operator]  # for a norm or None
    _side_by_side: Callable[[Any, Sequence[str]], Operator]  # for linear layers of a module
    _linear: Callable[[Any, str], Any]
    _whole: Callable[[Any], Any]  # for an MLP that is run as it is
    _gate_up: Callable[[Any, Sequence[str]], Callable[[Tensor], Any]]
    _gate: Callable[[Operator], Callable[[Any], Tensor]]  # for the output of `_gate_up`
    _added: Callable[[LayerShape, Any, Any], Any]  # a part's output after its norm

    def _attention(self, layer: ShortLayer, x: Tensor, angles: Table, view: KVView) -> Tensor:
        """Write keys and values, then attend: [T, hidden] to [T, heads * head_dim]."""
        both, value = layer.projected(x, angles)
        view.write(layer.attention.number, both[:, layer.heads :], value)
        query = both[:, : layer.heads].transpose(0, 1)
        return self._attend(view, layer.attention, query).flatten(1)

    def _layer(self, one: LayerShape, shape: ModelShape) -> ShortLayer:
        rotation, norms = one.rotation, self._head_norms(one)
        rotate: Turn = unchanged
        if rotation is not None:
            rotate = rotation.operator(one.head_dim, self._is_lean)
        if one.normed_last:
            rotate, norms = then(rotate, norms), None
        gate_up, gate, down = self._mlp(one)
        return ShortLayer(
            before=self._normed(one.before),
            qkv=self._side_by_side(one.module, one.projections),
            head_norms=norms,
            rotate=rotate,
            angles=-1 if rotation is None else shape.rotations.index(rotation),
            out=self._added(one, self._linear(one.module, "o_proj"), one.after_attention),
            between=None if one.is_parallel else self._normed(one.between),
            gate_up=gate_up,
            gate=gate,
            down=self._added(one, down, one.after_mlp),
            attention=one.attention,
            heads=one.heads,
            rotated=one.heads + one.kv_heads,
            head_dim=one.head_dim,
        )

    def _mlp(self, one: LayerShape) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor], Any]:
        if not one.gated:
            return unchanged, unchanged, self._whole(one.mlp)
        *gate_up, down = one.gated
        gate = self._gate(one.activation)
        return self._gate_up(one.mlp, gate_up), gate, self._linear(one.mlp, down)

    def _head_norms(self, one: LayerShape) -> Operator | None:
        return one.normed_heads(self._normed)
