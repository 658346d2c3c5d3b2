"""Path attention on the CPU, in the C library (`attend.c`): see `modelpool.attention.path`.

Contract: keys and values in float32, float16 or bfloat16 are summed in float32, those in float64 in
float64. All instruction sets give the bits of plain C, with any number of threads. A kernel is used
only if it gave the bits of plain C in a trial. Without the C library, the reference computes in
torch: it is slow, and its bits depend on torch.
"""

import ctypes
import logging
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from modelpool.attention.kv_view import Attention, AttentionLayer
from modelpool.attention.path import (
    NO_TAIL,
    KeyPaths,
    PathAttention,
    reference,
    reference_attention,
)
from modelpool.kernels.library import KERNELS, c_library, linear_kernels

logger = logging.getLogger(__name__)

ARITHMETIC = 2  # increased when the same keys and values, or positions, give other bits
PLAIN = 0
# Instruction sets by their numbers in attend.c, best first.
INSTRUCTION_SETS: Mapping[int, str] = {2: "AVX-512", 1: "AVX2", 3: "NEON", PLAIN: "plain C"}
_AVX2_KERNELS = KERNELS["avx2"] | KERNELS["avx-vnni"]
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}


class _Places(ctypes.Structure):
    """The structure `Places` of attend.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "positions", "tails", "path", "tables")),
        *((name, ctypes.c_int64) for name in ("tokens", "path_width", "table_width")),
        ("block_slots", ctypes.c_int64),
    )


class _Layer(ctypes.Structure):
    """The structure `AttendLayer` of attend.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("key_slot", "key_head", "value_slot", "value_head")),
        ("sinks", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim", "value_dim", "window")),
        *((name, ctypes.c_double) for name in ("scale", "softcap")),
        ("kind", ctypes.c_int64),
    )


def cpu_attention() -> Attention:
    library = c_library()
    if library is None:  # `c_library` has logged the reason
        return reference_attention()
    return PathAttention(CpuKernels(library, best_set()))


def attention_arithmetic() -> str:
    """Return the name of the arithmetic that determines the bits of attention on the CPU.

    All instruction sets give the same bits.
    """
    return "torch" if c_library() is None else f"C library {ARITHMETIC}"


def available_sets(library: ctypes.CDLL) -> tuple[int, ...]:
    """Return the instruction sets that this CPU has, best first."""
    found = library.sr_attend_kernels()
    return tuple(number for number in INSTRUCTION_SETS if found >> number & 1)


@cache
def best_set() -> int:
    """Return the best set that has the bits of plain C and that `SPECROUTER_KERNEL` allows."""
    library, linear = c_library(), linear_kernels()
    assert library is not None
    sets = available_sets(library)
    if linear is not None and KERNELS[linear.name] & _AVX2_KERNELS:
        sets = tuple(number for number in sets if number != 2)
    for number in sets:
        if number == PLAIN or _has_plain_bits(library, number):
            return number
        name = INSTRUCTION_SETS[number]
        logger.warning("attention by %s has other bits than plain C: it is not used", name)
    raise AssertionError("plain C is everywhere")


def attend(
    library: ctypes.CDLL,
    instruction_set: int,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    paths: KeyPaths,
    settings: AttentionLayer,
) -> Tensor:
    """Compute `modelpool.attention.path.reference`; the numbers of a head must be contiguous."""
    return CpuKernels(library, instruction_set)(query, keys, values, paths, settings)


