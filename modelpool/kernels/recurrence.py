"""Matrix states of recurrent layers in the C library (`recurrence.c`).

Contract: the bits are those of reading one token after the other, for any number of tokens in a
call and any number of threads. They are not those of torch's products, which sum in another order.
"""

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from modelpool.kernels.library import linear_kernels

_POINTERS = ("state", "key", "query", "value", "decay", "rate", "overlap", "out", "added")
_SIZES = ("tokens", "heads", "key_dim", "value_dim", "key_stride", "query_stride")


class _Scan(ctypes.Structure):
    """The struct `Scan` of recurrence.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_int) for name in ("is_kept", "threads")),
    )


@dataclass(frozen=True)
class MatrixKernels:
    """Kernels on the CPU, in float32; tensors of several tokens begin with [T]."""

    library: ctypes.CDLL

    def scan(
        self,
        state: Tensor,
        key: Tensor,
        query: Tensor,
        value: Tensor,
        decay: Tensor,
        rate: Tensor | None,
        overlap: Tensor,
        keeps: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return outputs and what is added, [T, heads, V] each, of consecutive tokens.

        `state` is [heads, K, V], and is advanced by the tokens unless it `keeps`, which is for one
        token only. `key` and `query` are [T, heads, K], with the heads of all tokens equally far
        apart; `value` is [T, heads, V]; `decay`, `overlap` and `rate` are [T, heads, 1]. Without
        `rate`, values are added as they are.
        """
        tokens, heads, key_dim = key.shape
        value, decay, overlap = value.contiguous(), decay.contiguous(), overlap.contiguous()
        rate = None if rate is None else rate.contiguous()
        key, query = _evenly(key), _evenly(query)
        _check(state, key, query, value, decay, overlap, *(() if rate is None else (rate,)))
        out, added = torch.empty_like(value), torch.empty_like(value)
        self.library.sr_scan(
            ctypes.byref(
                _Scan(
                    state=state.data_ptr(),
                    key=key.data_ptr(),
                    query=query.data_ptr(),
                    value=value.data_ptr(),
                    decay=decay.data_ptr(),
                    rate=None if rate is None else rate.data_ptr(),
                    overlap=overlap.data_ptr(),
                    out=out.data_ptr(),
                    added=added.data_ptr(),
                    tokens=tokens,
                    heads=heads,
                    key_dim=key_dim,
                    value_dim=value.shape[2],
                    key_stride=key.stride(1),
                    query_stride=query.stride(1),
                    is_kept=keeps,
                    threads=torch.get_num_threads(),
                )
            )
        )
        return out, added

    def advance(self, state: Tensor, key: Tensor, added: Tensor, decay: Tensor) -> None:
        """Advance `state` by one token like `scan`, by [heads, K], [heads, V] and [heads, 1]."""
        heads, key_dim, value_dim = state.shape
        _check(state, key, added, decay)
        self.library.sr_advance(
            state.data_ptr(), key.data_ptr(), added.data_ptr(), decay.data_ptr(),
            heads, key_dim, value_dim, key.stride(0),
        )  # fmt: skip


def _check(state: Tensor, *others: Tensor) -> None:
    """Check the tensors, because the library reads their memory by address."""
    if not state.is_contiguous():
        raise ValueError("a state that is not contiguous")
    for tensor in (state, *others):
        if tensor.dtype is not torch.float32 or tensor.device.type != "cpu":
            raise ValueError(f"{tensor.dtype} on {tensor.device}, not float32 on the CPU")


def _evenly(keys: Tensor) -> Tensor:
    """Return [T, heads, K] with one stride between heads, also from one token to the next."""
    is_even = keys.stride(2) == 1 and keys.stride(0) == keys.shape[1] * keys.stride(1)
    return keys if is_even or (len(keys) == 1 and keys.stride(2) == 1) else keys.contiguous()


@cache
def matrix_kernels() -> MatrixKernels | None:
    """Return the kernels of this process, or None as for `linear_kernels`."""
    found = linear_kernels()
    return None if found is None else MatrixKernels(found.library)
