"""ModelOutline: the data that a model stores for each token, found by a forward without weights.

Contract: the model is built on the meta device, whose tensors have shapes and no values, and reads
a few tokens through the engine's own attention. A model that the engine cannot serve exactly is
refused here, with the layer and the reason, before a byte of its weights is read or downloaded.
Besides the features that attention needs, `PlaceTracker` finds layers that attend with values that
depend on a token's place in the pack instead of its position: such a text would depend on its
neighbours. They are found at any scale, also if a forward of a few tokens would compute the same.

Not here: values. `PackedModel.wrap` compares those once the weights are loaded.
"""

import copy
import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel

from modelpool.attention.backend import Feature
from modelpool.attention.kv_view import AttentionLayer, KVLayer, KVView
from modelpool.attention.latent import use_latents
from modelpool.attention.packed import ATTENTION_NAME, OpaqueView, run_packed
from modelpool.checkpoint.architecture import ignored_window, refusal, undispatched
from modelpool.checkpoint.cache_dir import cache_dir, package_sources
from modelpool.checkpoint.json_cache import JsonCache
from modelpool.checkpoint.text_part import text_part
from modelpool.errors import UnsupportedAttention
from modelpool.fast.experts import can_quantise
from modelpool.mixers.registry import unserved_layer, use_mixers
from modelpool.place_tracker import PlaceTracker
from modelpool.probe import ProbeView
from modelpool.recurrent import RecurrentKind, RecurrentLayer, StateKey, Tensors

_TOKENS = 11  # a prime, which no dimension of a model is likely to be
_META = torch.device("meta")
_KV_FACTS = ("kv_heads", "head_dim", "value_dim", "is_latent", "source")


@dataclass(frozen=True)
class ModelOutline:
    """Shapes of the data that a model stores for tokens and rows.

    Attributes:
        recurrent_layers: the states that layers keep for each row.
        kv_layers: what a layer that attends stores for a token, by the layer's index.
        parameter_count: number of parameters of the class that would be loaded.
        features: features that its layers need from attention.
        has_plain_experts: some experts are in a form that is not quantised.
    """

    kv_layers: Mapping[int, KVLayer]
    recurrent_layers: Mapping[StateKey, RecurrentLayer]
    parameter_count: int
    features: frozenset[Feature] = frozenset()
    has_plain_experts: bool = False

    def to_json(self) -> Any:
        """Return what `of_json` reads; only for a model without recurrent layers."""
        return {
            "kv_layers": {
                str(number): {name: getattr(one, name) for name in _KV_FACTS}
                for number, one in self.kv_layers.items()
            },
            "parameter_count": self.parameter_count,
            "features": sorted(self.features),
            "has_plain_experts": self.has_plain_experts,
        }

    @classmethod
    def of_json(cls, kept: Any) -> "ModelOutline":
        return cls(
            kv_layers={
                int(number): KVLayer(device=_META, dtype=torch.float32, **facts)
                for number, facts in kept["kv_layers"].items()
            },
            recurrent_layers={},
            parameter_count=int(kept["parameter_count"]),
            features=frozenset(kept["features"]),
            has_plain_experts=bool(kept["has_plain_experts"]),
        )

    @property
    def kv_elements_per_token(self) -> int:
        return sum(layer.elements_per_token for layer in self.kv_layers.values())

    def state_bytes(self, dtype: str) -> int:
        """Return the bytes of a row's recurrent states, for a model in `dtype`."""
        loaded: torch.dtype = getattr(torch, dtype)
        return sum(layer.row_bytes(loaded) for layer in self.recurrent_layers.values())

    @property
    def head_dims(self) -> frozenset[int]:
        return frozenset(layer.head_dim for layer in self.kv_layers.values())


class UnservedModel(Exception):
    """The reason why a model cannot be served exactly."""


def outline_of(config: Any, trust_remote_code: bool = False) -> ModelOutline:
    """Return the outline of a model of this configuration, or of a composite's text part.

    Raises `UnservedModel`.
    """
    text = text_part(config).config
    reason = refusal(text)
    if reason is not None:
        raise UnservedModel(reason)
    return _outline_of(_Key(text.to_json_string(), text, trust_remote_code))


@dataclass(frozen=True)
class _Key:
    """A configuration that is compared by its text."""

    text: str
    config: Any = field(compare=False)
    trust_remote_code: bool = False

    def file_name(self) -> str:
        facts = (torch.__version__, transformers.__version__, package_sources(), self.text)
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


@lru_cache(maxsize=64)
def _outline_of(key: _Key) -> ModelOutline:
    """Return the outline as an earlier start has kept it, or try the model, half a second.

    Models of other packages than `transformers`, whose code may change, are tried each time.
    """
    is_from_release = not key.trust_remote_code and _is_of_transformers(key.config)
    cache, name = JsonCache(cache_dir() / "outlines", "outline"), key.file_name()
    kept = cache.load(name, ModelOutline.of_json) if is_from_release else None
    if kept is not None:
        return kept
    found = _found(key)
    if is_from_release and not found.recurrent_layers:
        cache.store(name, found.to_json())
    return found


