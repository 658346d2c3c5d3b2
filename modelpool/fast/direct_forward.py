"""DirectForward: a target's forward without its modules, with the same operators and bits.

Contract: a small target spends much of a forward in Python code around modules, and in operators
that could be merged. `DirectForward` calls the linear layers of a checked model by themselves, and
rounds wherever `transformers` does: nothing is fused if the result would differ in the last bit.
Its operators are chosen from the model's shape (`model_shape`) when it is made. `direct_forward_of`
compares bits on packs of several sizes, and a model whose bits differ keeps its ordinary forward.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from modelpool.attention.kv_view import KVView
from modelpool.fast.cpu import cpu_threads
from modelpool.fast.forward_parts import (
    ShortForward,
    optional,
    run_alone,
    then,
    unchanged,
)
from modelpool.fast.joined import join_layers, joined, side_by_side
from modelpool.fast.lean_norm import rms_scale
from modelpool.fast.model_shape import LayerShape, ModelShape, Operator, shape_of
from modelpool.fast.quantised import embedded
from modelpool.fast.rotation import Rotation, Table
from modelpool.forward import ForwardOutput, HiddenLayers, spans, stacked
from modelpool.packed_model import PackedModel
from modelpool.probe import probed

logger = logging.getLogger(__name__)

_PROBES = ((0, 6), (6, 7), (7, 24))  # spans of a prompt, of a step, and of a tree

_NORMED, _EPS = 16, 1e-6  # rows of a trial, and its epsilon


class DirectForward(ShortForward):
    """Forward of one model; see `direct_forward_of`."""

    _is_lean = False

    def __init__(self, packed: PackedModel, shape: ModelShape) -> None:
        core: Any = packed.model.model
        self._vocab_size = packed.vocab_size
        self._embedding, self._dtype = core.embed_tokens, packed.dtype
        self._scale = shape.embedding_scale
        self._rotary, self._rotations = shape.rotary, shape.rotations
        self._attend = packed.attend
        self._layers = tuple(self._layer(one, shape) for one in shape.layers)
        self._norm = _norm(shape.norm)
        head: Any = packed.model.lm_head
        self._head = then(head.forward, shape.on_logits)

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        view: KVView,
        logit_index: Tensor,
        hidden: HiddenLayers = (),
    ) -> ForwardOutput:
        """Run a pass over a pack, like `PackedModel.forward`; positions are below the maximum."""
        x = embedded(self._embedding, tokens, self._dtype)  # [T, hidden]
        if self._scale != 1.0:
            x.mul_(self._scale)
        angles = [self._angles(one, x, positions) for one in self._rotations]
        angles.append(())  # for layers that do not rotate
        states = []
        for first, stop in spans(hidden, len(self._layers)):
            for layer in self._layers[first:stop]:
                read = layer.before(x)
                x = layer.out(self._attention(layer, read, angles[layer.angles], view)).add_(x)
                both = layer.gate_up(read if layer.between is None else layer.between(x))
                x = layer.down(layer.gate(both)).add_(x)
            states.append(x)
        logits: Tensor = self._head(self._norm(x.index_select(0, logit_index)))
        kept = stacked(states, hidden, len(self._layers), self._norm)
        return ForwardOutput(logits[:, : self._vocab_size], kept)

    def _angles(self, rotation: Rotation, x: Tensor, positions: Tensor) -> Table:
        cos, sin = self._rotary(x, positions.unsqueeze(0), *rotation.embedding)
        return rotation.table(cos, sin, positions)

    def _normed(self, module: Any) -> Operator:
        return unchanged if module is None else _norm(module)

    def _side_by_side(self, parent: Any, names: Sequence[str]) -> Operator:
        return side_by_side(*(getattr(parent, name) for name in names))

    def _linear(self, parent: Any, name: str) -> Operator:
        forward: Operator = getattr(parent, name).forward
        return forward

    def _whole(self, mlp: Any) -> Operator:
        return run_alone(mlp)

    def _gate_up(self, mlp: Any, names: Sequence[str]) -> Callable[[Tensor], Sequence[Tensor]]:
        if len(names) > 1:
            return joined(*(getattr(mlp, name) for name in names))
        forward = self._linear(mlp, names[0])
        return lambda x: forward(x).chunk(2, dim=-1)

    def _gate(self, activation: Operator) -> Callable[[Sequence[Tensor]], Tensor]:
        return lambda both: activation(both[0]).mul_(both[1])

    def _added(self, one: LayerShape, part: Operator, norm: Any) -> Operator:
        factor = one.multiplier
        times: Operator | None = None if factor == 1.0 else lambda y: y.mul_(factor)
        return then(part, None if norm is None else _norm(norm), times)


@optional
def direct_forward_of(packed: PackedModel, compare: bool = True) -> DirectForward | None:
    """Return a forward with the bits of `packed`'s own, or None if there is none.

    `compare`: False if its bits were compared before, by `modelpool.fast.agreement`.

    If there is one, packed and quantised layers that read the same input share a weight from then
    on, and `packed.shape` is set.
    """
    with torch.inference_mode(), cpu_threads(packed.threads):
        shape = shape_of(packed.model, packed.attend)
        if shape is None:
            return None
        direct = DirectForward(packed, shape)
        if compare:
            logits, windows = probed(packed.forward, packed, _PROBES)
            own_logits, own_windows = probed(direct, packed, _PROBES)
            if own_windows != windows or not torch.equal(own_logits, logits):
                logger.info("%s keeps its ordinary forward: another has other bits", packed.name)
                return None
        packed.shape = shape
        spared = join_layers(shape.joined)
        return DirectForward(packed, shape) if spared else direct


def _norm(module: Any) -> Operator:
    """Return `module`'s forward in as few calls as keep its bits, or as it is."""
    found = rms_scale(module)
    if found is None:
        forward: Operator = module.forward
        return forward
    (scale, eps), dtype = found, module.weight.dtype
    x = torch.randn(_NORMED, len(scale), generator=torch.Generator().manual_seed(0))
    x = x.to(scale.device, dtype)
    expected = module(x)
    forms = _rms_norms(scale, eps, dtype)
    return next((form for form in forms if torch.equal(form(x), expected)), module.forward)


def _rms_norms(scale: Tensor, eps: float, dtype: torch.dtype) -> Iterator[Operator]:
    """Yield RMSNorm as Llama rounds it, and as Gemma does: after the weight."""
    shape, is_one = scale.shape, scale.device.type == "cpu" and dtype != torch.float64
    weight, wide = scale.to(dtype), scale.float()
    if is_one and _is_one_call(len(scale)):
        yield lambda x: F.rms_norm(x, shape, None, eps).mul_(weight)
        yield lambda x: F.rms_norm(x.float(), shape, None, eps).mul_(wide).to(dtype)
    else:
        yield lambda x: _spelled_out(x, eps).mul_(weight)
        yield lambda x: _spelled_out(x.float(), eps).mul_(wide).to(dtype)


def _spelled_out(x: Tensor, eps: float) -> Tensor:
    """Compute RMSNorm without a weight, step by step as in transformers."""
    wide = x.to(torch.float32)
    return (wide * wide.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()).to(x.dtype)


@cache
def _is_one_call(size: int) -> bool:
    """Return whether torch's own RMSNorm has the same bits on the CPU.

    It is tried in float32, where no rounding hides a difference.
    """
    x = torch.randn(_NORMED, size, generator=torch.Generator().manual_seed(0))
    return torch.equal(F.rms_norm(x, (size,), None, _EPS), _spelled_out(x, _EPS))
