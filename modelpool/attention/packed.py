"""The attention plug-in: one code path for every architecture that `transformers` dispatches.

Contract: all tokens of a step, of all requests, go through a model as one pack of `T` tokens
(`input_ids [1, T]`). For each layer the plug-in writes the pack's keys and values into the KV view
that it was handed, and attends with the model's kernels (`modelpool.attention.backend`). It knows
the KV store only as the `KVView` protocol. No mask function is registered for its name:
`transformers` then skips its own mask building, which would look for packed sequences and
synchronise with the device.

Not here: where keys and values live and which of them are valid (`statemgr`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from modelpool.attention.pages import PackRows
from modelpool.attention.path import KeyPaths, PackPlaces
from modelpool.errors import UnsupportedAttention
from modelpool.recurrent import RecurrentKind, Tensors

ATTENTION_NAME = "specrouter_packed"

# What models pass down that has no bearing on attention over a view.
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


OnDevice = Mapping[torch.device, Tensor]  # one tensor on each device that has layers


class QueryGroup(Protocol):
    """Requests whose queries are attended in one kernel call: B rows with Q queries each.

    The groups of a view stand in the order of the pack, and their tokens are all of it.
    """

    @property
    def rows(self) -> int: ...  # B, idle rows between used ones included

    @property
    def queries(self) -> int: ...  # Q, the most that any of the rows has

    @property
    def take(self) -> OnDevice | None: ...  # [B * Q] pack index; None: the pack as it stands

    @property
    def put(self) -> OnDevice | None: ...  # [n] index into B * Q of the group's real tokens


class KVView(Protocol):
    """What one forward pass sees of a model's KV store."""

    @property
    def groups(self) -> Sequence[QueryGroup]: ...

    @property
    def attended(self) -> float:
        """How much attention there is: pairs of query and slot, padding included."""

    def scan(self, layer: int, kind: RecurrentKind, tokens: Tensors) -> Tensor:
        """Runs a recurrent layer over the pack: each token reads the state of the text before it.

        `tokens`: [T, ...] each, what `kind` reads of them. Returns [T, ...].
        """

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Stores the pack's keys and values, each [T, kv_heads, head_dim]."""

    def read(self, layer: int, group: Any) -> tuple[Tensor, Tensor]:
        """Keys and values of the group's rows, each [B, kv_heads, S, head_dim]."""

    def mask(
        self,
        group: Any,  # one of `groups`
        repeat: int,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Additive mask [B, 1, repeat * Q, S]; `window` counts positions, own one included."""

    def arena(self, layer: int, window: int | None) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, each [slots, kv_heads, head_dim], for `key_paths`."""

    def slots(self, device: torch.device) -> Tensor:
        """[T] int64, where in an arena the pack's keys and values go."""

    def key_paths(self, device: torch.device) -> KeyPaths:
        """Where the keys of the pack's tokens lie in an arena on a device."""

    @property
    def places(self) -> PackPlaces:
        """What `slots` and `key_paths` say, on the host."""

    @property
    def pack_rows(self) -> PackRows:
        """The pack's rows, for `arena`; the same object for all layers, another for each pack."""


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """How one layer of a model attends."""

    number: int
    scale: float  # of the scores
    window: int | None = None  # of positions, the own one included
    softcap: float | None = None


# A view, a layer, and a pack's queries [heads, T, head_dim], to [T, heads, head_dim].
Attend = Callable[[KVView, AttentionLayer, Tensor], Tensor]


class OpaqueView:
    """Hides a view from `accelerate`, whose `send_to_device` copies whatever has `.to`.

    `attend`: the kernels that attend over it.
    """

    __slots__ = ("attend", "view")

    def __init__(self, view: KVView, attend: Attend) -> None:
        self.view = view
        self.attend = attend


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
    packed_kv: OpaqueView | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Writes, then attends. Returns [1, T, heads, head_dim].

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
    if packed_kv is None:
        reason = "its attention is given no keyword arguments of the forward"
        raise UnsupportedAttention(f"layer {number}: {reason}")
    view = packed_kv.view
    view.write(number, key[0].transpose(0, 1), value[0].transpose(0, 1))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = AttentionLayer(number, scale, sliding_window, softcap)
    # As SDPA of transformers returns it: some models take a view of it.
    return packed_kv.attend(view, layer, query[0]).unsqueeze(0).contiguous(), None


AttentionInterface.register(ATTENTION_NAME, packed_attention_forward)
