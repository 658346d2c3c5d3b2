"""Which recurrent layers are served, each by its class.

Contract: a mixer is a class of modules that computes a recurrent layer. It is registered for one
type of model, with a forward that goes through the view of the pack (`KVView.scan`) in place of its
own. What is not registered is refused.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from modelpool.mixers import deltanet
from modelpool.recurrent import RecurrentLayer, StateKey


@dataclass(frozen=True)
class Mixer:
    """
    Attributes:
        model_type: of the configurations whose layers of `layer_type` it computes.
        module: module and name of its class, which is imported only with its models.
        forward: in place of the class's own, with the same arguments and `packed_kv`, an
            `OpaqueView`.
    """

    model_type: str
    layer_type: str
    module: str
    forward: Callable[..., Any]


_MIXERS: dict[str, Mixer] = {}


def register_mixer(mixer: Mixer) -> None:
    """Has models served that have such layers."""
    _MIXERS[mixer.module] = mixer


def recurrent_types(config: Any) -> frozenset[str]:
    """The `layer_types` of a configuration that mixers are registered for."""
    kind = getattr(config, "model_type", None)
    return frozenset(mixer.layer_type for mixer in _MIXERS.values() if mixer.model_type == kind)


def use_mixers(model: nn.Module) -> None:
    """Has the registered mixers of a model go through the view of a pack."""
    for module in model.modules():
        mixer = _MIXERS.get(name_of(type(module)))
        if mixer is not None:
            module.forward = partial(mixer.forward, module)


def name_of(module: type[nn.Module]) -> str:
    """As `Mixer.module` has it."""
    return f"{module.__module__}.{module.__qualname__}"


def unserved_layer(config: Any, seen: Mapping[StateKey, RecurrentLayer]) -> str | None:
    """Why a layer of a recurrent type would not be served, or None. `seen`: states of those that
    scanned."""
    scanned = {layer for layer, _ in seen}
    for layer, kind in _recurrent(config):
        if layer not in scanned:
            return f"layer {layer}: its {kind} is computed by no module that is known"
    return None


def _recurrent(config: Any) -> Iterator[tuple[int, str]]:
    types = recurrent_types(config)
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind in types:
            yield layer, kind


def _register(forward: Callable[..., Any], layer_type: str, modules: Mapping[str, str]) -> None:
    """`modules`: by type of the model, the class of its layers."""
    for kind, name in modules.items():
        folder = kind.removesuffix("_text")
        module = f"transformers.models.{folder}.modeling_{folder}.{name}"
        register_mixer(Mixer(kind, layer_type, module, forward))


_register(
    deltanet.forward,
    "linear_attention",
    {
        "qwen3_5_text": "Qwen3_5GatedDeltaNet",
        "qwen3_5_moe_text": "Qwen3_5MoeGatedDeltaNet",
        "qwen3_next": "Qwen3NextGatedDeltaNet",
    },
)
