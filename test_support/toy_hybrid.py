"""A hybrid of Llama's attention and a toy recurrent layer: running averages of values.

Per channel, with a decay that each token has of its own: state = decay * state + (1 - decay) * v,
output = state * q. Without the engine it computes a plain loop over the whole text, whatever cache
it is given; that is the reference which served texts are compared with.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from modelpool.attention.kv_view import KVView
from modelpool.mixers.registry import Mixer, name_of, register_mixer
from modelpool.recurrent import RecurrentKind, StatePart, Tensors

RECURRENT = "linear_attention"


class ToyHybridConfig(LlamaConfig):  # type: ignore[no-untyped-call]
    model_type = "toy_hybrid"


class RunningAverage(RecurrentKind):
    """The kind: its state is `[size]`, and an entry is a token's decay and what it adds."""

    name = "toy-average-1"

    def __init__(self, size: int) -> None:
        self.parts = (StatePart((size,)),)

    def read(self, state: Tensors, token: Tensors) -> tuple[Tensor, Tensors]:
        query, value, decay = token
        added = (1 - decay) * value
        return query * (state[0] * decay + added), (decay, added)

    def advance(self, state: Tensors, entry: Tensors) -> None:
        state[0].mul_(entry[0]).add_(entry[1])


class ToyAverage(nn.Module):
    """In the place of attention."""

    def __init__(self, config: ToyHybridConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, size = layer_idx, config.hidden_size
        self.q_proj, self.v_proj, self.g_proj, self.out_proj = (
            nn.Linear(size, size, bias=False) for _ in range(4)
        )
        self.kind = RunningAverage(size)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """[B, T, size], from the texts' beginnings on."""
        tokens = self.project(hidden_states)
        state, outputs = [torch.zeros_like(hidden_states[:, 0])], []
        for index in range(hidden_states.shape[1]):
            output, entry = self.kind.read(state, [one[:, index] for one in tokens])
            self.kind.advance(state, entry)
            outputs.append(output)
        return self.out_proj(torch.stack(outputs, dim=1)), None

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_proj(hidden), self.v_proj(hidden), torch.sigmoid(self.g_proj(hidden) + 1)


class AverageOfPacks:
    """Implements `Arithmetic`."""

    def project(self, module: ToyAverage, hidden: Tensor) -> list[Tensor]:
        return [one[0] for one in module.project(hidden)]

    def mix(self, module: ToyAverage, view: KVView, projected: Sequence[Tensor]) -> Tensor:
        return view.scan(module.layer_idx, module.kind, projected)


class ToyMixer(Mixer):
    def forward(self, *given: Any, **named: Any) -> Any:
        return super().forward(*given, **named), None


class ToyHybridForCausalLM(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    config_class = ToyHybridConfig

    def __init__(self, config: ToyHybridConfig) -> None:
        super().__init__(config)
        for index, kind in enumerate(config.layer_types):
            if kind == RECURRENT:
                self.model.layers[index].self_attn = ToyAverage(config, index)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, input_ids: Tensor, logits_to_keep: int | Tensor = 0, **given: Any) -> Any:
        cache = given.pop("past_key_values", None)
        if cache is None:
            return super().forward(input_ids, logits_to_keep=logits_to_keep, **given)
        known = getattr(cache, "toy_tokens", input_ids[:, :0])
        cache.toy_tokens = torch.cat((known, input_ids), dim=1)
        output = super().forward(cache.toy_tokens, use_cache=False)
        output.logits = output.logits[:, known.shape[1] :]
        return output


def layer_types(layers: int) -> list[str]:
    """Recurrent ones around attention, so that attention is 1, 3, 5 of them."""
    return [(RECURRENT, "full_attention")[layer % 2] for layer in range(layers)]


AutoConfig.register(ToyHybridConfig.model_type, ToyHybridConfig)
AutoModelForCausalLM.register(ToyHybridConfig, ToyHybridForCausalLM)
register_mixer(
    ToyMixer(ToyHybridConfig.model_type, RECURRENT, name_of(ToyAverage), AverageOfPacks())
)
