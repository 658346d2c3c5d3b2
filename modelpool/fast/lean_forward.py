"""LeanForward: a forward with few operators, for drafters and for quantised weights.

Contract: a small drafter spends most of a forward in Python and in the dispatch of tiny operators.
`LeanForward` reads the weights of a checked model and computes the same function in far fewer
operators, through the same `KVView`. Its rounding differs from the model's own: it is for drafters,
whose logits change the speed and never the text, and for quantised layers, whose text differs
anyway; with these a row's bits do not depend on other rows. There is none for a model that
`model_shape` does not describe, nor for quantised layers unless a direct forward had the model's
bits: the tolerance for a lean forward would hide a description that is nearly right.

Layers that are not packed share their memory with the model, which still works; packed ones exist
twice until `release`. Nothing that stays refers to the checkpoint's file.
"""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from modelpool.attention.kv_view import Attend, KVView
from modelpool.checkpoint.architecture import chooses, expert_count, max_positions
from modelpool.fast.compiled_layers import CompiledLayers, compiled_layers
from modelpool.fast.forward_parts import (
    ShortForward,
    optional,
    run_alone,
    then,
    unchanged,
)
from modelpool.fast.lean_linear import After, Linear, Packed, Quantised, linear_of
from modelpool.fast.lean_norm import rms_scale
from modelpool.fast.linear import PackedLinear, gains, let_go_of_file, pack_linears
from modelpool.fast.model_shape import LayerShape, ModelShape, Operator, shape_of
from modelpool.fast.quantised import QuantisedLinear, embedded
from modelpool.fast.rotation import Table, angles_of
from modelpool.forward import Forward, ForwardOutput, HiddenLayers, spans, stacked
from modelpool.packed_model import PackedModel
from modelpool.probe import MOST_DIFFERENCE, allowed_difference, probed

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 9
_LINEARS = (QuantisedLinear, PackedLinear, nn.Linear)


