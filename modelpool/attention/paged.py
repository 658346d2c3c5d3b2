"""Attention through FlashInfer's kernels, for CUDA: an arena is a paged cache with pages of a slot.

Contract: what a pack attends to is planned once for each kind of layer, and all layers of the kind
run by that plan. Texts are causal; trees and windows are bits over all slots of a row
(`modelpool.attention.pages`): the kernels' own windows go by a token's place among the queries,
which in a tree is not its depth. So FA2 is asked for, the only kernels that take masks. Where the
keys of a row are split depends on what is computed beside it, and with it the last bits.

What is called is `BatchPrefillWithPagedKVCacheWrapper`, as of FlashInfer 0.6.2 to 0.7.2. A plan
copies from pinned memory of its wrapper, so a wrapper plans again only when that was read.
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

WORKSPACE_BYTES = 2**27  # of a device, for sums of split keys: what FlashInfer recommends
_WRAPPERS = 8  # of a kind of layer, at most; each takes 8 MiB on the device and as much pinned


class Wrapper(Protocol):
    """What is used of `BatchPrefillWithPagedKVCacheWrapper`."""

    @property
    def plan(self) -> Callable[..., None]: ...

    def run(self, query: Tensor, cache: tuple[Tensor, Tensor], /) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """Layers that attend alike."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None


def pages_of(view: KVView) -> PackRows:
    """What attention by pages needs of a view; another for each pack."""
    return PackRows.of(view.pack)


class PagedAttention:
    """Implements `Attention`; of one model."""

    def __init__(
        self,
        make_wrapper: Callable[[torch.device], Wrapper],
        mark: Callable[[torch.device], Mark] = mark_on,
    ) -> None:
        self._make_wrapper = make_wrapper
        self._mark = mark
        self._wrappers: dict[_Kind, InFlight[Wrapper]] = {}
        self._rows: PackRows | None = None  # of the pack that is planned
        self._planned: dict[_Kind, tuple[Wrapper, Mark]] = {}  # marks: behind the plans' copies

    def attended(self, view: KVView) -> float:
        return pairs_of(view.pack)

    def __call__(self, view: KVView, layer: AttentionLayer, query: Tensor) -> Tensor:
        """[heads, T, head_dim] to [T, heads, head_dim]."""
        keys, values = view.arena(layer)
        rows = view.layout(pages_of)
        heads, _, dim = query.shape
        window = layer.window
        if window is not None and window >= int(rows.lengths.max(initial=0)):
            window = None  # nothing is as far away
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
    """Index arrays stay on the host, where FlashInfer reads them; it copies them by itself."""
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
    """Where each row's bits begin: a plan with a packed mask counts bits where its kernels read
    bytes, so all rows but the first would have others' bits (FlashInfer's #2201, open in 0.7.2)."""
    if not hasattr(wrapper, "_mask_indptr_buf"):
        raise UnsupportedAttention("this version of flashinfer keeps its masks otherwise")
    wrapper._mask_indptr_buf = mask_starts


def flashinfer_attention() -> PagedAttention:
    """Imports FlashInfer, which takes seconds. Its kernels are compiled at their first use, if they
    were not installed with it, which takes minutes."""
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
