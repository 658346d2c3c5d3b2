"""CudaForward: a Llama-shaped model's forward in ten launches a layer, as a graph where it can be.

Contract: the function of a checked model up to rounding, over the pack's inputs and the arenas of a
view that walks paths. A token's bits depend on its own path alone as far as matrix products give a
row the same bits in packs of any size; the rest is path attention and one kernel for each token.
`cuda_forward_of` compares logits with the model's own; architectures are an allow-list
(`llama_shape`). With `LayerKernels` of the reference it runs on a CPU, for tests.

Layers that are computed together share one weight, of which the model's own become views.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from modelpool.attention.kv_view import AttentionLayer, KVView
from modelpool.attention.path import PathLayout, PathSettings
from modelpool.checkpoint.architecture import max_positions
from modelpool.fast.graph_runner import GraphMaker, GraphRunner
from modelpool.fast.layer_reference import Arena, HeadNorms, LayerKernels, PackInputs
from modelpool.fast.lean_forward import check
from modelpool.fast.llama_shape import attention_window, is_llama_shaped, norm_eps, rotations
from modelpool.fast.pack_layout import Pack
from modelpool.fast.pack_sender import HostMemory, PackSender, memory_for
from modelpool.forward import ForwardOutput, HiddenLayers, spans, stacked
from modelpool.packed_model import PackedModel

logger = logging.getLogger(__name__)

_Norm = tuple[Tensor, float]  # weight and eps


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: Tensor  # [out, in]
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + the layer's output, in one launch where there is no bias."""
        out = torch.addmm(residual, x, self.weight.t())
        return out if self.bias is None else out + self.bias


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    before: _Norm
    qkv: _Linear
    head_norms: HeadNorms | None
    out: _Linear
    between: _Norm
    gate_up: _Linear
    down: _Linear
    attention: AttentionLayer


class CudaForward:
    """The forward of one model; see `cuda_forward_of`."""

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(
        self,
        packed: PackedModel,
        kernels: LayerKernels,
        graphs: GraphMaker | None = None,
        memory: HostMemory | None = None,
    ) -> None:
        """`packed` holds a model that `is_llama_shaped`. Without `graphs` all packs run eagerly.

        `memory`: of the host, where packs are written; by default what suits the device.
        """
        core: Any = packed.model.model
        config: Any = packed.model.config
        head: Any = packed.model.lm_head
        self._kernels = kernels
        self._embedding: Tensor = core.embed_tokens.weight.detach()
        self._head_dim = int(core.layers[0].self_attn.head_dim)
        table = rotations(core.rotary_emb, self._embedding, max_positions(config))
        self._rotations = table.squeeze(2).contiguous()  # [positions, 2, head_dim]
        self._layers = tuple(
            _layer(number, layer, config) for number, layer in enumerate(core.layers)
        )
        self._norm = partial(_normed, norm=_norm(core.norm))
        bias = None if head.bias is None else head.bias.detach()[: packed.vocab_size]
        self._head = _Linear(head.weight.detach()[: packed.vocab_size], bias)
        sender = PackSender(memory or memory_for(self._embedding.device))
        self._run = GraphRunner(self.compute, sender, graphs)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens that packs are filled up to; none where they run as they are."""
        return self._run.sizes

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        view: KVView,
        logit_index: Tensor,
        hidden: HiddenLayers = (),
    ) -> ForwardOutput:
        """One pass over a pack, as `PackedModel.forward`; positions are taken from the view."""
        arenas = [view.arena(layer.attention) for layer in self._layers]
        places = view.layout(PathLayout).places
        return self._run(Pack(tokens, places, logit_index, hidden), arenas)

    def compute(
        self, inputs: PackInputs, arenas: Sequence[Arena], hidden: HiddenLayers
    ) -> ForwardOutput:
        """Nothing here waits for the device, or depends on its values."""
        x = self._embedding.index_select(0, inputs.tokens)  # [T, hidden]
        states = []
        for first, stop in spans(hidden, len(self._layers)):
            for layer, arena in zip(self._layers[first:stop], arenas[first:stop], strict=True):
                x = layer.out.added_to(
                    x, self._attention(layer, _normed(x, layer.before), inputs, arena)
                )
                gate_up = layer.gate_up(_normed(x, layer.between))
                x = layer.down.added_to(x, self._kernels.gated(gate_up))
            states.append(x)
        logits = self._head(self._norm(x.index_select(0, inputs.logit_index)))
        return ForwardOutput(logits, stacked(states, hidden, len(self._layers), self._norm))

    def _attention(self, layer: _Layer, x: Tensor, inputs: PackInputs, arena: Arena) -> Tensor:
        """[T, hidden] to [T, heads * head_dim]: writes, then attends."""
        qkv = layer.qkv(x).view(len(x), -1, self._head_dim)
        query = self._kernels.rotate_and_write(
            qkv, inputs, self._rotations, arena, layer.head_norms
        )
        how = layer.attention
        settings = PathSettings(how.scale, how.window, how.softcap, how.sinks)
        return self._kernels.attend(query, *arena, inputs.paths, settings).flatten(1)


@torch.inference_mode()
def cuda_forward_of(
    packed: PackedModel, kernels: LayerKernels, graphs: GraphMaker | None = None
) -> CudaForward | None:
    """A forward that says what `packed` says, or None where there is none."""
    if not is_llama_shaped(packed.model):
        return None
    reason = check(packed, CudaForward(packed, kernels))  # without graphs of its short text
    if reason is not None:
        logger.info("%s keeps its ordinary forward: %s", packed.name, reason)
        return None
    return CudaForward(packed, kernels, graphs)


def _normed(x: Tensor, norm: _Norm) -> Tensor:
    weight, eps = norm
    return F.rms_norm(x, weight.shape, weight, eps)


def _norm(module: Any) -> _Norm:
    return module.weight.detach(), norm_eps(module)


def _layer(number: int, layer: Any, config: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    window = attention_window(attention, config)
    return _Layer(
        before=_norm(layer.input_layernorm),
        qkv=_fused(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norms=_head_norms(attention) if hasattr(attention, "q_norm") else None,
        out=_fused(attention.o_proj),
        between=_norm(layer.post_attention_layernorm),
        gate_up=_fused(mlp.gate_proj, mlp.up_proj),
        down=_fused(mlp.down_proj),
        attention=AttentionLayer(number, float(attention.scaling), window),
    )


def _head_norms(attention: Any) -> HeadNorms:
    dim = attention.head_dim
    parts = (
        (attention.q_norm.weight, attention.q_proj.out_features // dim),
        (attention.k_norm.weight, attention.k_proj.out_features // dim),
    )
    weight = torch.cat([part.detach().expand(count, -1) for part, count in parts])
    return weight, norm_eps(attention.q_norm)


def _fused(*parts: Any) -> _Linear:
    """One layer that computes the outputs of several, side by side."""
    biases = [part.bias.detach() for part in parts if part.bias is not None]
    bias = torch.cat(biases) if biases else None
    if len(parts) == 1:
        return _Linear(parts[0].weight.detach(), bias)
    weights = [part.weight.detach() for part in parts]
    weight, start = torch.cat(weights), 0
    for part in parts:
        stop = start + len(part.weight)
        part.weight.data, start = weight[start:stop], stop
    return _Linear(weight, bias)