class _Norm:
    """RMS norm over the last axis, times a weight of any shape that broadcasts."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._shape, self._eps = weight.shape[-1:], eps
        # On a CPU torch's own has many operators. |x| / sqrt(n) is the root mean square.
        self._is_short = weight.device.type == "cpu" and weight.dtype.itemsize >= 4
        root = weight.shape[-1] ** 0.5
        self._floor = torch.tensor(root * eps**0.5, dtype=weight.dtype)
        self._weight = weight * root if self._is_short else weight

    def __call__(self, x: Tensor) -> Tensor:
        if not self._is_short:
            return F.rms_norm(x, self._shape, None, self._eps) * self._weight
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x.div(length.hypot_(self._floor)).mul_(self._weight)


class LeanForward(ShortForward):
    """Forward of one model; see `lean_forward_of`."""

    _is_lean = True

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(
        self, model: PreTrainedModel, shape: ModelShape, vocab_size: int, attend: Attend
    ) -> None:
        """Build the forward of `model`, which has the shape `shape`.

        The weights of layers that are computed together move into one tensor, and the model's own
        become views of it. Logits beyond `vocab_size` are padding and are not computed.
        """
        core: Any = model.model
        config: Any = model.config
        self._vocab_size = vocab_size
        if not is_quantised(model):  # a quantised one has nothing in the file's memory
            let_go_of_file(_unpacked(model))
        self._embedded = core.embed_tokens  # its weight may be shared with another model later
        # Quantised layers read and return float32, without rounding in between.
        is_half = model.dtype.itemsize == 2
        self._dtype = torch.float32 if is_half and is_quantised(model) else model.dtype
        self._plain_dtype = model.dtype  # dtype of layers that are not quantised
        self._scale = shape.embedding_scale
        like = torch.empty(1, dtype=self._dtype, device=model.device)
        positions = max_positions(config)
        with torch.inference_mode():
            self._angles = [angles_of(r, shape.rotary, like, positions) for r in shape.rotations]
        self._originals: list[tuple[nn.Module, str]] = []  # layers that packed ones replace
        self._layers = tuple(self._layer(one, shape) for one in shape.layers)
        self._compiled: CompiledLayers | None = None
        if self._dtype is torch.float32:
            self._compiled = compiled_layers(self._layers, shape, attend, model.lm_head)
        self._has_head = self._compiled is not None and self._compiled.has_head
        self._norm: Operator = self._normed(shape.norm)
        self._on_logits = then(unchanged, shape.on_logits)
        # True if every operation of a pass has the same bits on any CPU.
        self.is_portable = self._has_head and shape.on_logits is None
        self._head = self._own_head(model, vocab_size)
        self._attend = attend
        self._head_dtype = (
            self._dtype if isinstance(model.lm_head, QuantisedLinear) else self._plain_dtype
        )

    def release(self) -> None:
        """Free the plain weights of packed layers, after which the model's own forward fails."""
        for parent, name in self._originals:
            child: Any = getattr(parent, name)
            shape = (child.in_features, child.out_features, child.bias is not None)
            setattr(parent, name, nn.Linear(*shape, device="meta").requires_grad_(False))
        self._originals.clear()

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        view: KVView,
        logit_index: Tensor,
        hidden: HiddenLayers = (),
    ) -> ForwardOutput:
        """Run a pass over a pack, like `PackedModel.forward`; positions are below the maximum."""
        x = embedded(self._embedded, tokens, self._dtype)  # [T, hidden]
        if self._scale != 1.0:
            x.mul_(self._scale)
        angles = [of(positions) for of in self._angles]
        angles.append(())  # for layers that do not rotate
        run = self._by_operators if self._compiled is None else self._compiled
        x, states = run(x, angles, view, logit_index, hidden)
        if not self._has_head:
            x = self._head(self._norm(x).to(self._head_dtype))
        kept = stacked(states, hidden, len(self._layers), self._norm)
        logits = self._on_logits(x)[:, : self._vocab_size]
        return ForwardOutput(logits, None if kept is None else kept.to(self._plain_dtype))

    def _by_operators(
        self, x: Tensor, angles: Sequence[Table], view: KVView, index: Tensor, hidden: HiddenLayers
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the last layer's outputs for the tokens of `index`, and hidden states."""
        states, count = list[Tensor](), len(self._layers)
        last: Any = None if hidden[-1:] == (count,) else self._layers[-1]
        for first, stop in spans(hidden, count):
            for layer in self._layers[first:stop]:
                read = layer.before(x)
                seen = self._attention(layer, read, angles[layer.angles], view)
                if layer is last:  # the rest is computed for each token alone
                    x, seen = x.index_select(0, index), seen.index_select(0, index)
                    read = read.index_select(0, index) if layer.between is None else read
                layer.add_to(x, read, seen)
            if len(states) < len(hidden):  # the next layers add to it in place
                states.append(x.clone())
        return x if last is not None else x.index_select(0, index), states

    def _head_norms(self, one: LayerShape) -> Operator | None:
        """Return the head norms, as one call if both are RMS norms of single heads."""
        joint = one.joint_norm()
        if joint is None:
            return super()._head_norms(one)
        weight, eps = joint
        return _Norm(weight.to(self._dtype), eps)

    def _normed(self, module: Any) -> Operator:
        found = rms_scale(module)
        if found is not None:
            return _Norm(found[0].to(self._dtype), found[1])
        if module is None:
            return unchanged
        own: Operator = copy.deepcopy(module).to(self._dtype).forward
        return own

    def _side_by_side(self, parent: Any, names: Sequence[str]) -> Linear:
        return self._fused(parent, *names)

    def _linear(self, parent: Any, name: str) -> Linear:
        return self._fused(parent, name)

    def _whole(self, mlp: Any) -> Linear:
        pack_linears(mlp)
        return After(then(lambda x: x.to(self._plain_dtype), run_alone(mlp)), unchanged)

    def _gate_up(self, mlp: Any, names: Sequence[str]) -> Linear:
        return self._fused(mlp, *names)

    def _gate(self, activation: Operator) -> Operator:
        def gated(gate_up: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, dim=1)
            return activation(gate).mul_(up)

        return gated

    def _added(self, one: LayerShape, part: Linear, norm: Any) -> Linear:
        factor = one.multiplier
        if norm is not None:
            part = After(part, self._normed(norm))
        return part if factor == 1.0 else After(part, lambda y: y.mul_(factor))

    def _own_head(self, model: Any, vocab_size: int) -> Callable[[Tensor], Tensor]:
        """Return the head; it is never fused, so its weight is the model's own, packed or not."""
        head = model.lm_head
        if is_quantised(model):
            return head.forward  # type: ignore[no-any-return]
        bias = None if head.bias is None else head.bias.detach()[:vocab_size]
        own = linear_of(head.weight.detach()[:vocab_size], bias)
        if isinstance(own, Packed) and head.weight is not model.model.embed_tokens.weight:
            self._originals.append((model, "lm_head"))
        return own

    def _fused(self, parent: nn.Module, *names: str) -> Linear:
        """Return one layer that computes the outputs of several, side by side."""
        parts: list[Any] = [getattr(parent, name) for name in names]
        if isinstance(parts[0], QuantisedLinear):
            return Quantised(parts)
        weights = [part.weight.detach() for part in parts]
        biases = [part.bias.detach() for part in parts if part.bias is not None]
        weight = torch.cat(weights) if len(parts) > 1 else weights[0]
        fused = linear_of(weight, torch.cat(biases) if biases else None)
        if isinstance(fused, Packed):
            self._originals += [(parent, name) for name in names]
        elif len(parts) > 1:
            for part, rows in zip(parts, weight.split([len(w) for w in weights]), strict=True):
                part.weight = nn.Parameter(rows, requires_grad=False)
        return fused


@optional
@torch.inference_mode()
def lean_forward_of(packed: PackedModel, compare: bool = True) -> LeanForward | None:
    """Return a lean forward that agrees with `packed`, or None if there is none.

    `compare`: False if they were compared before, by `modelpool.fast.agreement`.

    The caller may `release` it when `packed` itself need not compute any more.
    """
    shape = packed.shape if is_quantised(packed.model) else shape_of(packed.model, packed.attend)
    if shape is None:
        return None
    lean = LeanForward(packed.model, shape, packed.vocab_size, packed.attend)
    reason = check(packed, lean) if compare else None
    if reason is not None:
        logger.info("%s keeps its ordinary forward: %s", packed.name, reason)
        return None
    return lean


def check(packed: PackedModel, lean: Forward) -> str | None:
    """Return how the logits or windows of `lean` differ from those of `packed`, or None."""
    parts = ((0, 6), (6, _PROBE_TOKENS))
    expected, windows = probed(packed.forward, packed, parts)
    got, own_windows = probed(lean, packed, parts)
    if own_windows != windows:
        return f"it would attend within {own_windows}, not {windows}"
    difference = float((expected.double() - got.double()).abs().mean() / expected.double().std())
    allowed = allowed_difference(packed.dtype)
    if is_quantised(packed.model):  # the smallest rounding error may change a level
        allowed = MOST_DIFFERENCE
    if not difference <= allowed:
        return f"its logits differ by {difference:.2g} of their spread, {allowed:.2g} allowed"
    return None


def is_quantised(model: Any) -> bool:
    """Return whether all linear layers are quantised, except for the head and routers."""
    named = getattr(model, "model", nn.Identity()).named_modules()
    experts = expert_count(getattr(model, "config", None))
    linears = [(name, each) for name, each in named if isinstance(each, _LINEARS)]
    kinds = {type(one) for name, one in linears if not chooses(name, one.out_features, experts)}
    return kinds == {QuantisedLinear}


def _unpacked(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that will not be packed."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name != "weight" or type(module) is not nn.Linear or not gains(parameter):
                yield parameter
