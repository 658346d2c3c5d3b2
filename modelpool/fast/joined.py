"""Layers that read the same input (query, key and value, or gate and up), computed as one.

Contract: joined layers give the bits that each of them gives alone. Quantised layers always do.
Packed layers share a weight if a trial shows that oneDNN sums the outputs of the wider product in
the same order: one product instead of three.

This module does not call the shared weights. A module of the model computes all outputs and keeps
its own, so weights are joined only for forwards that call `joined` layers together.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from modelpool.fast.linear import TOGETHER, PackedLinear, PackedWeight
from modelpool.fast.panels import PanelWeight
from modelpool.fast.quantised import QuantisedLinear, chained
from modelpool.fast.sum_order import cancelling

# Rows of a trial: one, few, a batch, and more than AMX takes at once.
_ROWS = (1, 2, 5, 16, 33, 64)


def joined(*layers: nn.Module) -> Callable[[Tensor], Sequence[Tensor]]:
    """Return a function that computes layers of one input, at once if they share weights."""
    sharing = _sharing(layers)
    if sharing:
        shared, sizes = sharing[0].shared, [layer.out_features for layer in sharing]
        return lambda x: torch.split(shared.multiply(x), sizes, dim=-1)
    forwards = [layer.forward for layer in layers]
    return lambda x: [forward(x) for forward in forwards]


def side_by_side(*layers: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a function like that of `joined`, with the outputs in one tensor."""
    sharing = _sharing(layers)
    if sharing:
        return sharing[0].shared.multiply
    forwards = [layer.forward for layer in layers]
    return lambda x: torch.cat([forward(x) for forward in forwards], dim=-1)


def join_layers(parents: Iterable[nn.Module]) -> int:
    """Let layers of `parents` that read the same input share a weight, in place.

    This concerns packed and quantised layers, and changes no bits. The weights of one group are in
    memory twice until it is joined. Returns the number of products saved.
    """
    spared = 0
    for parent in parents:
        for names in TOGETHER:
            layers = [getattr(parent, name, None) for name in names]
            packed = [layer for layer in layers if type(layer) is PackedLinear]
            if len(packed) == len(names) and _can_join(packed):
                _join(packed)
                spared += len(packed) - 1
            exact = [layer for layer in layers if type(layer) is QuantisedLinear]
            if len(exact) == len(names) and _are_alike(exact):
                _chain(exact)
                spared += len(exact) - 1
    return spared


def _sharing(layers: Sequence[nn.Module]) -> list[QuantisedLinear | PackedLinear]:
    """Return the layers if all are outputs of one weight, side by side; else an empty list."""
    known = [layer for layer in layers if isinstance(layer, QuantisedLinear | PackedLinear)]
    weights = {id(layer.shared) for layer in known}
    return known if len(known) == len(layers) > 1 and len(weights) == 1 else []


def _can_join(layers: Sequence[PackedLinear]) -> bool:
    """Return whether packed layers can share a weight and keep their bits.

    They have separate weights, the same inputs, and all or none a bias.
    """
    inputs = {layer.in_features for layer in layers}
    biased = {layer.bias is None for layer in layers}
    weights = {id(layer.shared) for layer in layers}
    if len(inputs) != 1 or len(biased) != 1 or len(weights) != len(layers):
        return False
    outputs = tuple(layer.out_features for layer in layers)
    dtype = layers[0].shared.dtype
    return keeps_bits(inputs.pop(), outputs, dtype, torch.get_num_threads())


def _are_alike(layers: Sequence[QuantisedLinear]) -> bool:
    """Return whether layers have separate weights, the same inputs and the same library."""
    weights = [layer.shared for layer in layers]
    inputs = {layer.in_features for layer in layers}
    in_panels = {isinstance(weight, PanelWeight) for weight in weights}
    are_whole = len(set(map(id, weights))) == len(weights) and not any(w.others for w in weights)
    return are_whole and len(inputs) == len(in_panels) == 1


def _chain(layers: Sequence[QuantisedLinear]) -> None:
    shared, start = chained([layer.shared for layer in layers]), 0
    for layer in layers:
        layer.share(shared, start)
        start += layer.out_features


def _join(layers: Sequence[PackedLinear]) -> None:
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    weight = torch.cat([layer.weight for layer in layers])
    shared = PackedWeight(weight, torch.cat(biases) if biases else None)
    start = 0
    for layer in layers:
        layer.share(shared, start)
        start += layer.out_features


@cache
def keeps_bits(inputs: int, outputs: tuple[int, ...], dtype: torch.dtype, threads: int) -> bool:
    """Return whether one product has the bits of several, `outputs` wide.

    `threads` is the number that torch is set to now.
    """
    x, weight = cancelling(max(_ROWS), inputs, sum(outputs), dtype)
    with torch.inference_mode():
        parts = torch.split(weight, list(outputs))
        alone = [PackedWeight(part.contiguous(), None) for part in parts]
        together = PackedWeight(weight, None)
        return all(
            torch.equal(
                torch.cat([part.multiply(x[:rows]) for part in alone], dim=1),
                together.multiply(x[:rows]),
            )
            for rows in _ROWS
        )
