"""Attention with FlashInfer's kernels, for CUDA: an arena is a paged cache with one-slot pages.

Contract: attention over a pack is planned once for each kind of layer, and all layers of the kind
run with that plan. Texts are causal; trees and windows are bits over all slots of a row
(`modelpool.attention.pages`), because the windows of the kernels depend on a token's index among
the queries, which in a tree is not its depth. FA2 is therefore requested: only its kernels take
masks. Where the keys of a row are split depends on the other rows in the pass, and so do the last
bits.

The class used is `BatchPrefillWithPagedKVCacheWrapper` of FlashInfer 0.6.2 to 0.7.2. A plan copies
from pinned memory of its wrapper, so a wrapper plans again only after that copy.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from modelpool.attention.kv_view import AttentionLayer, KVView
from modelpool.attention.pages import PackRows, PageTable, is_causal, packed_mask
from modelpool.attention.path import PathLayout, pairs_of
from modelpool.errors import UnsupportedAttention
from modelpool.in_flight import InFlight, Mark, mark_on

WORKSPACE_BYTES = 2**27  # per device, for sums of split keys; FlashInfer recommends this size
_WRAPPERS = 8  # at most for a kind of layer; each takes 8 MiB on the device and 8 MiB pinned


class Wrapper(Protocol):
    """The used part of `BatchPrefillWithPagedKVCacheWrapper`."""

    @property
    def plan(self) -> Callable[..., None]: ...

    def run(self, query: Tensor, cache: tuple[Tensor, Tensor], /) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """Properties of layers that share a plan."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None


def pages_of(view: KVView) -> PackRows:
    """Return the rows of a view's pack for paged attention, one object for each pack."""
    return PackRows.of(view.pack)


class PagedAttention:
    """Implementation of `Attention` for one model."""

    def __init__(
        self,
        make_wrapper: Callable[[torch.device], Wrapper],
        mark: Callable[[torch.device], Mark] = mark_on,
    ) -> None:
        self._make_wrapper = make_wrapper
        self._mark = mark
        self._wrappers: dict[_Kind, InFlight[Wrapper]] = {}
        self._rows: PackRows | None = None  # rows of the planned pack
        self._planned: dict[_Kind, tuple[Wrapper, Mark]] = {}  # the marks follow the plans' copies

    def attended(self, view: KVView) -> float:
        return pairs_of(view.pack)

    def __call__(self, view: KVView, layer: AttentionLayer, query: Tensor) -> Tensor:
        """Map queries [heads, T, head_dim] to outputs [T, heads, head_dim]."""
        keys, values = view.arena(layer)
        rows = view.layout(pages_of)
        heads, _, dim = query.shape
        window = layer.window
        if window is not None and window >= int(rows.lengths.max(initial=0)):
            window = None  # no text is longer than the window
        kind = _Kind(
            device=query.device,
            dtype=query.dtype,
            heads=heads,
            kv_heads=keys.shape[1],
            head_dim=dim,
            scale=layer.scale,
            window=window,
            softcap=layer.softcap,
        )
        wrapper = self._planned_for(view, kind)
        return wrapper.run(
            query.transpose(0, 1).contiguous(), (keys.unsqueeze(1), values.unsqueeze(1))
        )

    def _planned_for(self, view: KVView, kind: _Kind) -> Wrapper:
        rows = view.layout(pages_of)
        if rows is not self._rows:
            for before, planned in self._planned.items():
                self._wrappers[before].give_back(*planned)
            self._rows, self._planned = rows, {}
        if kind not in self._planned:
            wrappers = self._wrappers.setdefault(
                kind, InFlight(lambda: self._make_wrapper(kind.device), _WRAPPERS)
            )
            wrapper = wrappers.take()
            try:
                _plan(wrapper, view, kind)
            except BaseException:
                wrappers.give_back(wrapper, self._mark(kind.device))
                raise
            self._planned[kind] = wrapper, self._mark(kind.device)
        return self._planned[kind][0]


def _plan(wrapper: Wrapper, view: KVView, kind: _Kind) -> None:
    """Plan a pack for layers of one kind.

    Index arrays stay on the host, where FlashInfer reads them; it copies them itself.
    """
    rows = view.layout(pages_of)
    table, mask = PageTable.of(rows), None
    if not is_causal(rows, kind.window):
        mask = packed_mask(rows, table, view.layout(PathLayout).on(kind.device), kind.window)
    arrays = (table.query_starts, table.page_starts, table.pages, table.last_lengths)
    wrapper.plan(
        *map(torch.from_numpy, arrays),
        num_qo_heads=kind.heads,
        num_kv_heads=kind.kv_heads,
        head_dim_qk=kind.head_dim,
        page_size=1,
        packed_custom_mask=mask,
        causal=mask is None,
        sm_scale=kind.scale,
        logits_soft_cap=kind.softcap or 0.0,
        q_data_type=kind.dtype,
    )
    if mask is not None:
        _tell_bytes(wrapper, torch.from_numpy(table.mask_starts).to(kind.device, non_blocking=True))


def _tell_bytes(wrapper: Wrapper, mask_starts: Tensor) -> None:
    """Set the byte at which each row's mask begins.

    A plan with a packed mask counts bits where its kernels read bytes, so all rows but the first
    would read the bits of others (FlashInfer's #2201, open in 0.7.2).
    """
    if not hasattr(wrapper, "_mask_indptr_buf"):
        raise UnsupportedAttention("this version of flashinfer keeps its masks otherwise")
    wrapper._mask_indptr_buf = mask_starts


def flashinfer_attention() -> PagedAttention:
    """Import FlashInfer, which takes seconds, and return its attention.

    Kernels that were not installed with it are compiled at their first use, which takes minutes.
    """
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    workspaces: dict[torch.device, Tensor] = {}

    def make_wrapper(device: torch.device) -> Wrapper:
        if device not in workspaces:
            workspaces[device] = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        made: Wrapper = BatchPrefillWithPagedKVCacheWrapper(
            workspaces[device], "NHD", backend="fa2"
        )
        return made

    return PagedAttention(make_wrapper)
