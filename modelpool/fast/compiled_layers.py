"""Decoders with int8 or int4 linear layers, whose pass is one call into C.

Contract: between the matrix products of a token there are many small operators, and their dispatch
in Python takes longer than some products. `layer.c` computes all of them in float32, row by row,
independently of other rows and of the threads. It sums in another order than torch, so texts also
depend on `layer_arithmetic`, which is the same in a whole process. A model is computed by torch's
operators if a layer has another shape than Llama's or Gemma's, or a weight that the library does
not support.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from modelpool.attention.kv_view import Attend, KVView
from modelpool.attention.path import PathAttention, PathLayout
from modelpool.attention.path_cpu import CpuKernels
from modelpool.fast.forward_parts import ShortLayer
from modelpool.fast.lean_linear import After, Quantised
from modelpool.fast.lean_norm import rms_scale
from modelpool.fast.model_shape import LayerShape, ModelShape
from modelpool.fast.panels import PanelWeight, exact_kernels
from modelpool.fast.quantised import QuantisedLinear, int8_kernels
from modelpool.fast.rotation import Table
from modelpool.forward import HiddenLayers, spans
from modelpool.kernels.library import KERNELS, LinearKernels

_CPU = torch.device("cpu")
_LINEARS = ("qkv", "out", "gate_up", "down")
_NORMS = ("before", "between", "of_heads", "after_attention", "after_mlp")
_SIZES = ("hidden", "inner", "heads", "rotated", "head_dim", "angles", "is_gelu")
_FACTORS = ("before_eps", "between_eps", "heads_eps", "attention_eps", "mlp_eps", "multiplier")


class _Layer(ctypes.Structure):
    """The struct `Layer` of layer.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*_LINEARS, "attend", *_NORMS)),
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_float) for name in _FACTORS),
    )


class _Angles(ctypes.Structure):
    """The struct `Angles` of layer.c."""

    _fields_ = (("cos", ctypes.c_void_p), ("sin", ctypes.c_void_p), ("stride", ctypes.c_int64))


