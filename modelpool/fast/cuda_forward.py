"""CudaForward: a Llama-shaped model's forward in ten launches a layer, as a graph if possible.

Contract: it computes the function of a checked model up to rounding, over the pack's inputs and the
arenas of a view that walks paths. A token's bits depend on its own path alone: cuBLAS may sum a row
in an order that depends on the number of rows (bfloat16, some weights), so it is always given
`_ROWS` of them; the rest is path attention and one kernel for each token. `cuda_forward_of`
compares logits with the model's own; the kernels are for models of Llama's shape (`model_shape`).
With the `LayerKernels` of the reference it runs on a CPU, for tests.

Layers that are computed together share one weight, and the model's own weights become views of it.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from modelpool.attention.kv_view import AttentionLayer, KVView
from modelpool.attention.path import PathLayout
from modelpool.checkpoint.architecture import max_positions
from modelpool.fast.forward_parts import optional
from modelpool.fast.graph_runner import GraphMaker, GraphRunner
from modelpool.fast.layer_reference import Arena, HeadNorms, LayerKernels, PackInputs
from modelpool.fast.lean_forward import check
from modelpool.fast.lean_norm import rms_scale
from modelpool.fast.model_shape import LayerShape, ModelShape, shape_of
from modelpool.fast.pack_layout import Pack
from modelpool.fast.pack_sender import HostMemory, PackSender
from modelpool.fast.rotation import rotation_table
from modelpool.forward import ForwardOutput, HiddenLayers, spans, stacked
from modelpool.packed_model import PackedModel

logger = logging.getLogger(__name__)

_MOST_POSITIONS = 2**18  # most positions whose rotations are kept
_ROWS = 128  # rows of a product: on an H200 the most that take as long as one

_Norm = tuple[Tensor, float]  # weight and eps


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: Tensor  # [out, in]
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Map [rows, in] to [rows, out]; the number of rows is a multiple of `_ROWS`."""
        return _joined([F.linear(one, self.weight, self.bias) for one in torch.split(x, _ROWS)])

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Add the layer's output to `residual`, in one launch if there is no bias."""
        for sums, one in zip(torch.split(residual, _ROWS), torch.split(x, _ROWS), strict=True):
            sums.addmm_(one, self.weight.t())
        if self.bias is not None:
            residual.add_(self.bias)


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
    """Forward of one model; see `cuda_forward_of`."""

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(
        self,
        packed: PackedModel,
        kernels: LayerKernels,
        graphs: GraphMaker | None = None,
    ) -> None:
        """Prepare a model of Llama's shape; without `graphs`, all packs run eagerly."""
        shape = _llama_shape(packed)
        assert shape is not None, "not of Llama's shape"
        core: Any = packed.model.model
        head: Any = packed.model.lm_head
        self._kernels = kernels
        self._embedding: Tensor = core.embed_tokens.weight.detach()
        self._head_dim = shape.layers[0].head_dim
        longest = max_positions(packed.model.config)
        table = rotation_table(shape.rotations[0], shape.rotary, self._embedding, longest)
        self._rotations = table.squeeze(2).contiguous()  # [positions, 2, head_dim]
        self._layers = tuple(_layer(one) for one in shape.layers)
        self._norm = partial(_normed, norm=_norm(core.norm, self._embedding.dtype))
        bias = None if head.bias is None else head.bias.detach()[: packed.vocab_size]
        self._head = _Linear(head.weight.detach()[: packed.vocab_size], bias)
        sender = PackSender(HostMemory(self._embedding.device))
        self._run = GraphRunner(self.compute, sender, graphs)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of tokens that packs are padded to; empty if they run as they are."""
        return self._run.sizes

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        view: KVView,
        logit_index: Tensor,
        hidden: HiddenLayers = (),
    ) -> ForwardOutput:
        """Run a pass over a pack, like `PackedModel.forward`; positions are taken from the view."""
        arenas = self._arenas(view.arena)
        places = view.layout(PathLayout).places
        return self._run(Pack(tokens, places, logit_index, hidden), arenas)

    def prepare(
        self, arena: Callable[[AttentionLayer], Arena], block_slots: int, hidden: HiddenLayers
    ) -> None:
        self._run.prepare(self._arenas(arena), block_slots, hidden)

    def _arenas(self, arena: Callable[[AttentionLayer], Arena]) -> list[Arena]:
        return [arena(layer.attention) for layer in self._layers]

    def compute(
        self, inputs: PackInputs, arenas: Sequence[Arena], hidden: HiddenLayers
    ) -> ForwardOutput:
        """Compute a pass; nothing here waits for the device or depends on its values.

        Rows after those of the tokens hold arbitrary numbers, which are never read.
        """
        tokens, wanted = len(inputs.tokens), len(inputs.logit_index)
        x = _chosen(self._embedding, inputs.tokens)  # [rows, hidden]
        states = []
        for first, stop in spans(hidden, len(self._layers)):
            for layer, arena in zip(self._layers[first:stop], arenas[first:stop], strict=True):
                attended = self._attention(layer, _normed(x, layer.before), inputs, arena)
                layer.out.add_to(x, attended)
                gate_up = layer.gate_up(_normed(x, layer.between))
                layer.down.add_to(x, self._kernels.gated(gate_up))
            if hidden:
                states.append(x[:tokens].clone())
        logits = self._head(self._norm(_chosen(x, inputs.logit_index)))
        own = logits[:wanted].clone()  # a view would keep the rest in memory
        return ForwardOutput(own, stacked(states, hidden, len(self._layers), self._norm))

    def _attention(self, layer: _Layer, x: Tensor, inputs: PackInputs, arena: Arena) -> Tensor:
        """Write keys and values, then attend: [rows, hidden] to [rows, heads * head_dim]."""
        qkv = layer.qkv(x).view(len(x), -1, self._head_dim)
        query = self._kernels.rotate_and_write(
            qkv, inputs, self._rotations, arena, layer.head_norms
        )
        return self._kernels.attend(query, *arena, inputs.paths, layer.attention).flatten(1)


@optional
@torch.inference_mode()
def cuda_forward_of(
    packed: PackedModel, kernels: LayerKernels, graphs: GraphMaker | None = None
) -> CudaForward | None:
    """Return a forward that gives the logits of `packed`, or None if there is none."""
    if _llama_shape(packed) is None:
        return None
    reason = check(packed, CudaForward(packed, kernels))  # no graphs for its short text
    if reason is not None:
        logger.info("%s keeps its ordinary forward: %s", packed.name, reason)
        return None
    return CudaForward(packed, kernels, graphs)


def _llama_shape(packed: PackedModel) -> ModelShape | None:
    """Return the model's shape if the kernels support it and its rotations can be kept."""
    found = shape_of(packed.model, packed.attend)
    is_short = max_positions(packed.model.config) <= _MOST_POSITIONS
    return found if found is not None and found.is_llama and is_short else None


