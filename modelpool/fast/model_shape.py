"""ModelShape: what a decoder computes, so that it can be run without its modules.

Contract: the names of a layer's modules give their roles; all must be known. What a layer's
attention does with queries and keys is found from its own forward: norms, rotation or none, scale,
window, soft cap and sinks are learned to the bit from one pass over positions that are spread over
the model's whole range. In this pass attention, gated MLPs and the head read numbers of all
magnitudes, so that clipping is noticed. No class is recognised by its name. A model that the
description cannot express has no shape, nor has a model with hooks, with weights on several
devices, or with weights that transformers quantises. Forwards that are made from a shape are
compared with the model's own.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.activations import GELUTanh, SiLUActivation

from modelpool.attention.kv_view import Attend, AttentionLayer, KVView
from modelpool.attention.packed import OpaqueView, run_packed
from modelpool.checkpoint.architecture import max_positions
from modelpool.fast.lean_norm import rms_scale
from modelpool.fast.linear import PackedLinear, is_hooked
from modelpool.fast.quantised import QuantisedEmbedding, QuantisedLinear
from modelpool.fast.rotation import Rotation, candidates
from modelpool.probe import ProbeView

Operator = Callable[[Tensor], Tensor]

logger = logging.getLogger(__name__)

_TOKENS = 9
_MAGNITUDES = (1e-3, 1.0, 1e3)  # of the trial inputs, row by row
_CORE_PARTS = frozenset({"embed_tokens", "layers", "norm"})  # and optionally "rotary_emb"
# The places of a layer's norms, by their names: before attention, on its output, before the MLP,
# on its output. With a single norm the MLP reads the same input as attention.
_NORM_PLACES: Mapping[frozenset[str], Sequence[str]] = {
    frozenset(name for name in places if name): places
    for places in (
        ("input_layernorm", "", "post_attention_layernorm", ""),
        ("attention_layernorm", "", "feedforward_layernorm", ""),
        ("input_layernorm", "", "", ""),
        ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
        ("input_layernorm", "post_attention_layernorm",
         "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        ("input_layernorm", "post_self_attn_layernorm",
         "post_attention_layernorm", "post_mlp_layernorm"),
    )
}  # fmt: skip
_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
_HEAD_NORMS = (("q_norm", "k_norm"), ("query_layernorm", "key_layernorm"))
_MLPS = ("mlp", "shared_mlp")
_GATE_UP = (("gate_proj", "up_proj"), ("gate_up_proj",), ("input_linear",))
_DOWN = ("down_proj", "output_linear")
_ACTIVATIONS = ("act_fn", "activation_fn", "activation")


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerShape:
    """Description of one layer.

    Attributes:
        module: the attention module.
        projections: its linear layers that give queries, keys and values, side by side.
        head_norms: norms of queries and keys, if any.
        normed_last: the head norms follow the rotation.
        rotation: None if it does not depend on positions.
        before, after_attention, between, after_mlp: norms, if any.
        is_parallel: the MLP reads the same input as attention.
        multiplier: factor of the outputs of attention and of the MLP.
        gated: linear layers of a gated MLP, the last one down, the others side by side; empty for
            another MLP, which runs as it is.
    """

    attention: AttentionLayer
    module: Any
    projections: Sequence[str]
    heads: int
    kv_heads: int
    head_dim: int
    head_norms: Sequence[Any]
    normed_last: bool
    rotation: Rotation | None
    before: Any
    after_attention: Any
    between: Any
    after_mlp: Any
    is_parallel: bool
    multiplier: float
    mlp: Any
    gated: Sequence[str]

    @property
    def activation(self) -> Operator:
        """The activation function of a gated MLP."""
        found = _activation(self.mlp)
        if isinstance(found, nn.SiLU | SiLUActivation):
            return F.silu
        return found.forward if isinstance(found, nn.Module) else found

    @property
    def norms_are_whole(self) -> bool:
        """True if all heads are normed together, not each by itself."""
        weight = getattr(self.head_norms[0], "weight", None) if self.head_norms else None
        return isinstance(weight, Tensor) and weight.shape[-1] != self.head_dim

    def normed_heads(self, normed: Callable[[Any], Operator]) -> Operator | None:
        """Return the norm of queries and keys [T, heads + kv_heads, head_dim], if any.

        `normed` returns the operator of a norm module.
        """
        if not self.head_norms:
            return None
        counts, (query, key) = [self.heads, self.kv_heads], map(normed, self.head_norms)
        is_whole = self.norms_are_whole

        def both(x: Tensor) -> Tensor:
            first, last = torch.split(x, counts, dim=1)
            if not is_whole:
                return torch.cat((query(first), key(last)), dim=1)
            rows = torch.cat((query(first.flatten(1)), key(last.flatten(1))), dim=1)
            return rows.view(x.shape)

        return both

    def joint_norm(self) -> tuple[Tensor, float] | None:
        """Return weight [heads + kv_heads, head_dim] and epsilon of both head norms.

        Returns None unless both are RMS norms of single heads.
        """
        found = [rms for rms in map(rms_scale, self.head_norms) if rms is not None]
        if self.norms_are_whole or len(found) < 2 or len({eps for _, eps in found}) > 1:
            return None
        counts = (self.heads, self.kv_heads)
        parts = [one.expand(n, -1) for (one, _), n in zip(found, counts, strict=True)]
        return torch.cat(parts), found[0][1]

    @property
    def is_gelu(self) -> bool:
        """True if the activation is GELU by its tanh approximation."""
        return isinstance(_activation(self.mlp), GELUTanh)

    @property
    def is_sequential(self) -> bool:
        """True for the shape of Llama, Qwen3, Granite or Gemma, without additions."""
        rotation = self.rotation
        return (
            len(self.projections) == 3
            and len(self.gated) == 3
            and (self.activation is F.silu or self.is_gelu)
            and type(rotation) is Rotation
            and rotation.size == self.head_dim
            and not (rotation.pairs or rotation.repeated or self.normed_last or self.is_parallel)
            and rms_scale(self.before) is not None
            and rms_scale(self.between) is not None
            and all(
                rms_scale(one) is not None for one in (self.after_attention, self.after_mlp) if one
            )
            and bool(self.head_norms) == (self.joint_norm() is not None)
        )

    @property
    def is_llama(self) -> bool:
        """True for the shape of Llama and Qwen3, without additions."""
        is_plain = self.multiplier == 1.0 and not (self.after_attention or self.after_mlp)
        return is_plain and self.is_sequential and not self.is_gelu


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelShape:
    """Description of a model.

    Attributes:
        rotary: the embedding that gives angles.
        rotations: the layers' rotations, each once.
        norm: the norm after the last layer.
        embedding_scale: factor of the embedded tokens.
        on_logits: operator on the head's output, if any.
    """

    layers: Sequence[LayerShape]
    rotary: Any
    rotations: Sequence[Rotation]
    norm: Any
    embedding_scale: float
    on_logits: Operator | None

    @property
    def joined(self) -> Collection[nn.Module]:
        """Modules whose layers that read the same input are computed together."""
        mlps = [one.mlp for one in self.layers if one.gated]
        return [*(one.module for one in self.layers), *mlps]

    @property
    def is_llama(self) -> bool:
        """True for the shape of Llama and Qwen3, without additions."""
        is_plain = self.embedding_scale == 1.0 and self.on_logits is None
        is_plain = is_plain and len(self.rotations) == 1 and rms_scale(self.norm) is not None
        return is_plain and all(one.is_llama for one in self.layers)


@torch.inference_mode()  # weights may be inference tensors, if a model is loaded within a step
def shape_of(model: PreTrainedModel, attend: Attend) -> ModelShape | None:
    """Return the shape of a model whose attention is the plug-in's, or None if it has none.

    A checkpoint's own code may raise anything here.
    """
    core: Any = getattr(model, "model", None)
    if core is None or not _is_known(model, core):
        logger.info("%s has parts that are not known", type(model).__name__)
        return None
    seen, head = _observed(model, attend)
    on_logits, alike = _on_logits(model), dict[Any, bool]()
    found = [_layer_shape(*pair, alike) for pair in zip(core.layers, seen, strict=True)]
    layers = [one for one in found if one is not None]
    if len(layers) < len(found) or not head.gives(on_logits):
        logger.info("%s computes what has no description", type(model).__name__)
        return None
    rotations = dict.fromkeys(one.rotation for one in layers if one.rotation is not None)
    embedding: Any = core.embed_tokens
    scale = getattr(core, "embedding_multiplier", 1.0)
    if hasattr(embedding, "embed_scale"):
        scale = torch.as_tensor(embedding.embed_scale).to(model.dtype)
    return ModelShape(
        layers=layers,
        rotary=getattr(core, "rotary_emb", None),
        rotations=tuple(rotations),
        norm=core.norm,
        embedding_scale=float(scale),
        on_logits=on_logits,
    )


def _is_known(model: Any, core: Any) -> bool:
    return (
        getattr(model, "hf_quantizer", None) is None
        and _parts(core) - {"rotary_emb"} == _CORE_PARTS
        and isinstance(core.embed_tokens, nn.Embedding | QuantisedEmbedding)
        and core.embed_tokens.max_norm is None
        and len(core.layers) == model.config.num_hidden_layers
        and _is_linear(getattr(model, "lm_head", None))
        and all(_has_known_parts(layer) for layer in core.layers)
        and not any(_is_hooked(module) for module in model.modules())
        and len({(one.device, one.dtype) for one in model.parameters()}) == 1
    )


def _has_known_parts(layer: Any) -> bool:
    attention, mlp = getattr(layer, "self_attn", None), _mlp(layer)
    is_known = len(_parts(layer).intersection(_MLPS)) == 1 and _norm_names(layer) in _NORM_PLACES
    if attention is None or not is_known:
        return False
    projections, norms = _named(attention, _PROJECTIONS), _named(attention, _HEAD_NORMS)
    linears = [*_all(attention, projections), *_all(mlp, _gated(mlp))]
    return (
        bool(projections)
        and _parts(attention) == {*projections, *norms, "o_proj"}
        and all(map(_is_linear, [*linears, attention.o_proj]))
        and _are_biased_alike(_all(attention, projections))
        and _are_biased_alike(_all(mlp, _gated(mlp)[:-1]))
    )


def _are_biased_alike(linears: Sequence[Any]) -> bool:
    """Return whether all or none of the layers have a bias."""
    return len({linear.bias is None for linear in linears}) <= 1


def _norm_names(layer: Any) -> frozenset[str]:
    return _parts(layer) - {"self_attn", *_MLPS}


def _mlp(layer: Any) -> Any:
    return next((getattr(layer, name) for name in _MLPS if name in _parts(layer)), None)


def _gated(mlp: Any) -> tuple[str, ...]:
    """Return the names of a gated MLP's linear layers, down last; none for another MLP."""
    names = _named(mlp, [(*up, down) for up in _GATE_UP for down in _DOWN])
    is_all = _parts(mlp) - set(_ACTIVATIONS) == set(names)
    return names if is_all and _activation(mlp) is not None else ()


