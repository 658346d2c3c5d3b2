"""Registry of the recurrent layers that are served, by their class.

Contract: a mixer is a class of modules that computes a recurrent layer. It is registered for one
type of model, with a forward that uses the view of the pack (`KVView.scan`) in place of its own.
Layers that are not registered are refused. Between its linear layers a token has the same bits with
any neighbours in a pass: this is tried when a model is loaded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from modelpool.attention.kv_view import KVView
from modelpool.errors import UnsupportedAttention
from modelpool.mixers import deltanet, mamba2, short_conv
from modelpool.probe import ProbeView
from modelpool.recurrent import RecurrentLayer, StateKey

_TRIAL_TOKENS = 33  # with three heads, vector code computes some elements and scalar code others


class Arithmetic(Protocol):
    """Arithmetic of a layer over a pack, around its state."""

    def project(self, module: Any, hidden: Tensor, /) -> Sequence[Tensor]:
        """Apply linear layers to [1, T, hidden]; return the inputs of `mix`, [T, ...] each."""

    def mix(self, module: Any, view: KVView, projected: Sequence[Tensor], /) -> Tensor:
        """Return [T, channels], the input of the module's `out_proj`."""


@dataclass(frozen=True)
class Mixer:
    """A class of modules, with its forward over packs.

    Attributes:
        model_type: type of the configurations whose layers of `layer_type` it computes.
        module: module and name of its class, which is imported only with its models.
    """

    model_type: str
    layer_type: str
    module: str
    arithmetic: Arithmetic

    def forward(self, module: Any, hidden_states: Tensor, packed_kv: Any, **_: Any) -> Any:
        """Run in place of the module's own forward; `packed_kv` is an `OpaqueView`."""
        projected = self.arithmetic.project(module, hidden_states)
        mixed = self.arithmetic.mix(module, packed_kv.view, projected)
        return module.out_proj(mixed.to(hidden_states.dtype)).unsqueeze(0)


_MIXERS: dict[str, Mixer] = {}


def register_mixer(mixer: Mixer) -> None:
    """Register a mixer, so that models with such layers are served."""
    _MIXERS[mixer.module] = mixer


def recurrent_types(config: Any) -> frozenset[str]:
    """Return the `layer_types` of a configuration for which mixers are registered."""
    kind = getattr(config, "model_type", None)
    return frozenset(mixer.layer_type for mixer in _MIXERS.values() if mixer.model_type == kind)


def use_mixers(model: nn.Module) -> None:
    """Make the registered mixers of a model use the view of a pack.

    Raises `UnsupportedAttention` for one whose convolution is not followed by SiLU.
    """
    for module in model.modules():
        mixer = _MIXERS.get(name_of(type(module)))
        if mixer is None:
            continue
        activation = getattr(module, "activation", "silu")
        if activation not in ("silu", "swish"):
            kind = type(module).__name__
            raise UnsupportedAttention(f"its {kind} applies {activation}; only silu is known")
        module.forward = partial(mixer.forward, module)


def name_of(module: type[nn.Module]) -> str:
    """Return the name of a class in the form of `Mixer.module`."""
    return f"{module.__module__}.{module.__qualname__}"


@torch.inference_mode()
def moving_layer(model: nn.Module, hidden_size: int) -> int | None:
    """Return the first recurrent layer in which a token's bits depend on its neighbours, or None.

    One layer of each kind and size is tried, with random inputs.
    """
    tried = set[str]()
    for module in model.modules():
        mixer, form = _MIXERS.get(name_of(type(module))), repr(module)
        if mixer is None or form in tried:
            continue
        tried.add(form)
        like = next(module.parameters())
        chance = torch.Generator().manual_seed(0)
        hidden = torch.randn(1, _TRIAL_TOKENS, hidden_size, generator=chance).to(like)
        projected = mixer.arithmetic.project(module, hidden)
        whole, alone = (ProbeView(like.device, _TRIAL_TOKENS) for _ in range(2))
        whole.begin(0, _TRIAL_TOKENS)
        wanted, got = mixer.arithmetic.mix(module, whole, projected), []
        for at in range(_TRIAL_TOKENS):
            alone.begin(at, at + 1)
            parts = [each[at : at + 1].clone() for each in projected]
            got.append(mixer.arithmetic.mix(module, alone, parts))
        if not torch.equal(wanted, torch.cat(got)):
            return int(module.layer_idx)  # type: ignore[arg-type]
    return None


def unserved_layer(config: Any, seen: Mapping[StateKey, RecurrentLayer]) -> str | None:
    """Return the reason why a layer of a recurrent type would not be served, or None.

    `seen`: states of the layers that scanned.
    """
    scanned, types = {layer for layer, _ in seen}, recurrent_types(config)
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind in types and layer not in scanned:
            return f"layer {layer}: its {kind} is computed by no module that is known"
    return None


def _register(arithmetic: Arithmetic, layer_type: str, modules: Mapping[str, str]) -> None:
    """Register mixers; `modules` has the class of the layers by type of the model."""
    for kind, name in modules.items():
        folder = kind.removesuffix("_text")
        module = f"transformers.models.{folder}.modeling_{folder}.{name}"
        register_mixer(Mixer(kind, layer_type, module, arithmetic))


_register(
    deltanet,
    "linear_attention",
    {
        "qwen3_5_text": "Qwen3_5GatedDeltaNet",
        "qwen3_5_moe_text": "Qwen3_5MoeGatedDeltaNet",
        "qwen3_next": "Qwen3NextGatedDeltaNet",
    },
)
_register(short_conv, "conv", {"lfm2": "Lfm2ShortConv", "lfm2_moe": "Lfm2MoeShortConv"})
_register(
    mamba2,
    "linear_attention",
    {
        "granitemoehybrid": "GraniteMoeHybridMambaLayer",
        "bamba": "BambaMixer",
        "nemotron_h": "NemotronHMamba2Mixer",
    },
)
_register(mamba2, "hybrid", {"falcon_h1": "FalconH1Mixer"})
