"""A target's forward without its modules: the same operators on the same values, hence its bits.

Contract: what a small target spends in a forward is largely Python around modules, and operators
that could be one. `DirectForward` calls the linear layers of a checked model by themselves, and
keeps every rounding where `transformers` has it: nothing is fused whose result would be another in
the last bit. `direct_forward_of` compares bits on packs of several sizes, and a model whose bits
differ keeps its ordinary forward. Architectures are an allow-list (`llama_shape`).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from modelpool.attention.kv_view import AttentionLayer, KVView
from modelpool.fast.cpu import cpu_threads
from modelpool.fast.forward_parts import Operator, ShortForward, Watch
from modelpool.fast.joined import join_packed, joined, side_by_side
from modelpool.fast.lean_norm import LeanRMSNorm
from modelpool.fast.llama_shape import attention_window, is_llama_shaped, norm_eps
from modelpool.forward import ForwardOutput, HiddenLayers, spans, stacked
from modelpool.packed_model import PackedModel
from modelpool.probe import probed

logger = logging.getLogger(__name__)

_PROBES = ((0, 6), (6, 7), (7, 24))  # packs of a prompt, of a step, and of a tree

_NORMED, _EPS = 16, 1e-6  # rows of a trial, and what it adds to their mean squares

_Several = Callable[[Tensor], Sequence[Tensor]]  # outputs of layers that read the same input


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    before: Operator
    qkv: Operator  # side by side
    query_norm: Operator | None
    key_norm: Operator | None
    out: Operator
    between: Operator
    gate_up: _Several
    down: Operator
    attention: AttentionLayer

    def watched(self, watch: Watch) -> "_Layer":
        query, key = self.query_norm, self.key_norm
        return replace(
            self,
            before=watch("norms", self.before),
            qkv=watch("query, key, value", self.qkv),
            query_norm=None if query is None else watch("norms", query),
            key_norm=None if key is None else watch("norms", key),
            out=watch("output of attention", self.out),
            between=watch("norms", self.between),
            gate_up=watch("gate, up", self.gate_up),
            down=watch("down", self.down),
        )


class DirectForward(ShortForward):
    """The forward of one model; see `direct_forward_of`."""

    _parts: Mapping[str, str] = {**ShortForward._parts, "_rotary": "rotation"}

    def __init__(self, packed: PackedModel) -> None:
        """`packed` holds a model that `is_llama_shaped`."""
        core: Any = packed.model.model
        config: Any = packed.model.config
        head: Any = packed.model.lm_head
        self._vocab_size = packed.vocab_size
        self._embedding: Tensor = core.embed_tokens.weight.detach()
        self._heads = int(config.num_attention_heads)
        self._kv_heads = int(config.num_key_value_heads)
        self._head_dim = int(core.layers[0].self_attn.head_dim)
        self._rotary = core.rotary_emb
        self._attend = packed.attend
        self._layers = tuple(
            _layer(number, layer, config) for number, layer in enumerate(core.layers)
        )
        self._norm, self._head = _norm(core.norm), head.forward

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        view: KVView,
        logit_index: Tensor,
        hidden: HiddenLayers = (),
    ) -> ForwardOutput:
        """One pass over a pack, as `PackedModel.forward`; positions are below the maximum."""
        x = self._embedding.index_select(0, tokens)  # [T, hidden]
        cos, sin = self._rotary(x, positions.unsqueeze(0))  # [1, T, head_dim]
        cos, sin = cos[0].unsqueeze(1), sin[0].unsqueeze(1)
        sin[..., : self._head_dim // 2].neg_()  # the signs of `rotate_half`
        states = []
        for first, stop in spans(hidden, len(self._layers)):
            for layer in self._layers[first:stop]:
                x = layer.out(self._attention(layer, layer.before(x), cos, sin, view)).add_(x)
                gate, up = layer.gate_up(layer.between(x))
                x = layer.down(self._gate(gate, up)).add_(x)
            states.append(x)
        logits: Tensor = self._head(self._norm(x.index_select(0, logit_index)))
        kept = stacked(states, hidden, len(self._layers), self._norm)
        return ForwardOutput(logits[:, : self._vocab_size], kept)

    @staticmethod
    def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Each product is rounded before they are added."""
        return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(sin))

    def _attention(
        self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor, view: KVView
    ) -> Tensor:
        """[T, hidden] to [T, heads * head_dim]: writes, then attends."""
        heads = self._heads
        rotated = heads + self._kv_heads
        qkv = layer.qkv(x).view(x.shape[0], -1, self._head_dim)  # [T, heads + 2 kv_heads, dim]
        both = qkv[:, :rotated]
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = torch.split(both, [heads, self._kv_heads], dim=1)
            both = torch.cat((layer.query_norm(query), layer.key_norm(key)), dim=1)
        both = self._rotate(both, cos, sin)
        self._write(view, layer.attention.number, both[:, heads:], qkv[:, rotated:])
        query = both[:, :heads].transpose(0, 1)
        return self._attend(view, layer.attention, query).flatten(1)


def direct_forward_of(packed: PackedModel) -> DirectForward | None:
    """A forward with the bits of `packed`'s own, or None where there is none.

    Where there is one, packed layers that read the same input share a weight from then on.
    """
    if not is_llama_shaped(packed.model):
        return None
    with torch.inference_mode(), cpu_threads(packed.threads):
        direct = DirectForward(packed)
        logits, windows = probed(packed.forward, packed, _PROBES)
        own_logits, own_windows = probed(direct, packed, _PROBES)
        if own_windows != windows or not torch.equal(own_logits, logits):
            logger.info("%s keeps its ordinary forward: another has other bits", packed.name)
            return None
        spared = join_packed(packed.model)
        return DirectForward(packed) if spared else direct


def _norm(module: Any) -> Operator:
    """`module`'s forward in as few calls as have its bits."""
    if type(module) is LeanRMSNorm:
        return module.forward
    weight, eps = module.weight.detach(), norm_eps(module)
    if weight.device.type == "cpu" and weight.dtype != torch.float64 and _is_one_call(len(weight)):
        return lambda x: F.rms_norm(x, weight.shape, None, eps).mul_(weight)
    return lambda x: _spelled_out(x, eps).mul_(weight)


def _spelled_out(x: Tensor, eps: float) -> Tensor:
    """RMSNorm without a weight, step by step as transformers has it."""
    wide = x.to(torch.float32)
    return (wide * wide.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()).to(x.dtype)


@cache
def _is_one_call(size: int) -> bool:
    """Has torch's own RMSNorm the same bits on the CPU? In float32, where no rounding hides any."""
    x = torch.randn(_NORMED, size, generator=torch.Generator().manual_seed(0))
    return torch.equal(F.rms_norm(x, (size,), None, _EPS), _spelled_out(x, _EPS))


def _layer(number: int, layer: Any, config: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    has_norms = hasattr(attention, "q_norm")
    return _Layer(
        before=_norm(layer.input_layernorm),
        qkv=side_by_side(attention.q_proj, attention.k_proj, attention.v_proj),
        query_norm=_norm(attention.q_norm) if has_norms else None,
        key_norm=_norm(attention.k_norm) if has_norms else None,
        out=attention.o_proj.forward,
        between=_norm(layer.post_attention_layernorm),
        gate_up=joined(mlp.gate_proj, mlp.up_proj),
        down=mlp.down_proj.forward,
        attention=AttentionLayer(
            number, float(attention.scaling), attention_window(attention, config)
        ),
    )
