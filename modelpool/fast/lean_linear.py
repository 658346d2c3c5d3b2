"""Linear layers of a lean forward: plain, packed, or quantised, or several as one."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from modelpool.fast.linear import PackedLinear, gains
from modelpool.fast.model_shape import Operator
from modelpool.fast.quantised import QuantisedLinear


class PlainLinear:
    """A linear layer as one matrix product."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._transposed = weight.t()  # [in, out], not copied
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, in] to [T, out]."""
        if self._bias is None:
            return torch.mm(x, self._transposed)
        return torch.addmm(self._bias, x, self._transposed)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Add the layer's output for `x` [T, in] to `residual` [T, out], in place."""
        residual.addmm_(x, self._transposed)
        if self._bias is not None:
            residual.add_(self._bias)


class Packed:
    """A linear layer in oneDNN's layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        plain.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            plain.bias = nn.Parameter(bias, requires_grad=False)
        self._forward = PackedLinear(plain).forward  # without the overhead of `nn.Module.__call__`

    def __call__(self, x: Tensor) -> Tensor:
        return self._forward(x)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        residual.add_(self._forward(x))


class Quantised:
    """Layers in int8 or int4 that share one weight, side by side."""

    def __init__(self, layers: Sequence[QuantisedLinear]) -> None:
        shared = layers[0].shared
        assert all(layer.shared is shared for layer in layers)
        assert sum(layer.out_features for layer in layers) == shared.out_features
        self.shared, self._multiply = shared, shared.multiply

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        residual.add_(self._multiply(x, residual.dtype))


class After:
    """A layer whose outputs pass an operator before they are added."""

    def __init__(self, layer: Callable[[Tensor], Tensor], then: Operator) -> None:
        self.layer, self._then = layer, then

    def __call__(self, x: Tensor) -> Tensor:
        return self._then(self.layer(x))

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        residual.add_(self(x.to(residual.dtype)))  # nothing is rounded in between


Linear = PlainLinear | Packed | Quantised | After


def linear_of(weight: Tensor, bias: Tensor | None) -> Linear:
    """Return a layer in the layout that was fastest for 1 to 64 rows; `weight` is [out, in]."""
    return Packed(weight, bias) if gains(weight) else PlainLinear(weight, bias)
