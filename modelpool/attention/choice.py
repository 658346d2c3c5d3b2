"""Which attention kernels a member runs on: asked for by configuration, refused with a reason.

Contract: pure, and imports no kernels. `auto` is SDPA on every device: the kernels of `triton` are
compiled and tested by Triton's interpreter, and have never run on a GPU.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

AttentionName = Literal["auto", "sdpa", "triton"]
BackendName = Literal["sdpa", "triton"]

_TRITON_DTYPES = ("bfloat16", "float16", "float32")
_TRITON_HEAD_SIZES = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class AttentionPlace:
    """What the choice depends on: a member's device, dtype and head size."""

    device: str  # "cpu", "cuda:0"
    dtype: str
    head_dim: int


def backend_for(asked: AttentionName, place: AttentionPlace) -> BackendName:
    """What runs where nothing speaks against `asked`; on the CPU, where a member may end, SDPA."""
    return "sdpa" if asked == "auto" or place.device == "cpu" else asked


def refusal(asked: AttentionName, place: AttentionPlace) -> str | None:
    """Why a member cannot run on what is asked for, or None."""
    if asked in ("auto", "sdpa"):
        return None
    if place.device == "cpu":
        return f"{asked} runs on CUDA devices, and the model is on the CPU; there it is sdpa"
    if place.dtype not in _TRITON_DTYPES:
        return f"{asked} has no kernels for {place.dtype}, only for {', '.join(_TRITON_DTYPES)}"
    if place.head_dim not in _TRITON_HEAD_SIZES:
        sizes = ", ".join(map(str, _TRITON_HEAD_SIZES))
        return f"{asked} has no kernels for heads of {place.head_dim} numbers, only of {sizes}"
    if find_spec("triton") is None:
        return "the package triton is not installed; it comes with torch for CUDA on Linux"
    return None
