"""Has a model the same bits with one thread as with all? Tried, at load.

Contract: True only for what was tried: packs of at most `MOST_TOKENS` tokens, linear layers of
oneDNN, torch or the project's integer kernels. Attention by paths has one order of sums for any
number of threads. Each linear layer's shape is multiplied with sums that cancel out (`sum_order`),
and the whole model a few packs, which also shows what torch splits among threads between the two.
"""

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modelpool.attention.backend import PATH
from modelpool.fast.cpu import cpu_threads
from modelpool.fast.linear import PackedLinear
from modelpool.fast.quantised import QuantisedLinear
from modelpool.fast.sum_order import cancelling, pack, product
from modelpool.packed_model import PackedModel
from modelpool.probe import probed

MOST_TOKENS = 32  # beyond it oneDNN has other sizes (`row_sizes`)
_ROWS = (1, 2, 3, 5, 8, 16, MOST_TOKENS)
_PARTS = ((0, 24), (24, 25), (25, 38), (38, 38 + MOST_TOKENS))  # positions of the packs


def one_thread_keeps_bits(model: PackedModel) -> bool:
    """Takes the time of some forwards, and as much memory as the largest linear layer."""
    is_short = model.max_positions < _PARTS[-1][1]
    if model.attention != PATH or model.recurrent_layers or is_short:
        return False
    if not all(_knows(module) for module in model.model.modules()):
        return False
    threads, dtype = model.threads, model.dtype
    linears = {
        (one.in_features, _outputs(one), one.bias is not None, type(one) is PackedLinear)
        for one in model.model.modules()
        if isinstance(one, nn.Linear | PackedLinear)
    }
    if not all(_linear_keeps_bits(*each, dtype, threads) for each in linears):
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


def _logits(model: PackedModel, threads: int) -> Tensor:
    """With so many threads."""
    before, model.threads = model.threads, threads
    try:
        with torch.inference_mode():
            return probed(model.forward, model, _PARTS)[0]
    finally:
        model.threads = before
