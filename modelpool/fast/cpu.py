"""What this machine's CPU can compute in."""

from functools import cache

import torch


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
def has_amx() -> bool:
    """Does this CPU multiply matrices in tiles (Intel AMX), which oneDNN does where it can?"""
    ask = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return ask is not None and bool(ask())
