"""A target's forward without its modules: the same operators on the same values, hence its bits.

Contract: what a small target spends in a forward is largely Python around modules, and operators
that could be one. `DirectForward` calls the linear layers of a checked model by themselves, and
keeps every rounding where `transformers` has it: nothing is fused whose result would be another in
the last bit. `direct_forward_of` compares bits on packs of several sizes, and a model whose bits
differ keeps its ordinary forward. Architectures are an allow-list (`llama_shape`).
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from modelpool.attention.packed import AttentionLayer, KVView
from modelpool.fast.int8 import joined
from modelpool.fast.llama_shape import attention_window, is_llama_shaped
from modelpool.packed_model import PackedModel
from modelpool.probe import probed

logger = logging.getLogger(__name__)

_PROBES = ((0, 6), (6, 7), (7, 24))  # packs of a prompt, of a step, and of a tree

_Operator = Callable[[Tensor], Tensor]
_Several = Callable[[Tensor], Sequence[Tensor]]  # outputs of layers that read the same input


@dataclass(frozen=True, slots=True)
class _Layer:
    before: _Operator
    qkv: _Several
    query_norm: _Operator | None
    key_norm: _Operator | None
    out: _Operator
    between: _Operator
    gate_up: _Several
    down: _Operator
    attention: AttentionLayer


class DirectForward:
    """The forward of one model; see `direct_forward_of`."""

    def __init__(self, packed: PackedModel) -> None:
        """`packed` holds a model that `is_llama_shaped`."""
        core: Any = packed.model.model
        config: Any = packed.model.config
        head: Any = packed.model.lm_head
        self._vocab_size = packed.vocab_size
        self._embedding: Tensor = core.embed_tokens.weight.detach()
        self._head_dim = int(core.layers[0].self_attn.head_dim)
        self._rotary = core.rotary_emb
        self._attend = packed.attend
        self._layers = tuple(
            _layer(number, layer, config) for number, layer in enumerate(core.layers)
        )
        self._norm, self._head = core.norm.forward, head.forward

    def __call__(
        self, tokens: Tensor, positions: Tensor, view: KVView, logit_index: Tensor
    ) -> Tensor:
        """One pass over a pack, as `PackedModel.forward`.

        Args:
            tokens, positions: [T] int64; positions are below the model's maximum.
            logit_index: [n] int64, the tokens of the pack whose logits are wanted.

        Returns:
            [n, vocab_size] logits in the model's dtype.
        """
        x = self._embedding.index_select(0, tokens)  # [T, hidden]
        cos, sin = self._rotary(x, positions.unsqueeze(0))  # [1, T, head_dim]
        cos, sin = cos[0].unsqueeze(1), sin[0].unsqueeze(1)
        sin[..., : self._head_dim // 2].neg_()  # the signs of `rotate_half`
        for layer in self._layers:
            x = x + layer.out(self._attention(layer, layer.before(x), cos, sin, view))
            gate, up = layer.gate_up(layer.between(x))
            x = x + layer.down(F.silu(gate).mul_(up))
        logits: Tensor = self._head(self._norm(x.index_select(0, logit_index)))
        return logits[:, : self._vocab_size]

    def _attention(
        self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor, view: KVView
    ) -> Tensor:
        """[T, hidden] to [T, heads * head_dim]: writes, then attends."""
        shape = (x.shape[0], -1, self._head_dim)
        query, key, value = (part.view(shape) for part in layer.qkv(x))
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = layer.query_norm(query), layer.key_norm(key)
        heads = query.shape[1]
        both = torch.cat((query, key), dim=1)
        # Each product is rounded before they are added.
        both = (both * cos).add_(both.roll(self._head_dim // 2, -1).mul_(sin))
        view.write(layer.attention.number, both[:, heads:], value)
        query = both[:, :heads].transpose(0, 1)
        return self._attend(view, layer.attention, query).flatten(1)


def direct_forward_of(packed: PackedModel) -> DirectForward | None:
    """A forward with the bits of `packed`'s own, or None where there is none."""
    if not is_llama_shaped(packed.model):
        return None
    with torch.inference_mode():
        direct = DirectForward(packed)
        logits, windows = probed(packed.forward, packed, _PROBES)
        own_logits, own_windows = probed(direct, packed, _PROBES)
    if own_windows != windows or not torch.equal(own_logits, logits):
        logger.info("%s keeps its ordinary forward: another has other bits", packed.name)
        return None
    return direct


def _layer(number: int, layer: Any, config: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    has_norms = hasattr(attention, "q_norm")
    return _Layer(
        before=layer.input_layernorm.forward,
        qkv=joined(attention.q_proj, attention.k_proj, attention.v_proj),
        query_norm=attention.q_norm.forward if has_norms else None,
        key_norm=attention.k_norm.forward if has_norms else None,
        out=attention.o_proj.forward,
        between=layer.post_attention_layernorm.forward,
        gate_up=joined(mlp.gate_proj, mlp.up_proj),
        down=mlp.down_proj.forward,
        attention=AttentionLayer(
            number, float(attention.scaling), attention_window(attention, config)
        ),
    )