def _chosen(table: Tensor, index: Tensor) -> Tensor:
    """Return the rows of `table` at `index` [n], padded to a multiple of `_ROWS`."""
    rows = -(-len(index) // _ROWS) * _ROWS
    out = table.new_empty((rows, *table.shape[1:]))
    torch.index_select(table, 0, index, out=out[: len(index)])
    return out


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _normed(x: Tensor, norm: _Norm) -> Tensor:
    weight, eps = norm
    return F.rms_norm(x, weight.shape, weight, eps)


def _norm(module: Any, dtype: torch.dtype) -> _Norm:
    found = rms_scale(module)
    assert found is not None, "no RMS norm"
    return found[0].to(dtype), found[1]


def _layer(one: LayerShape) -> _Layer:
    attention, mlp, dtype = one.module, one.mlp, one.module.o_proj.weight.dtype
    norms = one.joint_norm()
    return _Layer(
        before=_norm(one.before, dtype),
        qkv=_fused(*(getattr(attention, name) for name in one.projections)),
        head_norms=None if norms is None else (norms[0].to(dtype), norms[1]),
        out=_fused(attention.o_proj),
        between=_norm(one.between, dtype),
        gate_up=_fused(mlp.gate_proj, mlp.up_proj),
        down=_fused(mlp.down_proj),
        attention=one.attention,
    )


def _fused(*parts: Any) -> _Linear:
    """Return one layer that computes the outputs of several, side by side."""
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
