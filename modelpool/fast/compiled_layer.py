"""Layers of Llama's shape whose linear ones are in int8 or int4, in two calls of the C library.

Contract: what stands between the products of a token is many small operators, and their dispatch a
quarter of a pass with weights in int4. `layer.c` computes it in float32, row by row, whatever the
rows beside and the threads. Its sums have another order than torch's, so texts depend on
`layer_arithmetic` too, which is one for a whole process. Attention, and where keys and values go,
are as elsewhere. Layers of other shapes, those with one weight that the library does not have, and
those with scaled columns are computed by torch's operators.
"""

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from modelpool.fast.forward_parts import ShortLayer, unchanged
from modelpool.fast.lean_linear import Quantised
from modelpool.fast.lean_norm import rms_scale
from modelpool.fast.model_shape import LayerShape
from modelpool.fast.panels import PanelWeight, exact_kernels
from modelpool.fast.quantised import int8_kernels
from modelpool.fast.rotation import Table
from modelpool.kernels.library import KERNELS, LinearKernels

_LINEARS = ("qkv", "out", "gate_up", "down")
_NORMS = ("before", "between", "of_heads")
_SIZES = ("hidden", "inner", "heads", "rotated", "head_dim")


class _Layer(ctypes.Structure):
    """`Layer` of layer.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*_LINEARS, *_NORMS)),
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_float) for name in ("before_eps", "between_eps", "heads_eps")),
    )


class CompiledLayer:
    """A layer as a lean forward calls it, see `ShortLayer`; residuals are float32."""

    before = between = staticmethod(unchanged)  # parts of what follows them

    def __init__(
        self,
        kernels: LinearKernels,
        weights: Mapping[str, PanelWeight],
        layer: ShortLayer,
        shape: LayerShape,
    ) -> None:
        self.angles, self.attention = layer.angles, layer.attention
        self.heads, self._rotated = layer.heads, layer.rotated
        norms: list[Any] = [rms_scale(shape.before), rms_scale(shape.between), shape.joint_norm()]
        # Whatever the library reads stays here.
        self._norms = [None if one is None else one[0].float().contiguous() for one in norms]
        self._weights = weights
        self._heads = weights["qkv"].out_features // layer.head_dim, layer.head_dim
        self._layer = _Layer(
            *(ctypes.addressof(weights[name].described) for name in _LINEARS),
            *(None if one is None else one.data_ptr() for one in self._norms),
            weights["down"].out_features,
            weights["down"].in_features,
            self._heads[0],
            layer.rotated,
            layer.head_dim,
            *(0.0 if one is None else one[1] for one in norms),
        )
        self._at, self._kernel = ctypes.addressof(self._layer), KERNELS[kernels.name]
        self._before, self._behind = kernels.library.sr_before, kernels.library.sr_behind

    def projected(self, x: Tensor, angles: Table) -> tuple[Tensor, Tensor]:
        """Of the residual, before its norm."""
        cos, sin = angles
        assert x.is_contiguous()
        assert cos.dtype is sin.dtype is torch.float32
        assert cos.stride() == sin.stride()
        assert cos.stride(-1) == 1
        y = torch.empty((len(x), *self._heads))
        _check(
            self._before(
                self._at, x.data_ptr(), len(x), cos.data_ptr(), sin.data_ptr(), cos.stride(0),
                y.data_ptr(), torch.get_num_threads(), self._kernel,
            )
        )  # fmt: skip
        return y[:, : self._rotated], y[:, self._rotated :]

    def add_to(self, residual: Tensor, read: Tensor, seen: Tensor) -> None:
        """As `ShortLayer.add_to`."""
        assert residual.is_contiguous()
        seen = seen.float().contiguous()
        _check(
            self._behind(
                self._at, residual.data_ptr(), len(residual), seen.data_ptr(),
                torch.get_num_threads(), self._kernel,
            )
        )  # fmt: skip


def compiled_layer(layer: ShortLayer, shape: LayerShape) -> CompiledLayer | None:
    """What computes `layer`, of `shape`, and None where the library cannot."""
    linears = {name: getattr(layer, name) for name in _LINEARS}
    shared = {name: each.shared for name, each in linears.items() if isinstance(each, Quantised)}
    panels = {name: each for name, each in shared.items() if isinstance(each, PanelWeight)}
    if len(panels) < len(_LINEARS) or not shape.is_llama:
        return None  # without having opened the library, which may be compiled for it
    kernels = exact_kernels()
    if kernels is None:
        return None
    return CompiledLayer(kernels, panels, layer, shape)


def _check(failed: int) -> None:
    if failed:
        raise MemoryError("no memory for the rows of a layer")


def layer_arithmetic() -> str:
    """Which one quantised layers have here: those of W8A8 checkpoints, and others."""
    found = (int8_kernels(), exact_kernels())
    return ", ".join("torch" if kernels is None else "C library" for kernels in found)
