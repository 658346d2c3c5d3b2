"""Attention backends: what each can do, and on which one a member runs.

Contract: pure, and imports no kernels: what a backend needs is imported when a model that runs on
it is loaded (`AttentionBackend.load`), so a CPU imports no Triton. Whoever depends on a backend
asks for what it can do. A new one is a file with a function that returns its `Attention`, and an
entry in `BACKENDS` under a name of `BackendName`.

`auto` is `triton` where its kernels were compiled for the device and the model is on one, and
`path` everywhere else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from modelpool.errors import UnsupportedAttention

if TYPE_CHECKING:
    from modelpool.attention.kv_view import Attention

# What reading a row's keys and values costs, in queries. Of the kernel in C it is 0.1 to 1.8 at 256
# keys, by the shape of heads.
READING_QUERIES = 1.6

BackendName = Literal["path", "triton", "flashinfer"]
AttentionName = Literal["auto", BackendName]
# What layers may ask of a backend beside windows and soft caps.
Feature = Literal["attention sinks", "keys and values of two widths"]


@dataclass(frozen=True)
class CudaKernels:
    """What kernels for CUDA need, and where they come from."""

    dtypes: tuple[str, ...]
    head_sizes: tuple[int, ...]
    package: str  # what is imported
    source: str
    features: frozenset[Feature] = frozenset()


@dataclass(frozen=True)
class AttentionPlace:
    """What the choice depends on: a member's (first) device, dtype, head sizes and layers.
    `is_tried`: it is on one device; a GPU is of Ampere or later."""

    device: str  # "cpu", "cuda:0"
    dtype: str
    head_dims: frozenset[int]
    features: frozenset[Feature] = frozenset()
    is_tried: bool = True


@dataclass(frozen=True, kw_only=True)
class AttentionBackend:
    """
    Attributes:
        kernels: `module:function` that returns its `Attention`.
        is_fused: kernels of its kind also compute what stands between a layer's matrix products,
            and choose tokens; a forward may run as a graph.
        on_cuda: what it needs there, and it runs nowhere else; None: it runs everywhere.
    """

    name: BackendName
    kernels: str
    is_fused: bool = False
    on_cuda: CudaKernels | None = None

    def load(self) -> "Attention":
        """Its kernels. Raises `UnsupportedAttention` where their package cannot be imported."""
        module, _, function = self.kernels.partition(":")
        try:
            attention: Attention = getattr(import_module(module), function)()
        except ImportError as error:
            reason = f"attention: {self.name} cannot be imported: {error}"
            raise UnsupportedAttention(reason) from error
        return attention

    def refusal(self, place: AttentionPlace) -> str | None:
        """Why a member cannot run on it, or None."""
        needs, name = self.on_cuda, self.name
        if needs is None:
            return None
        if place.device == "cpu":
            return f"{name} runs on CUDA devices, and the model is on the CPU: set attention: path"
        if place.dtype not in needs.dtypes:
            return f"{name} has no kernels for {place.dtype}, only for {', '.join(needs.dtypes)}"
        for head_dim in sorted(place.head_dims.difference(needs.head_sizes)):
            sizes = ", ".join(map(str, needs.head_sizes))
            return f"{name} has no kernels for heads of {head_dim} numbers, only of {sizes}"
        for feature in sorted(place.features - needs.features):
            return f"{name} has no kernels for {feature}"
        return needs.source if find_spec(needs.package) is None else None


_HALF = ("bfloat16", "float16")
PATH = AttentionBackend(name="path", kernels="modelpool.attention.path_cpu:cpu_attention")
TRITON = AttentionBackend(
    name="triton",
    kernels="modelpool.attention.path_kernels:triton_attention",
    is_fused=True,
    on_cuda=CudaKernels(
        dtypes=(*_HALF, "float32"),
        head_sizes=(16, 32, 64, 128, 256),
        package="triton",
        source="the package triton is not installed; it comes with torch for CUDA on Linux",
        features=frozenset({"attention sinks"}),
    ),
)
FLASHINFER = AttentionBackend(
    name="flashinfer",
    kernels="modelpool.attention.paged:flashinfer_attention",
    on_cuda=CudaKernels(  # of its FA2 kernels, which alone take masks
        dtypes=_HALF,
        head_sizes=(64, 128, 256),
        package="flashinfer",
        source="the package flashinfer-python is not installed; pip install 'specrouter[gpu]'",
    ),
)
BACKENDS: Mapping[BackendName, AttentionBackend] = {
    backend.name: backend for backend in (PATH, TRITON, FLASHINFER)
}


def refusal_of(asked: AttentionName, place: AttentionPlace) -> str | None:
    """Why a member cannot run on what is asked for, or None."""
    return None if asked == "auto" else BACKENDS[asked].refusal(place)


def backend_for(asked: AttentionName, place: AttentionPlace) -> AttentionBackend:
    """What runs where nothing speaks against `asked`; on the CPU, where a member may end, `path`
    for kernels that are CUDA's."""
    if asked == "auto":
        return TRITON if place.is_tried and TRITON.refusal(place) is None else PATH
    backend = BACKENDS[asked]
    return PATH if backend.on_cuda is not None and place.device == "cpu" else backend
