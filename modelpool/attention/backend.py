"""Attention backends: their requirements, and the choice of one for a member.

Contract: this module is pure and imports no kernels. The package of a backend is imported when a
model that runs on it is loaded (`AttentionBackend.load`), so a CPU imports no Triton. Other modules
depend on the properties of a backend, not on its name. To add a backend, write a file with a
function that returns its `Attention`, and an entry in `BACKENDS` under a name of `BackendName`.

`auto` is `triton` where its kernels were compiled for the device and the model is on one device,
and `path` everywhere else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from modelpool.errors import UnsupportedAttention

if TYPE_CHECKING:
    from modelpool.attention.kv_view import Attention

# Cost of reading a row's keys and values, in queries. For the kernel in C it is 0.1 to 1.8 at 256
# keys, depending on the shape of the heads.
READING_QUERIES = 1.6

BackendName = Literal["path", "triton", "flashinfer"]
AttentionName = Literal["auto", BackendName]
# Features that layers may need from a backend besides windows and soft caps.
Feature = Literal["attention sinks", "keys and values of two widths"]


@dataclass(frozen=True)
class CudaKernels:
    """Requirements of kernels for CUDA, and the package that has them."""

    dtypes: tuple[str, ...]
    head_sizes: tuple[int, ...]
    package: str  # name of the module to import
    source: str
    features: frozenset[Feature] = frozenset()


@dataclass(frozen=True)
class AttentionPlace:
    """Properties of a member on which the choice of a backend depends.

    `device` is its first device. `is_tried`: it is on one device, which is no GPU before Ampere.
    """

    device: str  # "cpu", "cuda:0"
    dtype: str
    head_dims: frozenset[int]
    features: frozenset[Feature] = frozenset()
    is_tried: bool = True


@dataclass(frozen=True, kw_only=True)
class AttentionBackend:
    """An attention backend.

    Attributes:
        kernels: `module:function` that returns its `Attention`.
        is_fused: its kernels also compute the operations between a layer's matrix products, and
            choose tokens; a forward may run as a graph.
        on_cuda: its requirements on CUDA, the only device it runs on; None: it runs everywhere.
    """

    name: BackendName
    kernels: str
    is_fused: bool = False
    on_cuda: CudaKernels | None = None

    def load(self) -> "Attention":
        """Return its kernels.

        Raises `UnsupportedAttention` if their package cannot be imported.
        """
        module, _, function = self.kernels.partition(":")
        try:
            attention: Attention = getattr(import_module(module), function)()
        except ImportError as error:
            reason = f"attention: {self.name} cannot be imported: {error}"
            raise UnsupportedAttention(reason) from error
        return attention

    def refusal(self, place: AttentionPlace) -> str | None:
        """Return the reason why a member cannot run on this backend, or None."""
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
    on_cuda=CudaKernels(  # only its FA2 kernels take masks
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
    """Return the reason why a member cannot run on the backend it asks for, or None."""
    return None if asked == "auto" else BACKENDS[asked].refusal(place)


def backend_for(asked: AttentionName, place: AttentionPlace) -> AttentionBackend:
    """Return the backend for a member that may run on the one it asks for.

    A member may be placed on the CPU in the end: there `path` replaces a backend for CUDA.
    """
    if asked == "auto":
        return TRITON if place.is_tried and TRITON.refusal(place) is None else PATH
    backend = BACKENDS[asked]
    return PATH if backend.on_cuda is not None and place.device == "cpu" else backend