def _activation(mlp: Any) -> Any:
    found = (getattr(mlp, name, None) for name in _ACTIVATIONS)
    return next((each for each in found if callable(each)), None)


def _all(parent: Any, names: Iterable[str]) -> list[Any]:
    return [getattr(parent, name) for name in names]


def _named(module: Any, choices: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the first of `choices` whose names are all parts of a module."""
    parts = _parts(module)
    return next((names for names in choices if parts.issuperset(names)), ())


def _parts(module: nn.Module) -> frozenset[str]:
    """Return the names of a module's children, except for dropout, which does nothing here."""
    named = module.named_children()
    return frozenset(name for name, part in named if not isinstance(part, nn.Dropout))


def _is_linear(module: Any) -> bool:
    return type(module) in (nn.Linear, PackedLinear, QuantisedLinear)


def _is_hooked(module: nn.Module) -> bool:
    """Return whether a module has hooks or a replaced `forward`, such as accelerate's."""
    return is_hooked(module) or "forward" in vars(module)


@dataclass(kw_only=True)
class _Seen:
    """Record of one layer's attention: its input, its angles and its results."""

    hidden: Tensor  # [1, T, hidden_size]
    positions: Tensor  # [T]
    angles: Any  # cos and sin, [1, T, size] each, or None
    embedding: tuple[Any, ...]
    layer: AttentionLayer = field(init=False)
    both: Tensor = field(init=False)  # [T, heads + kv_heads, head_dim] queries and keys
    value: Tensor = field(init=False)  # [T, kv_heads, head_dim]
    attended: Tensor = field(init=False)  # [1, T, heads * head_dim]
    given: Tensor = field(init=False)  # [1, T, hidden_size]


@dataclass(kw_only=True)
class _Head:
    """Record of the head's output, and of the model's logits, [1, n, vocabulary]."""

    raw: Tensor = field(init=False)
    logits: Tensor = field(init=False)

    def gives(self, on_logits: Operator | None) -> bool:
        logits = self.raw if on_logits is None else on_logits(self.raw)
        return torch.equal(logits.to(self.logits.dtype), self.logits)


def _all_magnitudes(like: Tensor) -> Tensor:
    """Return random numbers of several magnitudes, of the shape [.., T, size] of `like`."""
    most = torch.finfo(like.dtype).max ** 0.25  # 16 for float16: products must not overflow
    factors = [min(_MAGNITUDES[row % len(_MAGNITUDES)], most) for row in range(like.shape[-2])]
    x = torch.randn(like.shape, generator=torch.Generator().manual_seed(0))
    return (x * torch.tensor(factors).unsqueeze(1)).to(like)


def _observed(model: Any, attend: Attend) -> tuple[list[_Seen], _Head]:
    """Record each layer's attention and the head's output in a forward.

    The forward reads a few tokens that are far from one another.
    """
    core, device = model.model, model.device
    seen, head = list[_Seen](), _Head()
    asked: list[tuple[Tensor, tuple[Any, ...]]] = []  # cosines, and the other arguments

    def embedded(_: Any, args: Any, options: Any, given: Any) -> None:
        values = (*args, *options.values())
        asked.append((given[0], tuple(one for one in values if not isinstance(one, Tensor))))

    def began(_: Any, args: Any, options: Any) -> Any:
        hidden = _all_magnitudes(args[0] if args else options["hidden_states"])
        angles = options.get("position_embeddings")
        known = (how for cos, how in asked if angles and cos is angles[0])
        how = next(known, ())
        seen.append(_Seen(hidden=hidden, positions=positions, angles=angles, embedding=how))
        if args:
            return (hidden, *args[1:]), options
        return args, {**options, "hidden_states": hidden}

    def ended(_: Any, __: Any, given: Any) -> None:
        seen[-1].given = given[0].clone()

    def read_out(_: Any, args: Any, logits: Tensor) -> None:
        head.raw = logits.clone()

    def attending(view: KVView, layer: AttentionLayer, query: Tensor) -> Tensor:
        keys, value = view.arena(layer)
        one = seen[-1]
        one.layer, one.value = layer, value.clone()
        one.both = torch.cat((query.transpose(0, 1), keys), dim=1)
        found = attend(view, layer, query)
        one.attended = found.flatten(1).unsqueeze(0).clone()
        return found

    last = min(max_positions(model.config), 2**24) - 1
    positions = torch.linspace(0, last, _TOKENS, device=device).long()
    hooks = [
        model.lm_head.register_forward_pre_hook(lambda _, args: (_all_magnitudes(args[0]),)),
        model.lm_head.register_forward_hook(read_out),
    ]
    if getattr(core, "rotary_emb", None) is not None:
        hooks.append(core.rotary_emb.register_forward_hook(embedded, with_kwargs=True))
    for layer in core.layers:
        hooks.append(layer.self_attn.register_forward_pre_hook(began, with_kwargs=True))
        hooks.append(layer.self_attn.register_forward_hook(ended))
    try:
        view = ProbeView(device, _TOKENS)
        view.begin(0, _TOKENS)
        tokens = torch.arange(_TOKENS, device=device) * 7919 + 11
        tokens %= core.embed_tokens.num_embeddings
        few = len(_MAGNITUDES)
        opaque = OpaqueView(view, attending)
        head.logits = run_packed(model, tokens, positions, opaque, few).logits
    finally:
        for hook in hooks:
            hook.remove()
    return seen, head


def _layer_shape(layer: Any, seen: _Seen, alike: dict[Any, bool]) -> LayerShape | None:
    """Return the shape of a layer, or None if no candidate computes its attention.

    `alike` has, by kind, the gated MLPs that compute what their linear layers and activation do.
    Others run as they are.
    """
    attention, mlp, both, value = layer.self_attn, _mlp(layer), seen.both, seen.value
    before, after, between, after_mlp = (
        getattr(layer, name) if name else None for name in _NORM_PLACES[_norm_names(layer)]
    )
    kv_heads = value.shape[1]
    shape = LayerShape(
        attention=seen.layer,
        module=attention,
        projections=_named(attention, _PROJECTIONS),
        heads=both.shape[1] - kv_heads,
        kv_heads=kv_heads,
        head_dim=both.shape[2],
        head_norms=_all(attention, _named(attention, _HEAD_NORMS)),
        normed_last=False,
        rotation=None,
        before=before,
        after_attention=after,
        between=between,
        after_mlp=after_mlp,
        is_parallel=before is not None and between is None,
        multiplier=float(getattr(layer, "residual_multiplier", 1.0)),
        mlp=mlp,
        gated=_gated(mlp) if _is_gated(mlp, seen.hidden, alike) else (),
    )
    linears = _all(attention, shape.projections)
    qkv = torch.cat([linear(seen.hidden)[0] for linear in linears], dim=-1)
    if qkv.shape[1] != both[0].numel() + value[0].numel() or value.shape[2] != shape.head_dim:
        return None
    parts = qkv.view(_TOKENS, -1, shape.head_dim)
    given, values = parts[:, : both.shape[1]], parts[:, both.shape[1] :]
    output = attention.o_proj(seen.attended)
    if not torch.equal(values, value) or not torch.equal(output, seen.given):
        return None
    turned = _turned(shape, given, seen)
    return next((found for found, got in turned if _is_same(got, both)), None)


def _turned(shape: LayerShape, both: Tensor, seen: _Seen) -> Iterator[tuple[LayerShape, Tensor]]:
    """Yield every candidate, with its result for queries and keys as they were projected."""
    normed = shape.normed_heads(lambda norm: norm.forward)
    rotations: Iterable[Rotation] = ()
    if seen.angles is not None:
        ropes = getattr(shape.module.config, "rope_parameters", None) or {}
        rotations = candidates(seen.angles[0].shape[-1], seen.embedding, ropes, shape.heads)
    for rotation in (None, *rotations):
        for is_last in (False, True) if normed else (False,):
            x = normed(both) if normed and not is_last else both
            if rotation is not None:
                if rotation.size > shape.head_dim:
                    continue
                cos, sin = seen.angles
                table = rotation.table(cos, sin.clone(), seen.positions)
                x = rotation.operator(shape.head_dim)(x, *table)
            x = normed(x) if normed and is_last else x
            yield replace(shape, rotation=rotation, normed_last=is_last), x


def _is_gated(mlp: Any, x: Tensor, alike: dict[Any, bool]) -> bool:
    """Return whether a gated MLP computes what its linear layers and activation do.

    It is compared once for each kind: a class and all its own settings.
    """
    names = _gated(mlp)
    if not names:
        return False
    plain = {name: each for name, each in vars(mlp).items() if not name.startswith("_")}
    own = [*plain.values(), *mlp.parameters(recurse=False), *mlp.buffers(recurse=False)]
    values = (each if isinstance(each, int | float | str) else id(each) for each in own)
    kind = (type(mlp), names, tuple(plain), tuple(values))
    if kind not in alike:
        *up, down = _all(mlp, names)
        gate, factor = (one(x) for one in up) if len(up) > 1 else up[0](x).chunk(2, dim=-1)
        y, given = down(_activation(mlp)(gate) * factor), mlp(x)
        alike[kind] = isinstance(given, Tensor) and _is_same(given, y)
    return alike[kind]


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _on_logits(model: Any) -> Operator | None:
    divisor = getattr(model.config, "logits_scaling", None)
    factor = getattr(model.config, "logit_scale", None)
    cap = getattr(model.config, "final_logit_softcapping", None)
    if divisor is not None:
        return lambda logits: logits.div_(divisor)
    if factor is not None:
        return lambda logits: logits.mul_(factor)
    if cap is not None:
        return lambda logits: logits.div_(cap).tanh_().mul_(cap)
    return None