class CpuKernels:
    """Implementation of `PathKernels` for one model.

    The library's structures for a pack and for each layer are kept for the calls that follow.
    """

    def __init__(self, library: ctypes.CDLL, instruction_set: int) -> None:
        self._attend, self.instruction_set = library.sr_attend, instruction_set
        self._pack: tuple[KeyPaths, _Places, tuple[Tensor, Tensor]] | None = None  # the last
        self._layers: dict[int, tuple[Tensor, AttentionLayer, _Layer, Tensor | None]] = {}

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, paths: KeyPaths, settings: AttentionLayer
    ) -> Tensor:
        if query.device.type != "cpu":  # a layer of a model that is spread over devices
            return reference(query, keys, values, paths, settings)
        asked = query.dtype
        if (asked is torch.float64) != (keys.dtype is torch.float64):
            query = query.to(torch.float64 if keys.dtype is torch.float64 else torch.float32)
        query = query if query.stride(2) == 1 else query.contiguous()
        rows, heads, _ = query.shape
        out = query.new_empty((rows, heads, values.shape[2]))
        failed = self._attend(
            ctypes.byref(self.layer(keys, values, heads, settings)),
            ctypes.byref(self.places(paths)),
            query.data_ptr(), query.stride(0), query.stride(1), _KINDS[query.dtype],
            out.data_ptr(), torch.get_num_threads(), self.instruction_set,
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no memory to attend with {rows} tokens")
        return out.to(asked)

    def places(self, paths: KeyPaths) -> ctypes.Structure:
        """Return the places of a pack's keys for the library, valid until the next pack."""
        if self._pack is None or self._pack[0] is not paths:
            path, tables = paths.path.contiguous(), paths.tables.contiguous()
            parts = paths.rows, paths.positions, paths.tails, path, tables
            sizes = len(paths.positions), path.shape[-1], tables.shape[1]
            described = _Places(*(one.data_ptr() for one in parts), *sizes, paths.block_slots)
            self._pack = paths, described, (path, tables)
        return self._pack[1]

    def layer(
        self, keys: Tensor, values: Tensor, heads: int, settings: AttentionLayer
    ) -> ctypes.Structure:
        """Return a layer's settings for the library, which also writes these keys and values."""
        known = self._layers.get(settings.number)
        if known is not None and known[0] is keys and known[1] is settings:
            return known[2]
        assert keys.stride(2) == values.stride(2) == 1
        sinks = settings.sinks
        if sinks is not None:
            sinks = sinks.to("cpu", torch.float32).contiguous()
        described = _Layer(
            keys.data_ptr(), values.data_ptr(),
            keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
            None if sinks is None else sinks.data_ptr(),
            heads, keys.shape[1], keys.shape[2], values.shape[2],
            settings.window or 0, settings.scale, settings.softcap or 0.0, _KINDS[keys.dtype],
        )  # fmt: skip
        self._layers[settings.number] = keys, settings, described, sinks
        return described


def _has_plain_bits(library: ctypes.CDLL, instruction_set: int) -> bool:
    """Return whether an instruction set gives the bits of plain C in a trial.

    The trial has tokens of a text of 300 positions and four nodes of a tree, in several dtypes.
    """
    chance = torch.Generator().manual_seed(0)
    tokens, slots, block = 9, 32 * 12, 32
    table = torch.randperm(slots // block, generator=chance).int()[None]
    positions = torch.tensor([0, 7, 255, 256, 299, 300, 301, 301, 302], dtype=torch.int32)
    tails = torch.full((tokens,), NO_TAIL, dtype=torch.int32)
    tails[5:] = 300
    path = torch.tensor([[0, 0, 0]] * 6 + [[0, 1, 1], [0, 2, 2], [0, 2, 3]], dtype=torch.int32)
    rows = torch.zeros(tokens, dtype=torch.int32)
    paths = KeyPaths(
        rows=rows, positions=positions, tails=tails, path=path, tables=table, block_slots=block,
        longest=303,
    )  # fmt: skip
    for dtype, dim, softcap in ((torch.float32, 72, None), (torch.float16, 64, 5.0)):
        query = torch.randn(tokens, 6, dim, generator=chance)
        keys, values = torch.randn(2, slots, 2, dim, generator=chance).to(dtype)
        layer = AttentionLayer(0, dim**-0.5, 270, softcap, torch.randn(6, generator=chance))
        for one in (query, query.bfloat16()):
            asked = one, keys, values, paths, layer
            if not torch.equal(*(attend(library, n, *asked) for n in (instruction_set, PLAIN))):
                return False
    return True
