"""The kernels of a backend by its name (`modelpool.attention.choice` says which one a member has).

Contract: what a backend needs is imported here, when a model that runs on it is loaded, and nowhere
else: a CPU imports no Triton.
"""

from torch import Tensor

from modelpool.attention.choice import BackendName
from modelpool.attention.packed import Attend, AttentionLayer, KVView, attend_all
from modelpool.attention.path import PathSettings


def attend_of(name: BackendName) -> Attend:
    """Raises `ImportError` where the backend's package is missing."""
    return attend_all if name == "sdpa" else _path_attention()


def _path_attention() -> Attend:
    from modelpool.attention.path_kernels import path_attention

    def attend(view: KVView, layer: AttentionLayer, query: Tensor) -> Tensor:
        keys, values = view.arena(layer.number, layer.window)
        settings = PathSettings(layer.scale, layer.window, layer.softcap)
        paths = view.key_paths(query.device)
        return path_attention(query.transpose(0, 1), keys, values, paths, settings)

    return attend
