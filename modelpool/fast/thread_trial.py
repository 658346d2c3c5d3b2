"""Has a model the same bits with one thread as with all? Tried, at load.

Contract: True only for what was tried: packs of at most `MOST_TOKENS` tokens whose rows have at
most `MOST_SLOTS`, linear layers of oneDNN, torch or the project's integer kernels, and torch's
attention. Each linear layer's shape is multiplied with sums that cancel out (`sum_order`),
attention reads up to 4,096 positions, and the whole model a few packs, which also shows what torch
splits among threads between the two.
"""

from collections.abc import Sequence
from functools import cache, partial
from itertools import product as pairs

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modelpool.attention.backend import SDPA
from modelpool.attention.kv_view import AttentionLayer
from modelpool.fast.cpu import cpu_threads
from modelpool.fast.linear import PackedLinear
from modelpool.fast.quantised import QuantisedLinear
from modelpool.fast.sum_order import cancelling, pack, product
from modelpool.packed_model import PackedModel
from modelpool.probe import ProbeView, probed

MOST_TOKENS = 32  # beyond it oneDNN has other sizes (`row_sizes`)
_ROWS = (1, 2, 3, 5, 8, 16, MOST_TOKENS)
_PARTS = ((0, 24), (24, 25), (25, 38), (38, 38 + MOST_TOKENS))  # positions of the packs
MOST_SLOTS = 4096  # of a row
_SLOTS = (64, 1000, MOST_SLOTS)
_QUERIES = (1, 5)


def one_thread_keeps_bits(model: PackedModel) -> bool:
    """Takes the time of some forwards, and as much memory as the largest linear layer."""
    is_short = model.max_positions < _PARTS[-1][1]
    if model.attention != SDPA or model.recurrent_layers or is_short:
        return False
    if not all(_knows(module) for module in model.model.modules()):
        return False
    threads, dtype = model.threads, model.dtype
    linears = {
        (one.in_features, _outputs(one), one.bias is not None, type(one) is PackedLinear)
        for one in model.model.modules()
        if isinstance(one, nn.Linear | PackedLinear)
    }
    heads = model.model.config.get_text_config().num_attention_heads
    attentions = {
        (one.kv_heads, heads // one.kv_heads, one.head_dim, one.value_dim, one.dtype)
        for one in model.kv_layers.values()
    }
    if not all(_linear_keeps_bits(*each, dtype, threads) for each in linears):
        return False
    if not all(_attention_keeps_bits(*each, threads) for each in attentions):
        return False
    one, seen = _logits(model, 1)
    if any(layer.softcap is not None or layer.sinks is not None for layer in seen):
        return False  # products of other functions
    return torch.equal(one, _logits(model, threads)[0])


def _knows(module: nn.Module) -> bool:
    """Are its own products among those that are tried? Vectors are of norms and biases."""
    if isinstance(module, nn.Linear | PackedLinear | QuantisedLinear | nn.Embedding):
        return True
    return all(parameter.ndim < 2 for parameter in module.parameters(recurse=False))


def _outputs(layer: nn.Linear | PackedLinear) -> int:
    return layer.shared.out_features if isinstance(layer, PackedLinear) else layer.out_features


@cache
def _linear_keeps_bits(
    inputs: int, outputs: int, has_bias: bool, is_packed: bool, dtype: torch.dtype, threads: int
) -> bool:
    x, weight = cancelling(MOST_TOKENS, inputs, outputs, dtype)
    bias = torch.linspace(-1e-3, 1e-3, outputs, dtype=dtype) if has_bias else None
    with torch.inference_mode():
        packed = pack(weight) if is_packed else None

        def multiplied(rows: int) -> Tensor:
            if packed is None:
                return F.linear(x[:rows], weight, bias)
            return product(x[:rows], packed, bias)

        for rows in _ROWS:
            with cpu_threads(1):
                one = multiplied(rows)
            with cpu_threads(threads):
                if not torch.equal(one, multiplied(rows)):
                    return False
    return True


@cache
def _attention_keeps_bits(
    kv_heads: int, repeat: int, dim: int, value_dim: int, dtype: torch.dtype, threads: int
) -> bool:
    chance = torch.Generator().manual_seed(0)
    keys, values = (
        torch.randn(1, kv_heads, MOST_SLOTS, width, generator=chance).to(dtype)
        for width in (dim, value_dim)
    )
    with torch.inference_mode():
        for queries, slots, rows in pairs(_QUERIES, _SLOTS, (1, 4)):
            query = torch.randn(rows, kv_heads, repeat * queries, dim, generator=chance).to(dtype)
            key, value = (part[:, :, :slots].expand(rows, -1, -1, -1) for part in (keys, values))
            mask = torch.zeros(rows, 1, repeat * queries, slots, dtype=dtype)
            attend = partial(F.scaled_dot_product_attention, query, key, value, attn_mask=mask)
            with cpu_threads(1):
                one = attend()
            with cpu_threads(threads):
                if not torch.equal(one, attend()):
                    return False
    return True


def _logits(model: PackedModel, threads: int) -> tuple[Tensor, Sequence[AttentionLayer]]:
    """With so many threads; and how its layers attend."""
    seen: list[AttentionLayer] = []

    class Seen(ProbeView):
        def arena(self, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
            seen.append(layer)
            return super().arena(layer)

    before, model.threads = model.threads, threads
    try:
        with torch.inference_mode():
            return probed(model.forward, model, _PARTS, Seen)[0], seen
    finally:
        model.threads = before
