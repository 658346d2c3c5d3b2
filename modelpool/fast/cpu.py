"""What this machine's CPU can compute in."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Sets torch's threads for a while; a change costs less than a microsecond."""
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
    """Does torch have kernels for `dtype` on this CPU?

    Without them it emulates half precisions: on a CPU with AVX2 alone a product of 64 rows in
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
    """Why this CPU cannot serve weights in int8, or None.

    Without VNNI or AMX oneDNN adds pairs of products in 16 bits, which saturate. So a product of
    the largest numbers is tried, with one row and with several. On one thread: whoever asks would
    otherwise come to have OpenMP workers, and with more of them in a process than cores all sleep
    at every barrier (`specrouter.engine.engine_thread`).
    """
    operators = ("qlinear_prepack", "qlinear_pointwise")
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this build of torch has no oneDNN"
    if not all(hasattr(torch.ops.onednn, name) for name in operators):
        return "this build of torch has no int8 products of oneDNN"
    with cpu_threads(1):
        exact = all(_int8_sum(rows) == 255.0 * 127 * _SUMMED for rows in (1, 4, 48))
    return None if exact else "this CPU does not sum int8 products exactly (it has no VNNI)"


_SUMMED = 256  # products of the largest levels whose sum float32 holds exactly


def _int8_sum(rows: int) -> float:
    """A sum of the largest products, in each of `rows` rows; NaN where they differ."""
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
    """Does this CPU multiply matrices in tiles (Intel AMX), which oneDNN does where it can?"""
    ask = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return ask is not None and bool(ask())
