"""Which attention kernels a member runs on: asked for by configuration, refused with a reason.

Contract: pure, and imports no kernels. `auto` is SDPA on every device: the kernels of `triton` are
compiled and tested by Triton's interpreter, and have never run on a GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

AttentionName = Literal["auto", "sdpa", "path", "triton", "flashinfer"]
BackendName = Literal["sdpa", "path", "triton", "flashinfer"]


@dataclass(frozen=True)
class _Kernels:
    """What kernels for CUDA need, and where they come from."""

    dtypes: tuple[str, ...]
    head_sizes: tuple[int, ...]
    package: str  # what is imported
    source: str


_HALF = ("bfloat16", "float16")
_ON_CUDA: Mapping[str, _Kernels] = {
    "triton": _Kernels(
        dtypes=(*_HALF, "float32"),
        head_sizes=(16, 32, 64, 128, 256),
        package="triton",
        source="the package triton is not installed; it comes with torch for CUDA on Linux",
    ),
    # Of its FA2 kernels, which alone take masks.
    "flashinfer": _Kernels(
        dtypes=_HALF,
        head_sizes=(64, 128, 256),
        package="flashinfer",
        source="the package flashinfer-python is not installed; pip install 'specrouter[gpu]'",
    ),
}


@dataclass(frozen=True)
class AttentionPlace:
    """What the choice depends on: a member's device, dtype and head sizes."""

    device: str  # "cpu", "cuda:0"
    dtype: str
    head_dims: frozenset[int]


def backend_for(asked: AttentionName, place: AttentionPlace) -> BackendName:
    """What runs where nothing speaks against `asked`; on the CPU, where a member may end, SDPA for
    kernels that are CUDA's."""
    if asked == "auto" or (asked in _ON_CUDA and place.device == "cpu"):
        return "sdpa"
    return asked


def refusal(asked: AttentionName, place: AttentionPlace) -> str | None:
    """Why a member cannot run on what is asked for, or None."""
    kernels = _ON_CUDA.get(asked)
    if kernels is None:
        return None
    if place.device == "cpu":
        return f"{asked} runs on CUDA devices, and the model is on the CPU; there it is sdpa"
    if place.dtype not in kernels.dtypes:
        return f"{asked} has no kernels for {place.dtype}, only for {', '.join(kernels.dtypes)}"
    for head_dim in sorted(place.head_dims.difference(kernels.head_sizes)):
        sizes = ", ".join(map(str, kernels.head_sizes))
        return f"{asked} has no kernels for heads of {head_dim} numbers, only of {sizes}"
    return kernels.source if find_spec(kernels.package) is None else None
