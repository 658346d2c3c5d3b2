"""Triton kernels for what is between the matrix products of a Llama-shaped layer, on CUDA.

Contract: `modelpool.fast.layer_reference` defines in torch what is computed. Each function is one
launch; sums and products are in float32 and rounded once.

Compiled for sm_80 and sm_90; tested by Triton's interpreter and on an H200.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelpool.attention.path_kernels import path_attention
from modelpool.fast.layer_reference import Arena, HeadNorms, LayerKernels, PackInputs

_COLUMNS = 1024  # per program


def rotate_and_write(
    qkv: Tensor, inputs: PackInputs, rotations: Tensor, arena: Arena, norms: HeadNorms | None
) -> Tensor:
    """Launch the kernel for `layer_reference.rotate_and_write`."""
    (rows, _, dim), tokens = qkv.shape, len(inputs.tokens)
    keys, values = arena
    kv_heads = keys.shape[1]
    heads = qkv.shape[1] - 2 * kv_heads
    query = qkv.new_empty((rows, heads, dim))
    assert keys.stride() == values.stride(), "keys and values lie alike"
    assert qkv.is_contiguous()
    assert rotations.is_contiguous()
    weight, eps = (qkv, 0.0) if norms is None else norms
    with torch.cuda.device_of(qkv):  # Triton launches on the current device
        rotate_heads[(tokens, heads + kv_heads)](
            qkv, inputs.positions, inputs.slots, rotations, weight, query, keys, values, eps,
            keys.stride(0), keys.stride(1), HEADS=heads, KV_HEADS=kv_heads, DIM=dim,
            HAS_NORMS=norms is not None,
        )  # fmt: skip
    return query


def gated(gate_up: Tensor) -> Tensor:
    """Launch the kernel for `layer_reference.gated`."""
    tokens, both = gate_up.shape
    out = gate_up.new_empty((tokens, both // 2))
    assert gate_up.is_contiguous()
    grid = (tokens, triton.cdiv(both // 2, _COLUMNS))
    with torch.cuda.device_of(gate_up):
        gate_rows[grid](gate_up, out, both // 2, COLUMNS=_COLUMNS)
    return out


def triton_kernels() -> LayerKernels:
    return LayerKernels(rotate_and_write, path_attention, gated)


@triton.jit
def rotate_heads(
    qkv, positions, slots, rotations, weight, query, keys, values, eps, kv_slot, kv_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HAS_NORMS: tl.constexpr,
):  # fmt: skip
    """Process one token and one head of queries or keys; a key's value is copied with it."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim = tl.arange(0, DIM)
    half = (dim + DIM // 2) % DIM
    row = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * DIM
    own, other = tl.load(row + dim).to(tl.float32), tl.load(row + half).to(tl.float32)
    if HAS_NORMS:
        scale = 1.0 / tl.sqrt(tl.sum(own * own, 0) / DIM + eps)
        own = own * scale * tl.load(weight + head * DIM + dim).to(tl.float32)
        other = other * scale * tl.load(weight + head * DIM + half).to(tl.float32)
    turn = rotations + tl.load(positions + token).to(tl.int64) * 2 * DIM
    cos, sin = tl.load(turn + dim).to(tl.float32), tl.load(turn + DIM + dim).to(tl.float32)
    turned = own * cos + other * sin
    if head < HEADS:
        tl.store(query + (token * HEADS + head) * DIM + dim, turned.to(query.dtype.element_ty))
    else:
        to = tl.load(slots + token).to(tl.int64) * kv_slot + (head - HEADS) * kv_head + dim
        tl.store(keys + to, turned.to(keys.dtype.element_ty))
        tl.store(values + to, tl.load(row + KV_HEADS * DIM + dim))


@triton.jit
def gate_rows(gate_up, out, size, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < size
    gate = tl.load(gate_up + token * 2 * size + column, known, 0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * size + size + column, known, 0.0).to(tl.float32)
    made = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + token * size + column, made.to(out.dtype.element_ty), known)
