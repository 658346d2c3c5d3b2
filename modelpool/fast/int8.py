"""Linear layers whose weights are int8, for the CPU: half the bytes of bfloat16, and its products.

Contract: a row has the same bits whatever stands beside it. Weights have one scale for each output
channel. Each row of activations is quantised by a scale of its own; its products with the weights
are summed in int32, which is exact, so that neither the number of rows nor blocks, threads or
kernels can move a bit; and both scales are multiplied in afterwards, element by element. Hence no
row is ever computed twice, as `PackedLinear` must.

Activations are uint8 around 128: with signed ones oneDNN falls into a reference kernel on CPUs
without AMX, hundreds of times slower. Which CPUs sum exactly `modelpool.fast.cpu` says.

Layers that read the same input (query, key and value; gate and up) share one product: `joined`
(`fast.joined`) computes them together, while each of them alone computes all and keeps its part.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from modelpool.checkpoint.int8_values import INT8_LEVELS, Int8Values
from modelpool.fast.linear import TOGETHER, is_hooked, let_go_of_file
from modelpool.fast.row_sizes import filled

_ZERO = 128  # the unsigned level that stands for 0
_HALF = torch.tensor(_ZERO + 0.5)
_TINY = 1e-30  # the least scale: a row of zeros stays one


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[T, in] to levels [T, in] uint8, and the largest magnitude of each row [T, 1] float32."""
    plain = x.float()
    largest = plain.abs().amax(dim=-1, keepdim=True).clamp_(min=_TINY)
    # Truncation rounds down: the half makes it the nearest level, between 1 and 255.
    levels = torch.add(_HALF, plain / largest, alpha=INT8_LEVELS)
    return levels.to(torch.uint8).contiguous(), largest


class Int8Weight:
    """The weights of one layer, or of several side by side, in oneDNN's layout."""

    def __init__(self, parts: Sequence[Int8Values], bias: Tensor | None) -> None:
        """`parts` have the same inputs; `bias` [out] is of all their outputs."""
        levels = torch.cat([part.levels for part in parts])
        self.out_features, self.in_features = levels.shape
        # Opaque: it can be neither moved, cast, nor stored.
        self._packed = torch.ops.onednn.qlinear_prepack(levels, None)
        self._scales = torch.cat([part.scales for part in parts]) / INT8_LEVELS
        self._zeros = torch.zeros(self.out_features, dtype=torch.int32)
        self._bias = None if bias is None else bias.detach().float()

    def multiply(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[..., in] to [..., out], for any leading shape; `dtype` is by default that of `x`."""
        shape = (*x.shape[:-1], self.out_features)
        if not x.numel():
            return x.new_empty(shape, dtype=dtype)
        levels, largest = quantise_rows(x.reshape(-1, self.in_features))
        y: Tensor = torch.ops.onednn.qlinear_pointwise(
            filled(levels), 1.0, _ZERO, self._packed, self._scales, self._zeros, None,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        y = y[: len(levels)].mul_(largest)
        if self._bias is not None:
            y.add_(self._bias)
        return y.to(dtype or x.dtype).view(shape)


class Int8Linear(nn.Module):
    """A linear layer in int8: the outputs from `start` on of a weight that it may share."""

    def __init__(
        self, weight: Int8Weight, start: int, out_features: int, bias: Tensor | None, is_tied: bool
    ) -> None:
        """`bias`: its part of the weight's. `is_tied`: an embedding keeps the plain weight."""
        super().__init__()
        self.in_features, self.out_features = weight.in_features, out_features
        self.hidden_parameters = 0 if is_tied else self.in_features * out_features
        self.bias = bias
        self.shared, self._start = weight, start

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features], for any leading shape."""
        return self.shared.multiply(x).narrow(-1, self._start, self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


def quantise_linears(
    model: nn.Module,
    stored: Mapping[str, Int8Values] | None = None,
    only_stored: bool = False,
    together: bool = True,
) -> list[str]:
    """Replaces, in place, the linear layers of `model`; the names of those that it cannot.

    The plain weight of a layer is let go before the next one is quantised. An embedding that
    shares a layer's weight keeps it.

    Args:
        stored: weights that the checkpoint has in int8, by the layer's name. They are taken as
            they are.
        only_stored: other layers stay as they are.
        together: layers that read the same input share a weight, for a forward that calls them
            `joined`; the modules' own computes all outputs for each of them.
    """
    given = stored or {}
    embeddings = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    done: dict[nn.Module, Int8Linear] = {}  # one layer may stand in several places
    left: list[str] = []
    for path, parent in list(model.named_modules()):
        prefix = f"{path}." if path else ""
        linears = {name: each for name, each in parent.named_children() if _is_linear(each)}
        fresh = {name: layer for name, layer in linears.items() if layer not in done}
        able = {name: layer for name, layer in fresh.items() if _can_replace(layer)}
        left += [prefix + name for name in fresh if name not in able]
        wanted = {name for name in able if not only_stored or prefix + name in given}
        for names in _groups({name: able[name] for name in able if name in wanted}, together):
            layers = [able[name] for name in names]
            values = [given.get(prefix + name) for name in names]
            done.update(zip(layers, _replaced(layers, values, embeddings), strict=True))
        for name, layer in linears.items():
            if layer in done:
                setattr(parent, name, done[layer])
    if done:
        let_go_of_file(model.parameters())
    return left


def _groups(layers: Mapping[str, nn.Module], together: bool) -> Iterator[tuple[str, ...]]:
    """Their names: of those that read the same input `together`, of the others alone."""
    kinds = TOGETHER if together else ()
    groups = [names for names in kinds if _are_alike([layers.get(name) for name in names])]
    yield from groups
    yield from ((name,) for name in layers if not any(name in names for names in groups))


def _are_alike(layers: Sequence[nn.Module | None]) -> bool:
    """All there, each of its own, of the same inputs, and biased together or not at all."""
    there = [layer for layer in layers if layer is not None]
    inputs = {_weight(layer).shape[1] for layer in there}
    biased = {layer.bias is None for layer in there}
    return len(set(there)) == len(layers) and len(inputs) == len(biased) == 1


def _replaced(
    layers: Sequence[nn.Module], values: Sequence[Int8Values | None], embeddings: set[int]
) -> Iterator[Int8Linear]:
    """In the order of `layers`, which lose their weights."""
    tied = [id(layer.weight) in embeddings for layer in layers]
    parts = []
    for layer, stored in zip(layers, values, strict=True):
        parts.append(stored or Int8Values.of(_weight(layer)))
        layer.register_parameter("weight", None)
    biases = [layer.bias.detach() for layer in layers if isinstance(layer.bias, Tensor)]
    shared = Int8Weight(parts, torch.cat(biases) if biases else None)
    start = 0
    for layer, part, is_tied in zip(layers, parts, tied, strict=True):
        rows = len(part.levels)
        yield Int8Linear(shared, start, rows, layer.bias, is_tied)  # type: ignore[arg-type]
        start += rows


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear | Conv1D)


def _can_replace(layer: nn.Module) -> bool:
    is_plain = type(layer) in (nn.Linear, Conv1D) and not is_hooked(layer)
    return is_plain and _weight(layer).device.type == "cpu" and _weight(layer).is_floating_point()


def _weight(layer: nn.Module) -> Tensor:
    """[out, in]; GPT-2's layers keep it the other way round."""
    assert isinstance(layer.weight, Tensor)
    return layer.weight.t() if isinstance(layer, Conv1D) else layer.weight
