"""Has a model the same bits with one thread as with all? Tried, at load.

Contract: True only for what was tried: packs of at most `MOST_TOKENS` tokens, linear layers of
oneDNN, torch or the project's integer kernels, and torch's attention. Each linear layer's shape is
multiplied with sums that cancel out (`sum_order`), attention reads up to 4,096 positions, and the
whole model a few packs, which also shows what torch splits among threads between the two.
"""

from functools import cache, partial
from itertools import product as pairs

import torch
from torch import nn
from torch.nn import functional as F

from modelpool.attention.backend import SDPA
from modelpool.fast.cpu import cpu_threads
from modelpool.fast.linear import PackedLinear
from modelpool.fast.quantised import QuantisedLinear
from modelpool.fast.sum_order import cancelling, pack, product
from modelpool.packed_model import PackedModel
from modelpool.probe import probed

MOST_TOKENS = 32  # beyond it oneDNN has other sizes (`row_sizes`)
_ROWS = (1, 2, 3, 5, 8, 16, MOST_TOKENS)
_PARTS = ((0, 24), (24, 25), (25, 38), (38, 38 + MOST_TOKENS))  # positions of the packs
_SLOTS = (64, 1000, 4096)
_QUERIES = (1, 5)


def one_thread_keeps_bits(model: PackedModel) -> bool:
    """Takes the time of some forwards, and as much memory as the largest linear layer."""
    softcap = getattr(model.model.config.get_text_config(), "attn_logit_softcapping", None)
    if model.attention != SDPA or model.recurrent_layers or softcap is not None:
        return False
    if not all(_knows(module) for module in model.model.modules()):
        return False
    threads, dtype = model.threads, model.dtype
    linears = {
        (layer.in_features, _outputs(layer), dtype, isinstance(layer, PackedLinear), threads)
        for layer in model.model.modules()
        if isinstance(layer, nn.Linear | PackedLinear)
    }
    heads = model.model.config.get_text_config().num_attention_heads
    attentions = {
        (layer.kv_heads, heads // layer.kv_heads, layer.head_dim, layer.dtype, threads)
        for layer in model.kv_layers.values()
    }
    if not all(_linear_keeps_bits(*each) for each in linears):
        return False
    if not all(_attention_keeps_bits(*each) for each in attentions):
        return False
    return torch.equal(_logits(model, 1), _logits(model, threads))


def _knows(module: nn.Module) -> bool:
    """Are its own products among those that are tried? Vectors are of norms and biases."""
    if isinstance(module, nn.Linear | PackedLinear | QuantisedLinear | nn.Embedding):
        return True
    return all(parameter.ndim < 2 for parameter in module.parameters(recurse=False))


def _outputs(layer: nn.Linear | PackedLinear) -> int:
    return layer.shared.out_features if isinstance(layer, PackedLinear) else layer.out_features


@cache
def _linear_keeps_bits(
    inputs: int, outputs: int, dtype: torch.dtype, is_packed: bool, threads: int
) -> bool:
    x, weight = cancelling(MOST_TOKENS, inputs, outputs, dtype)
    with torch.inference_mode():
        packed = pack(weight) if is_packed else None

        def multiplied(rows: int) -> torch.Tensor:
            return F.linear(x[:rows], weight) if packed is None else product(x[:rows], packed)

        for rows in _ROWS:
            with cpu_threads(1):
                one = multiplied(rows)
            with cpu_threads(threads):
                if not torch.equal(one, multiplied(rows)):
                    return False
    return True


@cache
def _attention_keeps_bits(
    kv_heads: int, repeat: int, dim: int, dtype: torch.dtype, threads: int
) -> bool:
    chance = torch.Generator().manual_seed(0)
    keys, values = (
        torch.randn(1, kv_heads, max(_SLOTS), dim, generator=chance).to(dtype) for _ in range(2)
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


def _logits(model: PackedModel, threads: int) -> torch.Tensor:
    before, model.threads = model.threads, threads
    try:
        with torch.inference_mode():
            return probed(model.forward, model, _PARTS)[0]
    finally:
        model.threads = before