def _is_of_transformers(config: Any) -> bool:
    if getattr(config, "auto_map", None) or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return False
    kinds = (type(config), MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    return all(kind.__module__.startswith("transformers.") for kind in kinds)


def _found(key: _Key) -> ModelOutline:
    try:
        with _quiet(), torch.inference_mode():
            model = _built(key)
            windows, outline = _tried(model)
    except UnsupportedAttention as error:
        raise UnservedModel(str(error)) from error
    except Exception as error:  # any error of a model's own code
        reason = f"a trial forward without weights failed: {type(error).__name__}: {error}"
        raise UnservedModel(reason) from error
    ignored = ignored_window(key.config, windows)
    if ignored is not None:
        raise UnservedModel(ignored)
    return outline


def _built(key: _Key) -> PreTrainedModel:
    """Build a model without weights, in float32.

    Another dtype would be set for the whole process meanwhile.
    """
    kind: Any = AutoModelForCausalLM
    with _META:
        model: PreTrainedModel = kind.from_config(
            copy.deepcopy(key.config), trust_remote_code=key.trust_remote_code, dtype=torch.float32
        )
    model.train(False)
    use_packed_attention(model)
    for part in model.modules():
        if isinstance(part, PreTrainedModel):  # a warning, for which it would read the tokens
            vars(part)["warn_if_padding_and_no_attention_mask"] = lambda *_: None
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")  # the others count tokens by expert
    return model


def _tried(model: PreTrainedModel) -> tuple[Mapping[int, int | None], ModelOutline]:
    if any(map(_counts_from_padding, model.named_modules())):
        raise UnsupportedAttention("its positions are counted from the padding token's id")
    tracker = PlaceTracker(_TOKENS)
    view = _OutlineView(tracker)
    view.begin(0, _TOKENS)
    positions = torch.arange(_TOKENS, device=_META)
    with tracker:
        opaque = OpaqueView(view, view.attend)
        logits = run_packed(model, positions, positions, opaque, positions).logits
    if tracker.depends(logits):
        raise UnsupportedAttention("its logits depend on a token's place in the pack")
    if not view.recurrent and not view.layers():
        raise UnsupportedAttention(undispatched(type(model)))
    unserved = unserved_layer(model.config, view.recurrent)
    if unserved is not None:
        raise UnsupportedAttention(unserved)
    return view.windows, ModelOutline(
        kv_layers=view.layers(),
        recurrent_layers=view.recurrent,
        parameter_count=sum(parameter.numel() for parameter in model.parameters()),
        features=frozenset(view.features),
        has_plain_experts=any(map(_are_plain_experts, model.modules())),
    )


def _counts_from_padding(named: tuple[str, nn.Module]) -> bool:
    """Return whether a row for padding is among those of positions, as in RoBERTa."""
    name, module = named
    is_table = isinstance(module, nn.Embedding) and name.endswith("position_embeddings")
    return is_table and module.padding_idx is not None


def _are_plain_experts(module: nn.Module) -> bool:
    down = getattr(module, "down_proj", None)
    return isinstance(down, nn.Parameter) and down.dim() == 3 and not can_quantise(module)


class _OutlineView(ProbeView):
    """View that learns shapes; the outputs of its attention have no values."""

    def __init__(self, tracker: PlaceTracker) -> None:
        super().__init__(_META, _TOKENS)
        self._tracker = tracker
        self._attended: set[int] = set()
        self.features: set[Feature] = set()

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._check_places(layer, key, value)
        if key.shape[-1] != value.shape[-1]:
            self.features.add("keys and values of two widths")
        with self._tracker.paused():
            super().write(layer, key, value)

    def scan(self, layer: int, kind: RecurrentKind, tokens: Tensors) -> Tensor:
        self._check_places(layer, *tokens)
        with self._tracker.paused():
            return super().scan(layer, kind, tokens)

    def attend(self, view: KVView, layer: AttentionLayer, query: Tensor) -> Tensor:
        self._check_places(layer.number, query)
        if layer.number in self._attended:  # both would have the same keys
            raise UnsupportedAttention(f"layer {layer.number} attends more than once in a forward")
        self._attended.add(layer.number)
        if layer.sinks is not None:
            self.features.add("attention sinks")
        _, value = self.arena(layer)
        return query.new_empty(query.shape[1], query.shape[0], value.shape[-1])

    def _check_places(self, layer: int, *parts: Tensor) -> None:
        if any(map(self._tracker.depends, parts)):
            reason = "what it attends with depends on a token's place in the pack, not its position"
            raise UnsupportedAttention(f"layer {layer}: {reason}")


def use_packed_attention(model: PreTrainedModel) -> None:
    """Switch a model's attention to the plug-in, and its recurrent layers to the view of a pack.

    Raises `UnsupportedAttention` if attention was not switched: an architecture that does not
    dispatch it only warns.
    """
    with _quiet():
        model.set_attn_implementation(ATTENTION_NAME)
    if model.config._attn_implementation != ATTENTION_NAME:
        raise UnsupportedAttention(undispatched(type(model)))
    use_latents(model)
    use_mixers(model)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress transformers' warnings about a model that is only tried."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
