"""Number formats that this machine's CPU supports, and torch's threads."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Set torch's number of threads in a context; a change costs less than a microsecond."""
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def computes_in(dtype: str) -> bool:
    """Return whether torch has kernels for `dtype` on this CPU.

    Without them it emulates half precision: on a CPU with only AVX2, a product of 64 rows in
    bfloat16 takes 20 times as long as in float32.
    """
    if dtype not in ("bfloat16", "float16"):
        return True
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    asks = {
        "bfloat16": "_is_mkldnn_bf16_supported",
        "float16": "_is_mkldnn_fp16_supported",
    }
    ask = getattr(torch.ops.mkldnn, asks[dtype], None)
    return ask is not None and bool(ask())


@cache
def int8_refusal() -> str | None:
    """Return why this CPU cannot serve int8 weights, or None if it can.

    Without VNNI or AMX, oneDNN adds pairs of products in 16 bits, which saturate. So a product of
    the largest numbers is tried, with one row and with several. It runs on one thread: otherwise
    the calling thread would get OpenMP workers, and if a process has more of them than cores, all
    of them sleep at every barrier (`specrouter.engine.engine_thread`).
    """
    operators = ("qlinear_prepack", "qlinear_pointwise")
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this build of torch has no oneDNN"
    if not all(hasattr(torch.ops.onednn, name) for name in operators):
        return "this build of torch has no int8 products of oneDNN"
    with cpu_threads(1):
        exact = all(_int8_sum(rows) == 255.0 * 127 * _SUMMED for rows in (1, 4, 48))
    return None if exact else "this CPU does not sum int8 products exactly (it has no VNNI)"


_SUMMED = 256  # number of products of the largest levels; float32 holds their sum exactly


def _int8_sum(rows: int) -> float:
    """Sum the largest products, in each of `rows` rows; return NaN if the rows differ."""
    weight = torch.full((32, _SUMMED), 127, dtype=torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(weight, None)
    x = torch.full((rows, _SUMMED), 255, dtype=torch.uint8)
    ones, zeros = torch.ones(32), torch.zeros(32, dtype=torch.int32)
    y: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
        x, 1.0, 0, packed, ones, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return float(y[0, 0]) if bool((y == y[0, 0]).all()) else float("nan")


@cache
def has_amx() -> bool:
    """Return whether this CPU multiplies matrix tiles (Intel AMX), which oneDNN then uses."""
    ask = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return ask is not None and bool(ask())
