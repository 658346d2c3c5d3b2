"""Recurrent layers: the arithmetic of what they keep of a row, and the mixers that are served.

Contract: a recurrent layer keeps a state of each row instead of keys and values of each token. Its
kind says how a token reads the state, and what of the token is needed to repeat its update: the
token's entry. A token's bits are a function of the text before it, whatever pass it is computed in:
every call of a kind is about one token of one row.

A mixer is a class of modules that computes such a layer. It is registered for one type of model,
with a forward that goes through the view of the pack (`KVView.scan`) in place of its own.

Not here: where states live, and when entries are applied (`statemgr`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn

Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class StatePart:
    """A tensor that a layer keeps of a row. `dtype`: None: the model's."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


class RecurrentKind(Protocol):
    """What layers of one kind keep of a row, and their arithmetic. It holds no weights."""

    @property
    def name(self) -> str: ...  # with the arithmetic's version: two of one name have equal bits

    @property
    def parts(self) -> Sequence[StatePart]: ...

    def read(self, state: Tensors, token: Tensors) -> tuple[Tensor, Tensors]:
        """A token's output after `state`, and its entry. Changes neither.

        `token`: what `KVView.scan` was given of it.
        """

    def advance(self, state: Tensors, entry: Tensors) -> None:
        """Puts a token behind `state`, in place."""


@dataclass(frozen=True)
class RecurrentLayer:
    """Place and kind of one recurrent layer. `dtype`: of the model."""

    device: torch.device
    dtype: torch.dtype
    kind: RecurrentKind

    def empty(self) -> list[Tensor]:
        """The state before a text."""
        return [
            torch.zeros(one.shape, dtype=one.dtype or self.dtype, device=self.device)
            for one in self.kind.parts
        ]

    def row_bytes(self, dtype: torch.dtype | None = None) -> int:
        """That it keeps of a row, of a model in `dtype`; None: in its own."""
        own = dtype or self.dtype
        return sum(prod(one.shape) * (one.dtype or own).itemsize for one in self.kind.parts)


@dataclass(frozen=True)
class Mixer:
    """
    Attributes:
        model_type: of the configurations whose layers of `layer_type` it computes.
        module: its class; `forward`: in place of the class's own, with the same arguments and
            `packed_kv`, an `OpaqueView`.
    """

    model_type: str
    layer_type: str
    module: type[nn.Module]
    forward: Callable[..., Any]


_MIXERS: dict[type[nn.Module], Mixer] = {}


def register_mixer(mixer: Mixer) -> None:
    """Has models served that have such layers."""
    _MIXERS[mixer.module] = mixer


def recurrent_types(config: Any) -> frozenset[str]:
    """The `layer_types` of a configuration that mixers are registered for."""
    kind = getattr(config, "model_type", None)
    return frozenset(mixer.layer_type for mixer in _MIXERS.values() if mixer.model_type == kind)


def use_mixers(model: nn.Module) -> None:
    """Has the registered mixers of a model go through the view of a pack."""
    for module in model.modules():
        mixer = _MIXERS.get(type(module))
        if mixer is not None:
            module.forward = partial(mixer.forward, module)


def unserved_layer(config: Any, seen: Mapping[int, RecurrentLayer]) -> str | None:
    """Why a layer of a recurrent type would not be served, or None. `seen`: those that scanned."""
    for layer, kind in _recurrent(config):
        if layer not in seen:
            return f"layer {layer}: its {kind} is computed by no module that is known"
    return None


def _recurrent(config: Any) -> Iterator[tuple[int, str]]:
    types = recurrent_types(config)
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind in types:
            yield layer, kind


def scan_tokens(kind: RecurrentKind, state: Tensors, tokens: Tensors) -> Iterator[Tensor]:
    """Outputs of tokens [n, ...] that follow one another, behind each of which `state` is put."""
    for token in zip(*tokens, strict=True):
        output, entry = kind.read(state, token)
        kind.advance(state, entry)
        yield output
