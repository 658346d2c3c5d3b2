"""Attention plug-in: one code path for every architecture that `transformers` dispatches.

Contract: all tokens of a pass, of all requests, go through a model as one pack of `T` tokens
(`input_ids [1, T]`). For each layer the plug-in writes the pack's keys and values into the KV view
that it is given, and attends with the model's kernels (`modelpool.attention.backend`). It knows the
KV store only as the `KVView` protocol. No mask function is registered for its name: `transformers`
then skips its own mask building, which would look for packed sequences and synchronise with the
device.

Not here: where keys and values are stored and which of them are valid (`statemgr`).
"""

from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from modelpool.attention.kv_view import Attend, AttentionLayer, KVView
from modelpool.attention.latent import latent_heads
from modelpool.errors import UnsupportedAttention

ATTENTION_NAME = "specrouter_packed"

# Arguments of models that have no effect on attention over a view.
_HARMLESS = frozenset(
    {
        "cache_position",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


class OpaqueView:
    """Wrapper that hides a view from `accelerate`, whose `send_to_device` would copy it.

    `attend` is the function that attends over the view.
    """

    __slots__ = ("attend", "view")

    def __init__(self, view: KVView, attend: Attend) -> None:
        self.view = view
        self.attend = attend


_HANDED_OVER: ContextVar[OpaqueView | None] = ContextVar("packed_kv", default=None)


def run_packed(
    model: nn.Module,
    tokens: Tensor,  # [T]
    positions: Tensor,
    view: OpaqueView,
    logits_to_keep: Tensor | int,
    **asked: Any,
) -> Any:
    """Return the output of a model whose attention is the plug-in.

    A context variable also holds the view, for layers that are not given the keyword arguments of
    the forward (StableLM's).
    """
    token = _HANDED_OVER.set(view)
    try:
        return model(
            input_ids=tokens.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=logits_to_keep,
            packed_kv=view,
            **asked,
        )
    finally:
        _HANDED_OVER.reset(token)


def packed_attention_forward(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, head_dim]
    key: Tensor,  # [1, kv_heads, T, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [heads] attention sinks
    packed_kv: OpaqueView | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Write the pack's keys and values, then attend; return [1, T, heads, head_dim].

    Raises:
        UnsupportedAttention: an argument that is not known to be harmless has a value.
    """
    number = int(module.layer_idx)  # type: ignore[arg-type]
    unknown = [k for k, v in options.items() if v is not None and k not in _HARMLESS]
    if not getattr(module, "is_causal", True):
        unknown.append("both directions")
    if attention_mask is not None:
        unknown.append("a mask of its own")
    if dropout:
        unknown.append("dropout")
    if unknown:
        asked = ", ".join(sorted(unknown))
        raise UnsupportedAttention(f"layer {number}: its attention needs {asked}")
    packed_kv = packed_kv or _HANDED_OVER.get()
    if packed_kv is None:
        raise UnsupportedAttention(f"layer {number}: there is no view of keys and values")
    view = packed_kv.view
    view.write(number, key[0].transpose(0, 1), value[0].transpose(0, 1))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = AttentionLayer(number, scale, sliding_window, softcap, s_aux)
    latents = latent_heads(module)
    if latents is None:
        read = packed_kv.attend(view, layer, query[0])
    else:
        read = latents.of_heads(packed_kv.attend(view, layer, latents.of_latents(query[0])))
    # Contiguous like the output of SDPA in transformers: some models take a view of it.
    return read.unsqueeze(0).contiguous(), None


AttentionInterface.register(ATTENTION_NAME, packed_attention_forward)
