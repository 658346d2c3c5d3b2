"""A stand-in for FlashInfer's wrapper, on a CPU, in any precision.

It attends as the FA2 kernels do by what a plan says, and its plan has their mistake: with a packed
mask it counts bits where bytes are read, unless it is told otherwise (FlashInfer's #2201).
"""

import torch
from torch import Tensor


class FakeWrapper:
    _mask_indptr_buf: Tensor | None = None

    def __init__(self) -> None:
        self.plans = self.runs = 0

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        sm_scale: float = 1.0,
        logits_soft_cap: float = 0.0,
        q_data_type: torch.dtype = torch.float16,
    ) -> None:
        arrays = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert {(one.dtype, one.device.type) for one in arrays} == {(torch.int32, "cpu")}
        assert page_size == 1
        assert causal == (packed_custom_mask is None)
        self.plans += 1
        lengths = paged_kv_indptr.diff() - 1 + paged_kv_last_page_len
        bits = torch.cumsum(qo_indptr.diff() * lengths, 0)
        self._mask_indptr_buf = None if causal else torch.cat((bits.new_zeros(1), bits))
        self._mask = packed_custom_mask
        self._queries, self._starts = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self._pages = paged_kv_indices.long()
        self._shape = num_qo_heads, num_kv_heads, head_dim_qk
        self._scale, self._cap, self._dtype = sm_scale, logits_soft_cap, q_data_type

    def run(self, query: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        self.runs += 1
        heads, kv_heads, dim = self._shape
        assert query.shape == (self._queries[-1], heads, dim)
        assert query.is_contiguous()
        assert query.dtype == self._dtype
        assert all(part.shape[1:] == (1, kv_heads, dim) for part in cache)
        rows = range(len(self._queries) - 1)
        return torch.cat([self._row(row, query, cache) for row in rows])

    def _row(self, row: int, query: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        heads, kv_heads, _ = self._shape
        own = query[self._queries[row] : self._queries[row + 1]].transpose(0, 1)
        pages = self._pages[self._starts[row] : self._starts[row + 1]]
        keys, values = (
            part[pages, 0].transpose(0, 1).repeat_interleave(heads // kv_heads, 0) for part in cache
        )
        scores = own @ keys.transpose(1, 2) * self._scale
        if self._cap:
            scores = self._cap * torch.tanh(scores / self._cap)
        seen = self._seen(row, own.shape[1], len(pages))
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        found: Tensor = weights @ values
        return found.transpose(0, 1)

    def _seen(self, row: int, queries: int, length: int) -> Tensor:
        if self._mask is None:
            return torch.ones(queries, length).tril(length - queries).bool()
        assert self._mask_indptr_buf is not None
        assert self._mask_indptr_buf.dtype == torch.int32
        start = int(self._mask_indptr_buf[row])
        offset = torch.arange(queries * length)
        byte = self._mask[(start + offset // 8).clamp(max=len(self._mask) - 1)]
        return ((byte >> (offset % 8)) & 1).bool().view(queries, length)
