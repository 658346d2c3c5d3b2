"""The kernels of a backend by its name (`modelpool.attention.choice` says which one a member has).

Contract: what a backend needs is imported here, when a model that runs on it is loaded, and nowhere
else: a CPU imports no Triton.
"""

from collections.abc import Callable

from torch import Tensor

from modelpool.attention.choice import BackendName
from modelpool.attention.packed import (
    Attend,
    AttentionLayer,
    KVView,
    UnsupportedAttention,
    attend_all,
)
from modelpool.attention.path import KeyPaths, PathSettings, reference

_PathKernels = Callable[[Tensor, Tensor, Tensor, KeyPaths, PathSettings], Tensor]


def attend_of(name: BackendName) -> Attend:
    """Raises `UnsupportedAttention` where the backend's package cannot be imported."""
    try:
        return _attend_of(name)
    except ImportError as error:
        raise UnsupportedAttention(f"attention: {name} cannot be imported: {error}") from error


def _attend_of(name: BackendName) -> Attend:
    if name == "sdpa":
        return attend_all
    if name == "path":
        return over_paths(reference)
    if name == "flashinfer":
        from modelpool.attention.paged import flashinfer_attention

        return flashinfer_attention()
    from modelpool.attention.path_kernels import path_attention

    return over_paths(path_attention)


def over_paths(kernels: _PathKernels) -> Attend:
    """Attends by what walks the paths of a pack's tokens."""

    def attend(view: KVView, layer: AttentionLayer, query: Tensor) -> Tensor:
        keys, values = view.arena(layer.number, layer.window)
        settings = PathSettings(layer.scale, layer.window, layer.softcap)
        paths = view.key_paths(query.device)
        return kernels(query.transpose(0, 1), keys, values, paths, settings)

    return attend
