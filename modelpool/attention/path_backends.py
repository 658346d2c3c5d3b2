"""Attention along the paths of a pack's tokens: by the reference, and by kernels of Triton."""

from collections.abc import Callable

from torch import Tensor

from modelpool.attention.packed import Attend, AttentionLayer, KVView
from modelpool.attention.path import KeyPaths, PathSettings, reference

_PathKernels = Callable[[Tensor, Tensor, Tensor, KeyPaths, PathSettings], Tensor]


def reference_attention() -> Attend:
    return _over_paths(reference)


def triton_attention() -> Attend:
    from modelpool.attention.path_kernels import path_attention

    return _over_paths(path_attention)


def _over_paths(kernels: _PathKernels) -> Attend:
    def attend(view: KVView, layer: AttentionLayer, query: Tensor) -> Tensor:
        keys, values = view.arena(layer.number, layer.window)
        settings = PathSettings(layer.scale, layer.window, layer.softcap)
        paths = view.key_paths(query.device)
        return kernels(query.transpose(0, 1), keys, values, paths, settings)

    return attend
