"""The tensors of a Llama checkpoint, as llama.cpp names and lays them out.

llama.cpp rotates neighbouring pairs of a head's values (2i, 2i + 1), `transformers` halves of it
(i, i + d/2). So the rows of the query and key projections change places within each head.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from modelpool.errors import ConfigError
from modelpool.inflate.llama_sizes import LlamaShape

FIELD = "export-gguf"  # of what is refused
_OF_A_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True)
class Source:
    """A tensor of the checkpoint. `heads`: its rows are those of so many rotated heads."""

    name: str
    heads: int = 0

    def laid_out(self, tensor: Tensor) -> Tensor:
        return rotated_pairs(tensor, self.heads) if self.heads else tensor


def sources(shape: LlamaShape) -> dict[str, Source]:
    """By llama.cpp's names, in their order."""
    found = {"token_embd.weight": Source("model.embed_tokens.weight")}
    heads = {"self_attn.q_proj": shape.query_heads, "self_attn.k_proj": shape.kv_heads}
    for layer in range(shape.layers):
        for name, written in _OF_A_LAYER.items():
            source = Source(f"model.layers.{layer}.{name}.weight", heads.get(name, 0))
            found[f"blk.{layer}.{written}.weight"] = source
    found["output_norm.weight"] = Source("model.norm.weight")
    if not shape.tied:
        found["output.weight"] = Source("lm_head.weight")
    return found


def check_names(wanted: Mapping[str, Source], present: Iterable[str]) -> None:
    """Raises `ConfigError` for a tensor that is missing, or that nothing would be made of."""
    names = {source.name for source in wanted.values()}
    known = set(present)
    for name in sorted(names - known):
        raise ConfigError(FIELD, f"the checkpoint has no tensor {name}")
    for name in sorted(known - names):
        # A tied head may be stored; older checkpoints have the rotation's frequencies.
        if name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq"):
            raise ConfigError(FIELD, f"tensor {name} has no place in llama.cpp's llama")


def rotated_pairs(tensor: Tensor, heads: int) -> Tensor:
    """[heads * d, ...]: within each head, row i of the first half goes to 2i, of the second to
    2i + 1."""
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotation's parameters, as `transformers` 5 or older versions write them."""
    parameters = config.get("rope_parameters")
    if parameters is not None:
        return dict(parameters)
    scaling = dict(config.get("rope_scaling") or {})
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    return {"rope_theta": config.get("rope_theta", 10_000.0), **scaling, "rope_type": kind}