class _Pass(ctypes.Structure):
    """The struct `Pass` of layer.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "places", "slots", "angles", "x")),
        *((name, ctypes.c_void_p) for name in ("kept", "norm", "head", "y")),
        *((name, ctypes.c_int64) for name in ("count", "hidden", "kept_count")),
        ("norm_eps", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("threads", "kernel", "attend_kernel")),
    )


class CompiledLayers:
    """The layers of a decoder, with its norm and head if the library has them."""

    def __init__(
        self,
        kernels: LinearKernels,
        attend: CpuKernels,
        layers: Sequence[ShortLayer],
        shape: ModelShape,
        head: PanelWeight | None,
    ) -> None:
        """Describe the layers to the library; if `head` is None, torch computes norm and head."""
        self._attend, self._head, self.has_head = attend, head, head is not None
        self._attends = [(layer.attention, layer.heads) for layer in layers]
        self._arena: Tensor | None = None  # keys of the first layer, as passed to the library
        self._described = list[ctypes.Structure]()
        self._kept = list[Any]()  # memory that the library reads
        described = [self._layer(*pair) for pair in zip(layers, shape.layers, strict=True)]
        self._layers = (_Layer * len(described))(*described)
        self._norm, self._eps = self._norm_of(rms_scale(shape.norm) if head else None)
        self._run, self._kernel = kernels.library.sr_pass, KERNELS[kernels.name]

    def _layer(self, layer: ShortLayer, shape: LayerShape) -> _Layer:
        weights = [_linear(layer, name).shared for name in _LINEARS]
        self._kept += weights
        whole = (shape.before, shape.between, shape.after_attention, shape.after_mlp)
        before, between, *after = map(rms_scale, whole)
        norms = [self._norm_of(one) for one in (before, between, shape.joint_norm(), *after)]
        qkv, *_, down = weights
        return _Layer(
            *(ctypes.addressof(weight.described) for weight in weights),
            None,
            *(weight for weight, _ in norms),
            down.out_features,
            down.in_features,
            qkv.out_features // layer.head_dim,
            layer.rotated,
            layer.head_dim,
            layer.angles,
            shape.is_gelu,
            *(eps for _, eps in norms),
            shape.multiplier,
        )

    def _norm_of(self, found: tuple[Tensor, float] | None) -> tuple[int | None, float]:
        """Return the address of a norm's weight, and its epsilon."""
        if found is None:
            return None, 0.0
        weight = found[0].float().contiguous()
        self._kept.append(weight)
        return weight.data_ptr(), found[1]

    def __call__(
        self, x: Tensor, angles: Sequence[Table], view: KVView, index: Tensor, hidden: HiddenLayers
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the layers on embedded tokens [T, hidden], which are changed in place.

        Returns:
            For the tokens of `index`, the logits [n, outputs of the head], or without a head the
            outputs of the last layer; and the hidden states that are requested.
        """
        assert x.is_contiguous()
        assert index.is_contiguous()
        self._attend_to(view)
        slots = torch.from_numpy(view.pack.slots)
        tables = (_Angles * len(angles))(*map(_angles_of, angles))
        places = self._attend.places(view.layout(PathLayout).on(_CPU))
        outputs = x.shape[1] if self._head is None else self._head.out_features
        y, states = torch.empty(len(index), outputs), list[Tensor]()
        for first, stop in spans(hidden, len(self._layers)):
            is_last = len(states) == len(hidden)
            asked = _Pass(
                layers=ctypes.addressof(self._layers) + first * ctypes.sizeof(_Layer),
                places=ctypes.addressof(places),
                slots=slots.data_ptr(),
                angles=ctypes.addressof(tables),
                x=x.data_ptr(),
                kept=index.data_ptr(),
                norm=self._norm,
                head=None if self._head is None else ctypes.addressof(self._head.described),
                y=y.data_ptr(),
                count=stop - first,
                hidden=x.shape[1],
                kept_count=len(index) if is_last else -1,
                norm_eps=self._eps,
                threads=torch.get_num_threads(),
                kernel=self._kernel,
                attend_kernel=self._attend.instruction_set,
            )
            if self._run(ctypes.byref(asked)):
                raise MemoryError(f"no memory for a pass over {len(x)} tokens")
            if not is_last:
                states.append(x.clone())
        return y, states

    def _attend_to(self, view: KVView) -> None:
        """Set the addresses of the layers' keys and values, which are all in one store."""
        if view.arena(self._attends[0][0])[0] is self._arena:
            return
        self._described = [
            self._attend.layer(*view.arena(attention), heads, attention)
            for attention, heads in self._attends
        ]
        for layer, described in zip(self._layers, self._described, strict=True):
            layer.attend = ctypes.addressof(described)
        self._arena = view.arena(self._attends[0][0])[0]


def compiled_layers(
    layers: Sequence[ShortLayer], shape: ModelShape, attend: Attend, head: Any
) -> CompiledLayers | None:
    """Return the compiled layers of `shape`, or None if the library does not support them.

    `head` is the model's output layer.
    """
    linears = [_linear(layer, name) for layer in layers for name in _LINEARS]
    are_panels = all(
        isinstance(one, Quantised) and isinstance(one.shared, PanelWeight) for one in linears
    )
    if not are_panels or not all(one.is_sequential for one in shape.layers):
        return None  # without opening the library, which may need compiling
    kernels = exact_kernels()
    paths = attend.kernels if isinstance(attend, PathAttention) else None
    if kernels is None or not isinstance(paths, CpuKernels):
        return None
    has_norm = rms_scale(shape.norm) is not None
    own = head.shared if isinstance(head, QuantisedLinear) and has_norm else None
    return CompiledLayers(
        kernels, paths, layers, shape, own if isinstance(own, PanelWeight) else None
    )


def _linear(layer: ShortLayer, name: str) -> Any:
    """Return a linear layer without the operators on its outputs, which the shape describes."""
    found = getattr(layer, name)
    while isinstance(found, After):
        found = found.layer
    return found


def _angles_of(table: Table) -> _Angles:
    if not table:  # for layers that do not rotate
        return _Angles()
    cos, sin = table
    assert cos.dtype is sin.dtype is torch.float32
    assert cos.stride() == sin.stride()
    assert cos.stride(-1) == 1
    return _Angles(cos.data_ptr(), sin.data_ptr(), cos.stride(0))


def layer_arithmetic(is_w8a8: bool) -> str:
    """Return the arithmetic of quantised layers here, for W8A8 checkpoints or for others."""
    kernels = int8_kernels() if is_w8a8 else exact_kernels()
    return "torch" if kernels is None else "C library"
